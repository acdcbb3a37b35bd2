"""Damage since a save with ZeRO: a resume names the process and the file; so do the merge and the comparison."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from accelight.checkpoint import CheckpointError, inspect_checkpoint, merge_fsdp_weights, read_manifest
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, trainer_for
from tests.strategies.oracle import Case, Outcome, TinyModule, rank_loader

CASE = Case(optimizer="adamw", epochs=1)
OPTIMIZER = "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt"


def _save(path: Path) -> None:
    trainer = trainer_for(CASE, ds_config(2))
    trainer.fit(TinyModule(CASE, Outcome()), rank_loader(2))
    trainer.save_checkpoint(path)


def _resume(paths: list[Path]) -> list[str]:
    told = []
    for path in paths:
        with pytest.raises(RuntimeError) as caught:
            trainer_for(CASE, ds_config(2)).fit(TinyModule(CASE, Outcome()), rank_loader(2), ckpt_path=str(path))
        told.append(str(caught.value))
    return told


@pytest.mark.exhaustive
def test_a_resume_and_a_merge(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run_on_ranks(2, _save, saved)
    manifest = read_manifest(saved)
    assert manifest is not None
    assert set(manifest.digests) == {f"checkpoint/{one.name}" for one in (saved / "checkpoint").iterdir()}
    assert inspect_checkpoint(saved).has_digests
    merge_fsdp_weights(saved, tmp_path / "right", verify=True)
    damaged, swapped, piped = (tmp_path / name for name in ("damaged", "swapped", "piped"))
    for folder in (damaged, swapped, piped):
        shutil.copytree(saved, folder)
    _flip_weights(damaged / OPTIMIZER)
    shutil.copy(saved / OPTIMIZER.replace("rank_1", "rank_0"), swapped / OPTIMIZER)
    (piped / OPTIMIZER).unlink()
    os.mkfifo(piped / OPTIMIZER)
    first, second = run_on_ranks(2, _resume, [damaged, swapped, piped])
    assert first == second
    for message, folder, words in zip(
        first,
        (damaged, swapped, piped),
        ("the bytes of data/", "belongs to another save", "is a FIFO"),
        strict=True,
    ):
        assert message.startswith(f"loading {folder} failed.\nprocess")
        assert f"{folder / OPTIMIZER}" in message
        assert words in message
    with pytest.raises(CheckpointError, match=r"optim_states\.pt: the bytes of data/\d+ are damaged"):
        merge_fsdp_weights(damaged, tmp_path / "out", verify=True)
    with pytest.raises(CheckpointError, match=r"optim_states\.pt (changed after the save|has \d+ bytes)"):
        merge_fsdp_weights(swapped, tmp_path / "out")


def _flip_weights(path: Path) -> None:
    """Change a bit of each storage: a merge reads the weights alone."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if "/data/" in member.filename:
                data[data.index(b"PK\x07\x08", member.header_offset) - 1] ^= 1
    path.write_bytes(data)
