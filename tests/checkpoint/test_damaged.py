"""Checkpoints that are incomplete, inconsistent or point elsewhere: an error that names the place, and no output."""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelight.checkpoint import CheckpointError, merge_fsdp_weights
from tests.checkpoint import damage

Change = Callable[[Any], object]


def assert_refused(folder: Path, output: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        merge_fsdp_weights(folder, output)
    assert not output.exists()


# --- the metadata


def _chunk(metadata: Any, fqn: str = "model.a") -> Any:
    return metadata.state_dict_metadata[fqn].chunks[0]


def _two_chunks(metadata: Any, start: int) -> None:
    """Say that 'a' (3 x 4) consists of rows 0 to 2 and a second chunk from ``start`` on, in the same record."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    entry = metadata.state_dict_metadata["model.a"]
    index, info = damage.index_of(metadata, "model.a"), damage.storage_of(metadata, "model.a")
    entry.chunks.append(ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((3, 4))))
    metadata.storage_data[replace_index(index, (start, 0))] = info
    entry.size = torch.Size((start + 3, 4))


def replace_index(index: Any, offset: tuple[int, ...]) -> Any:
    return type(index)(index.fqn, offset, index.index)


def _set(name: str, value: Any) -> Change:
    return lambda metadata: setattr(damage.storage_of(metadata, "model.a"), name, value)


def _state_dict(name: str, value: Any) -> Change:
    return lambda metadata: setattr(metadata.state_dict_metadata["model.a"], name, value)


def _properties(dtype: Any) -> Change:
    return lambda metadata: setattr(metadata.state_dict_metadata["model.a"].properties, "dtype", dtype)


METADATA_CASES: dict[str, tuple[Change, str]] = {
    "dtype": (_properties(torch.float16), r"'model\.a' is stored as float32, but \.metadata says float16"),
    "quantized dtype": (_properties(torch.quint8), r"asks for torch\.quint8|not allowed in a checkpoint"),
    "shape": (_state_dict("size", torch.Size((4, 4))), r"'model\.a' of shape \[4, 4\] has 16 elements, .* hold 12"),
    "chunk size": (
        lambda m: setattr(_chunk(m), "sizes", torch.Size((2, 4))),
        r"stored with shape \[3, 4\], but \.metadata says \[2, 4\]",
    ),
    "chunk offset": (
        lambda m: setattr(_chunk(m), "offsets", torch.Size((1, 0))),
        r"names no file for the chunk of 'model\.a' at \[1, 0\]",
    ),
    "number of dimensions": (_state_dict("size", torch.Size((12,))), r"outside the tensor's shape \[12\]"),
    "gap": (lambda m: _two_chunks(m, 5), r"has 32 elements, but its 2 chunks hold 24"),
    "overlap": (lambda m: _two_chunks(m, 2), r"overlapping chunks: \[0, 0\] of size \[3, 4\] in .*, and \[2, 0\]"),
    "no chunks": (_state_dict("chunks", []), r"its 0 chunks hold 0"),
    "offset far away": (_set("offset", 2**40), r"should end at byte 1099511\d+, but the file has"),
    "offset overflow": (_set("offset", 2**63 - 10), r"offset is 9223372036854775798, expected 0 to"),
    "offset negative": (_set("offset", -5), r"offset is -5, expected 0 to"),
    "offset no number": (_set("offset", "0"), r"offset should be int, found str"),
    "offset truth": (_set("offset", True), r"offset should be int, found bool"),
    "offset beside": (_set("offset", 7), r"records of .* overlap|does not end like a zip|no zip|not its header"),
    "length overflow": (_set("length", 2**70), r"length is 1180591620717411303424"),
    "length short": (_set("length", 40), r"does not end like a zip archive of torch\.save"),
    "length tiny": (_set("length", 3), r"a record of 3 bytes is too short"),
    "path out": (
        _set("relative_path", "../other/__0_0.distcp"),
        r"'\.\./other/.*', which is not a plain path",
    ),
    "path absolute": (_set("relative_path", "/etc/passwd"), r"'/etc/passwd', which is not a plain path"),
    "path empty": (_set("relative_path", ""), r"'', which is not a plain path"),
    "path backslash": (_set("relative_path", "..\\x"), r"not a plain path"),
    "path zero": (_set("relative_path", "a\0b"), r"not a plain path"),
    "path of a folder": (_set("relative_path", "."), r"not a (plain path|regular file)"),
    "path no text": (_set("relative_path", 3), r"relative_path should be str, found int"),
    "path missing": (_set("relative_path", "__7_0.distcp"), r"needs the file '__7_0\.distcp', not found in"),
    "transforms no text": (_set("transform_descriptors", [3]), r"transform should be str, found int"),
    "transform unknown": (_set("transform_descriptors", ["stream.rot13/1"]), r"stream\.rot13"),
    "storage gone": (lambda m: setattr(m, "storage_data", {}), r"names no file for the chunk of 'model\.a'"),
    "storage no dict": (lambda m: setattr(m, "storage_data", []), r"storage_data should be dict, found list"),
    "state dict gone": (lambda m: setattr(m, "state_dict_metadata", None), r"state_dict_metadata should be dict"),
    "chunks no list": (_state_dict("chunks", None), r"chunks should be list, found NoneType"),
    "size no size": (_state_dict("size", (3, 4)), r"size should be Size, found tuple"),
    "properties gone": (_state_dict("properties", None), r"properties should be Properties, found NoneType"),
    "name no text": (
        lambda m: m.state_dict_metadata.update({3: _entry(m)}),
        r"entry's name should be str, found int",
    ),
    "entry of another kind": (
        lambda m: m.state_dict_metadata.update(x=3),
        r"'x' should be TensorStorage, found int",
    ),
    "planner data": (lambda m: setattr(m, "planner_data", 3), r"planner_data should be dict, found int"),
    "planner paths": (lambda m: setattr(m, "planner_data", {"model.a": 3}), r"the path of 'model\.a' is 3"),
    "same names": (
        lambda m: setattr(m, "planner_data", {"model.a": ("model", "x"), "model.b": ("model", "x")}),
        r"two entries are named 'x': 'model\.a' and 'model\.b'",
    ),
}


def _entry(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.a"]


@pytest.mark.parametrize("name", METADATA_CASES)
def test_metadata_that_cannot_be(tmp_path: Path, name: str) -> None:
    change, match = METADATA_CASES[name]
    folder = damage.good(tmp_path / "in")
    damage.edit_metadata(folder, change)
    assert_refused(folder, tmp_path / "out", match)


def test_a_negative_size(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in", a=torch.ones(3, 4))
    data = (folder / ".metadata").read_bytes()
    small = b"K\x03K\x04\x86"
    assert small in data
    (folder / ".metadata").write_bytes(data.replace(small, b"J" + struct.pack("<i", -3) + b"K\x04\x86"))
    assert_refused(folder, tmp_path / "out", r"a torch\.Size of \(-3, 4\)")


def test_a_size_that_overflows(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in", a=torch.ones(3, 4))
    data = (folder / ".metadata").read_bytes()
    huge = b"\x8a\x0a" + (2**75).to_bytes(10, "little")
    (folder / ".metadata").write_bytes(data.replace(b"K\x03K\x04\x86", huge + b"K\x04\x86"))
    assert_refused(folder, tmp_path / "out", r"a torch\.Size of \(37778931862957161709568, 4\)")


def test_a_chunk_listed_twice_is_one_replica(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    damage.edit_metadata(folder, lambda m: _entry(m).chunks.append(_chunk(m)))
    merge_fsdp_weights(folder, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a"], torch.arange(12.0).reshape(3, 4))


def test_two_records_for_one_chunk(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")

    def change(metadata: Any) -> None:
        index, info = damage.index_of(metadata, "model.a"), damage.storage_of(metadata, "model.a")
        twin = type(index)(index.fqn + "x", index.offset, index.index)
        metadata.storage_data[twin] = replace(info, offset=1)
        object.__setattr__(twin, "fqn", index.fqn)

    damage.edit_metadata(folder, change)
    assert_refused(folder, tmp_path / "out", r"two records for the chunk of 'model\.a'")


def test_records_that_share_bytes(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")

    def change(metadata: Any) -> None:
        first, second = (damage.storage_of(metadata, fqn) for fqn in ("model.a", "model.b"))
        later = max(first, second, key=lambda info: info.offset)
        later.offset -= 10

    damage.edit_metadata(folder, change)
    assert_refused(folder, tmp_path / "out", r"records of .* \(bytes \d+ to \d+\) and .* overlap")


# --- files


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert_refused(folder, tmp_path / "out", r"a link out of the checkpoint's folder to .*elsewhere")


def test_a_linked_folder_out_of_the_folder(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    (tmp_path / "elsewhere").mkdir()
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere/__0_0.distcp")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")

    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "sub/__0_0.distcp"

    damage.edit_metadata(folder, change)
    assert_refused(folder, tmp_path / "out", "a link out of the checkpoint's folder")


def test_a_link_inside_the_folder_and_a_linked_folder_are_fine(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    (folder / "__0_0.distcp").rename(folder / "real")
    (folder / "__0_0.distcp").symlink_to("real")
    (tmp_path / "linked").symlink_to(folder)
    merge_fsdp_weights(tmp_path / "linked", tmp_path / "out", verify=True)


def test_a_pipe_instead_of_a_file_does_not_hang(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    assert_refused(folder, tmp_path / "out", "which is not a regular file")


def test_a_file_of_another_process_missing(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    (folder / "__0_0.distcp").unlink()
    assert_refused(folder, tmp_path / "out", r"needs the file '__0_0\.distcp', not found .*the files of all processes")


def test_files_cut_off_anywhere(tmp_path: Path) -> None:
    """The file ends early, at every place that is special and many that are not."""
    folder = damage.good(tmp_path / "in")
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    for size in {*range(0, len(data), 97), len(data) - 1, len(data) - 22}:
        path.write_bytes(data[:size])
        assert_refused(folder, tmp_path / "out", r"__0_0\.distcp: tensor '.*should end at byte")


def test_metadata_cut_off_anywhere(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    path = folder / ".metadata"
    data = path.read_bytes()
    for size in {*range(0, len(data), 53), len(data) - 1}:
        path.write_bytes(data[:size])
        assert_refused(folder, tmp_path / "out", r"\.metadata")


def test_metadata_of_a_size_none_has(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    os.truncate(folder / ".metadata", 2**40)  # sparse: takes no room
    assert_refused(folder, tmp_path / "out", r"\.metadata has 1099511627776 bytes")


def test_a_record_damaged_anywhere(tmp_path: Path) -> None:
    """Whatever byte of a record's ends is flipped: an error, or the values as they are; never another size or dtype."""
    folder = damage.good(tmp_path / "in", a=torch.arange(12.0))
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    with zipfile.ZipFile(path) as record:
        start = record.getinfo("archive/data/0").header_offset
    values = data.index(torch.arange(12.0).numpy().tobytes(), start)
    for position in range(0, len(data), 3):
        if not values <= position < values + 48:
            path.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
            with contextlib.suppress(CheckpointError):
                merge_fsdp_weights(folder, tmp_path / "out")
                merged = load_file(tmp_path / "out/model.safetensors")["a"]
                assert merged.dtype == torch.float32
                assert merged.shape == (12,)


def test_a_record_damaged_behind_one_like_it(tmp_path: Path) -> None:
    """A record that begins as an earlier one is compared with it instead of parsed: the verdict must be the same."""
    folder = damage.good(tmp_path / "in", a=torch.arange(12.0), b=torch.arange(12.0))
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    first, second = (damage.place_of(folder, f"model.{name}") for name in "ab")
    values = second + data[second:].index(torch.arange(12.0).numpy().tobytes())
    for position in range(0, len(data) - second, 7):
        if not values <= second + position < values + 48:
            outcomes: list[object] = []
            for start in (first, second):
                at = start + position
                path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
                try:
                    merge_fsdp_weights(folder, tmp_path / "out")
                    outcomes.append(torch.equal(load_file(tmp_path / "out/model.safetensors")["b"], torch.arange(12.0)))
                except CheckpointError:
                    outcomes.append("refused")
            assert outcomes in ([True, True], ["refused", "refused"]), position


# --- records


def _record(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: damage.replace_record(folder, "model.a", change(damage.record_of(folder, "model.a")))


def _save(value: Any) -> Callable[[Path], None]:
    return _record(lambda _: damage.torch_record(value))


def _pickle(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(record: bytes) -> bytes:
        import io

        with zipfile.ZipFile(io.BytesIO(record)) as archive:
            data = archive.read("archive/data.pkl")
        assert old in data
        return damage.rebuild(record, data_pkl=data.replace(old, new))

    return _record(change)


RECORD_CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another dtype": (_save(torch.ones(3, 4, dtype=torch.int32)), r"stored as int32, but \.metadata says float32"),
    "another shape": (_save(torch.ones(4, 3)), r"stored with shape \[4, 3\], but \.metadata says \[3, 4\]"),
    "no tensor": (_save({"a": 1}), r"the record holds dict, not one tensor"),
    "several tensors": (_save([torch.ones(3, 4), torch.ones(2)]), r"the record holds list, not one tensor"),
    "a parameter": (_save(torch.nn.Parameter(torch.ones(3, 4))), r"asks for torch\._utils\._rebuild_parameter"),
    "a sparse tensor": (_save(torch.eye(3).to_sparse()), r"asks for torch\._utils\._rebuild_sparse_tensor"),
    "a lazy tensor": (_save(torch.ones(3, 4, dtype=torch.complex64).conj()), r"a lazy tensor.*resolve_conj"),
    "compressed": (_record(lambda record: damage.rebuild(record, zipfile.ZIP_DEFLATED)), r"is compressed, encrypted"),
    "no pickle": (
        _record(lambda record: damage.rebuild(record, data_pkl=None)),
        r"the record has no data\.pkl",
    ),
    "no data": (_record(lambda record: damage.rebuild(record, data_0=None)), r"the record has no archive/data/0"),
    "short data": (
        _record(lambda record: damage.rebuild(record, data_0=b"abcd")),
        r"has 4 bytes, but data\.pkl says 12",
    ),
    "big endian": (_record(lambda record: damage.rebuild(record, byteorder=b"big")), r"byte order b'big', only little"),
    "large pickle": (
        _record(lambda record: damage.rebuild(record, data_pkl=bytes(70_000))),
        r"data\.pkl of 70000 bytes",
    ),
    "not a zip": (_record(lambda _: b"\x80" * 5000), r"does not end like a zip"),
    "empty": (_record(lambda _: b""), r"a record of 0 bytes"),
    "with a comment": (_record(lambda record: record[:-2] + b"\x01\x00"), r"does not end like a zip"),
    "directory elsewhere": (
        _record(lambda r: r[:-6] + struct.pack("<L", 3) + r[-2:]),
        r"not a zip|compressed|points at",
    ),
    "directory outside": (_record(lambda r: r[:-6] + struct.pack("<L", 2**31) + r[-2:]), r"points at bytes 2147483648"),
    "directory huge": (
        _record(lambda r: r[:-10] + struct.pack("<L", 2**31) + r[-6:]),
        r"directory of 2147483648 bytes",
    ),
    "zip64 without": (
        _record(lambda r: damage.rebuild(r)[:-6] + b"\xff\xff\xff\xff" + damage.rebuild(r)[-2:]),
        r"zip64 directory of the record is missing",
    ),
    "storage key": (_pickle(b"\x00\x00\x000q", b"\x00\x00\x001q"), r"the record has no archive/data/1"),
    "storage kind": (_pickle(b"storage", b"Storage"), r"a storage that torch\.save does not write"),
    "storage size": (_pickle(b"K\x0c", b"K\x63"), r"has 48 bytes, but data\.pkl says 99 elements"),
    "strides beyond": (_pickle(b"K\x04K\x01\x86", b"K\x63K\x01\x86"), r"shape and strides reach element 201"),
    "strides fewer": (_pickle(b"K\x04K\x01\x86", b"K\x01\x85"), r"a tensor of shape"),
}


@pytest.mark.parametrize("name", RECORD_CASES)
def test_records_that_cannot_be(tmp_path: Path, name: str) -> None:
    change, match = RECORD_CASES[name]
    folder = damage.good(tmp_path / "in")
    change(folder)
    assert_refused(folder, tmp_path / "out", match)


def test_a_record_written_by_another_zip_program(tmp_path: Path) -> None:
    """Stored members are all that is asked for: the order and padding of the zip do not matter."""
    folder = damage.good(tmp_path / "in")
    damage.replace_record(folder, "model.a", damage.rebuild(damage.record_of(folder, "model.a")))
    merge_fsdp_weights(folder, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a"], torch.arange(12.0).reshape(3, 4))


def test_zip64_members(tmp_path: Path) -> None:
    """Sizes and positions beyond 4 GB are written as 64-bit extras; a small record may have them, too."""
    folder = damage.good(tmp_path / "in")
    record = damage.rebuild(damage.record_of(folder, "model.a"))
    damage.replace_record(folder, "model.a", _with_zip64_sizes(record))
    merge_fsdp_weights(folder, tmp_path / "out", verify=True)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a"], torch.arange(12.0).reshape(3, 4))


def _with_zip64_sizes(record: bytes) -> bytes:
    """Rewrite the central directory of a plain zip: every size and position as a zip64 extra, and a zip64 end."""
    count, _, start = struct.unpack_from("<HLL", record, len(record) - 12)
    entries, position = b"", start
    for _ in range(count):
        fields = list(struct.unpack_from("<4s6H3L5H2L", record, position))
        name = record[position + 46 : position + 46 + fields[10]]
        extra = struct.pack("<2H3Q", 1, 24, fields[9], fields[8], fields[16])
        position += 46 + fields[10] + fields[11] + fields[12]
        fields[8] = fields[9] = fields[16] = 0xFFFFFFFF
        fields[11], fields[12] = len(extra), 0
        entries += struct.pack("<4s6H3L5H2L", *fields) + name + extra
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(entries), start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + len(entries), 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return record[:start] + entries + end64 + locator + end


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda record: record.replace(b"PK\6\6", b"PK\6\5"), "zip64 directory of the record is damaged"),
        (lambda record: record.replace(struct.pack("<2H", 1, 24), struct.pack("<2H", 1, 8)), r"has no sizes|not a zip"),
        (
            lambda record: record.replace(struct.pack("<2H", 1, 24), struct.pack("<2H", 9, 24)),
            "member .* has no sizes",
        ),
    ],
)
def test_zip64_damaged(tmp_path: Path, change: Callable[[bytes], bytes], match: str) -> None:
    folder = damage.good(tmp_path / "in")
    record = _with_zip64_sizes(damage.rebuild(damage.record_of(folder, "model.a")))
    damage.replace_record(folder, "model.a", change(record))
    assert_refused(folder, tmp_path / "out", match)


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in", a=torch.randn(2000, 1000))

    def cut(done: int, total: int) -> None:
        os.truncate(folder / "__0_0.distcp", 4096)

    with pytest.raises(CheckpointError, match="was truncated while it was read"):
        merge_fsdp_weights(folder, tmp_path / "out", threads=1, progress=cut)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", [-64, -8, 1, 16])
@pytest.mark.parametrize("numel", [12, 100_000])
def test_a_wrong_length_of_the_names_before_a_members_bytes(tmp_path: Path, step: int, numel: int) -> None:
    """It moves all bytes of the tensor, and what lies before or behind them would be taken for values."""
    folder = damage.good(tmp_path / "in", a=torch.arange(float(numel)))
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        local = next(one.header_offset for one in archive.infolist() if one.filename.endswith("/data/0"))
    extra = int.from_bytes(data[local + 28 : local + 30], "little") + step
    data[local + 28 : local + 30] = max(extra, 0).to_bytes(2, "little")
    path.write_bytes(data)
    assert_refused(folder, tmp_path / "out", "data/0 should end at byte|data/0 has .* bytes from byte")


def test_weights_that_are_whole_already(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "in/pytorch_model.bin")
    message = r"pytorch_model\.bin is one file: there are no shards to merge or inspect\. torch\.load"
    assert_refused(tmp_path / "in", tmp_path / "out", message)
    assert_refused(tmp_path / "in/pytorch_model.bin", tmp_path / "out", message)
    (tmp_path / "in/model.safetensors").touch()
    assert_refused(tmp_path / "in", tmp_path / "out", r"model\.safetensors holds full weights")
