"""Bit rot: whatever changes after a save is an error that names tensor and file, where it is read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from accelight.checkpoint import (
    CheckpointError,
    inspect_checkpoint,
    merge_fsdp_weights,
    read_manifest,
    verify_merged,
    write_manifest,
)
from accelight.checkpoint.formats.dcp import RecordReader
from accelight.checkpoint.formats.dcp_metadata import read_dcp_metadata
from accelight.checkpoint.formats.torch_save import directory_digest
from accelight.checkpoint.manifest import FileDigest
from tests.checkpoint import damage


def digests_of(folder: Path) -> dict[str, FileDigest]:
    """Return the digests of a folder with one shard, made without the code that saves."""
    shard, places = folder / "__0_0.distcp", read_dcp_metadata(folder / ".metadata").offsets["__0_0.distcp"]
    ends = [*places[1:], shard.stat().st_size]
    with shard.open("rb") as stream:
        records = [
            directory_digest(partial(os.pread, stream.fileno()), start, end - start, "")
            for start, end in zip(places, ends, strict=True)
        ]
    return {
        ".metadata": FileDigest.of((folder / ".metadata").read_bytes()),
        "__0_0.distcp": FileDigest.of_records(shard.stat().st_size, records),
    }


def good(folder: Path, value: float = 1.0) -> Path:
    damage.good(folder, a=torch.full((10, 10), value), b=torch.arange(5.0) * value)
    write_manifest(folder, model_prefix="model", digests=digests_of(folder))
    return folder


def flipped(path: Path, positions: range) -> Iterator[int]:
    """Flip a bit of each byte in turn, and bring it back."""
    data = path.read_bytes()
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        yield position
    path.write_bytes(data)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = good(tmp_path / "in")
    merge_fsdp_weights(folder, tmp_path / "out", verify=True)
    assert verify_merged(folder, tmp_path / "out").is_equal
    assert inspect_checkpoint(folder).has_digests
    told = "digests      the files match their digests; tensor data was not read"
    assert told in str(inspect_checkpoint(folder))
    content = json.loads((folder / "accelight.json").read_text())
    assert content["format_version"] == 2
    assert set(content["digests"][".metadata"]) == {"bytes", "crc32"}
    assert set(content["digests"]["__0_0.distcp"]) == {"bytes", "records"}


def test_any_byte_of_the_metadata(tmp_path: Path) -> None:
    folder = good(tmp_path / "in")
    digest = digests_of(folder)[".metadata"]
    path = folder / ".metadata"
    for position in flipped(path, range(path.stat().st_size)):
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged: its CRC-32 is"):
            read_dcp_metadata(path, digest)
        if position in (10, 700):
            for read in (inspect_checkpoint, lambda folder: merge_fsdp_weights(folder, tmp_path / "out")):
                with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
                    read(folder)
    with path.open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(CheckpointError, match=r"\.metadata has \d+ bytes, but accelight\.json says \d+: it is cut off"):
        inspect_checkpoint(folder)


def test_any_byte_of_a_shard(tmp_path: Path) -> None:
    """Every bit of a tensor is found; elsewhere what is not found does not matter."""
    folder = good(tmp_path / "in")
    merge_fsdp_weights(folder, tmp_path / "right")
    right = (tmp_path / "right/model.safetensors").read_bytes()
    path, digest = folder / "__0_0.distcp", digests_of(folder)["__0_0.distcp"]
    place = damage.place_of(folder, "model.a")
    record = damage.record_of(folder, "model.a")
    inside = place + record.index(torch.full((10, 10), 1.0).numpy().tobytes())
    found = dict.fromkeys(range(place, place + len(record)), False)
    for position in flipped(path, range(place, place + len(record))):
        fd = os.open(path, os.O_RDONLY)
        try:
            RecordReader(partial(os.pread, fd), str(path), path.stat().st_size).check(
                "model.a", place, len(record), digest.record(0)
            )
        except CheckpointError as error:
            found[position] = str(error).startswith(f"{path}: tensor 'model.a'")
        finally:
            os.close(fd)
    assert all(found[position] for position in range(inside, inside + 400))
    missed = [position for position in found if not found[position]]
    assert missed  # padding, versions
    for position in missed[:: len(missed) // 20 + 1]:
        for _ in flipped(path, range(position, position + 1)):
            merge_fsdp_weights(folder, tmp_path / "out", verify=True)
            assert (tmp_path / "out/model.safetensors").read_bytes() == right
    for _ in flipped(path, range(inside + 50, inside + 51)):
        match = r"__0_0\.distcp: tensor 'model\.a': the bytes of data/0 are damaged: their CRC-32 is .* torch recorded"
        with pytest.raises(CheckpointError, match=match):
            merge_fsdp_weights(folder, tmp_path / "new", verify=True)
        assert not (tmp_path / "new").exists()
        with pytest.raises(CheckpointError, match=match):
            verify_merged(folder, tmp_path / "right")


def test_a_file_of_another_save(tmp_path: Path) -> None:
    """Each of the files is right in itself."""
    folder, other = good(tmp_path / "in"), good(tmp_path / "other", value=2.0)
    shutil.copy(other / "__0_0.distcp", folder)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.\w': the record changed after the save"):
        merge_fsdp_weights(folder, tmp_path / "out")
    shutil.copy(other / ".metadata", folder)
    with pytest.raises(CheckpointError, match=r"\.metadata (is damaged|has \d+ bytes)"):
        merge_fsdp_weights(folder, tmp_path / "out")


def test_damage_in_one_of_many_like_records_is_found(tmp_path: Path) -> None:
    """Small records of one shape are compared with the first of them."""
    folder = damage.good(tmp_path / "in", **{f"w{number}": torch.full((3,), float(number)) for number in range(9)})
    write_manifest(folder, model_prefix="model", digests=digests_of(folder))
    merge_fsdp_weights(folder, tmp_path / "out", verify=True)
    path, start = folder / "__0_0.distcp", damage.place_of(folder, "model.w7")
    crc = start + damage.record_of(folder, "model.w7").index(b"PK\1\2", -400)
    for _ in flipped(path, range(crc + 300, crc + 301)):
        with pytest.raises(CheckpointError, match=r"tensor 'model\.w7'"):
            merge_fsdp_weights(folder, tmp_path / "new")


def test_a_checkpoint_without_digests_is_read(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in", a=torch.ones(50))
    assert not inspect_checkpoint(folder).has_digests
    assert "digests      none: changes since the save may go unnoticed" in str(inspect_checkpoint(folder))
    inside = damage.place_of(folder, "model.a") + damage.record_of(folder, "model.a").index(torch.ones(50).numpy())
    for _ in flipped(folder / "__0_0.distcp", range(inside + 3, inside + 4)):
        merge_fsdp_weights(folder, tmp_path / "out", verify=False)
        for verify in (None, True):
            with pytest.raises(CheckpointError, match="bytes of data/0 are damaged"):
                merge_fsdp_weights(folder, tmp_path / "out", verify=verify)
        for safe in (True, False):  # nothing is left of what was copied in the meantime
            with pytest.raises(CheckpointError, match="bytes of data/0 are damaged"):
                merge_fsdp_weights(folder, tmp_path / "none", safe_serialization=safe)
            assert not (tmp_path / "none").exists()


def test_where_torch_was_told_to_make_no_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder = good(tmp_path / "in")
    finally:
        torch.serialization.set_crc32_options(True)
    merge_fsdp_weights(folder, tmp_path / "out", verify=True)
    assert verify_merged(folder, tmp_path / "out").is_equal


def test_any_byte_of_the_manifest(tmp_path: Path) -> None:
    folder = good(tmp_path / "in")
    known = read_manifest(folder)
    path = folder / "accelight.json"
    for _ in flipped(path, range(path.stat().st_size)):
        with contextlib.suppress(CheckpointError):
            assert read_manifest(folder) == known
    content = json.loads(path.read_text())
    del content["crc32"]
    path.write_text(json.dumps(content | {"ties": {"c": "a"}}))
    found = read_manifest(folder)
    assert found is not None
    assert found.ties == {"c": "a"}


@pytest.mark.parametrize(
    ("digests", "match"),
    [
        ([], "digests must map"),
        ({"a": 1}, "a digest needs"),
        ({"a": {"bytes": 1}}, "a digest needs"),
        ({"a": {"bytes": -1, "crc32": "0"}}, "cannot be"),
        ({"a": {"bytes": "1", "crc32": "0"}}, "cannot be"),
        ({"a": {"bytes": 1, "crc32": 0}}, "are text"),
        ({"a": {"bytes": 1, "crc32": "x"}}, "invalid literal"),
        ({"a": {"bytes": 1, "records": "0x"}}, "non-hexadecimal"),
        ({"a": {"bytes": 1, "records": "00"}}, "cannot be"),
    ],
)
def test_digests_that_cannot_be(tmp_path: Path, digests: object, match: str) -> None:
    content = {"format_version": 2, "model_prefix": "model", "digests": digests}
    (tmp_path / "accelight.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=match):
        read_manifest(tmp_path)


def test_another_number_of_records(tmp_path: Path) -> None:
    folder = good(tmp_path / "in")
    digests = digests_of(folder)
    digests["__0_0.distcp"] = FileDigest.of_records(digests["__0_0.distcp"].num_bytes, [1])
    write_manifest(folder, model_prefix="model", digests=digests)
    with pytest.raises(CheckpointError, match=r"has 2 records in '__0_0\.distcp', but accelight\.json says 1"):
        merge_fsdp_weights(folder, tmp_path / "out")
