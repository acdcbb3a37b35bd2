"""Damage since a save: a resume names the process, the file and the tensor, and changes no weight."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from accelight.checkpoint import inspect_checkpoint, merge_fsdp_weights, read_manifest
from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

CASE = Case(optimizer="adamw")


def _save(path: str, options: dict[str, Any]) -> None:
    trainer = quiet_trainer(AccelFSDPStrategy(**options), 2, max_steps=2)
    trainer.fit(TinyModule(CASE, Outcome()), rank_loader(2))
    trainer.save_checkpoint(path)


def _resume(path: str, options: dict[str, Any]) -> str:
    trainer, module = quiet_trainer(AccelFSDPStrategy(**options), 2, max_steps=3), TinyModule(CASE, Outcome())
    try:
        trainer.fit(module, rank_loader(2), ckpt_path=path)
    except RuntimeError as error:
        assert not module.outcome.losses
        return str(error)
    return ""


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_sharded(engine: str, tmp_path: Path) -> None:
    options = ENGINES[engine]
    sharded = {**options, "state_dict_type": "sharded_state_dict"}
    for name in ("saved", "other"):
        run_on_ranks(2, _save, str(tmp_path / name), {**sharded, "async_save": name == "other"})
    saved = tmp_path / "saved"
    manifest = read_manifest(saved)
    assert manifest is not None
    assert set(manifest.digests) == {one.name for one in saved.iterdir()} - {"accelight.json"}
    assert inspect_checkpoint(saved).has_digests
    merge_fsdp_weights(saved, tmp_path / "out", verify=True)
    assert run_on_ranks(2, _resume, str(saved), options) == ["", ""]
    shard = saved / "__1_0.distcp"
    for name, position, words in (
        (".metadata", 500, ".metadata is damaged: its CRC-32 is"),
        ("meta.pt", 300, "meta.pt is damaged: its CRC-32 is"),
        (shard.name, _inside_a_tensor(shard), "process 1: CheckpointError: "),
    ):
        folder = tmp_path / f"damaged {name}"
        shutil.copytree(saved, folder)
        flip(folder / name, position)
        first, second = run_on_ranks(2, _resume, str(folder), options)
        assert first == second
        assert words in first
        assert f"{folder}/{name}" in first
    assert "the bytes of data/0 are damaged" in first
    assert "tensor 'optimizer_0." in first or "tensor 'model." in first or "tensor 'state_dict." in first


def _inside_a_tensor(path: Path) -> int:
    """Return the place of a byte of the largest tensor in a shard."""
    import io
    import zipfile

    data, start, best = path.read_bytes(), 0, (0, 0)
    while (start := data.find(b"PK\3\4", start)) >= 0:
        end = data.find(b"PK\5\6", start) + 22
        with zipfile.ZipFile(io.BytesIO(data[start:end])) as archive:
            for member in archive.infolist():
                if "/data/" in member.filename:
                    content = data.index(archive.read(member), start)
                    best = max(best, (member.file_size, content))
        start = end
    return best[1] + best[0] // 2


def test_full_and_local(tmp_path: Path) -> None:
    for engine, form, name in (
        ("fsdp2", "full_state_dict", "full"),
        ("fsdp1", "local_state_dict", "local/rank_00001_of_00002.pt"),
    ):
        options = {**ENGINES[engine], "state_dict_type": form}
        path = tmp_path / name.split("/")[0]
        run_on_ranks(2, _save, str(path), options)
        assert run_on_ranks(2, _resume, str(path), options) == ["", ""]
        flip(tmp_path / name, _inside_a_tensor(tmp_path / name))
        first, second = run_on_ranks(2, _resume, str(path), options)
        assert first == second
        assert f"{tmp_path / name}: the bytes of data/" in first
        assert "process" in first


def test_lightnings_own_checkpoints_have_checksums_too(tmp_path: Path) -> None:
    """They are torch's: nobody else need write them."""
    options = {**ENGINES["fsdp2"], "state_dict_type": "sharded_state_dict"}
    run_on_ranks(2, _save, str(tmp_path / "saved"), options)
    (tmp_path / "saved/accelight.json").unlink()
    shard = tmp_path / "saved/__0_0.distcp"
    flip(shard, _inside_a_tensor(shard))
    first, second = run_on_ranks(2, _resume, str(tmp_path / "saved"), options)
    assert first == second
    assert "the bytes of data/0 are damaged" in first
    assert run_on_ranks(2, _resume, str(tmp_path / "saved"), options, env={"ACCELIGHT_CHECK": "0"}) == ["", ""]
