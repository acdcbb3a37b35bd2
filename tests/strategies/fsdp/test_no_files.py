"""Folders and FIFOs in the place of a checkpoint's files: a resume fails at once on all processes, and never waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

KINDS: dict[str, Callable[[Path], object]] = {"folder": Path.mkdir, "FIFO": os.mkfifo}


def _save(path: str, form: str) -> None:
    trainer = quiet_trainer(AccelFSDPStrategy(**ENGINES["fsdp1"], state_dict_type=form), 2, max_steps=1)
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    trainer.save_checkpoint(path)


def _resume(paths: dict[str, str]) -> dict[str, str]:
    told = {}
    for what, path in paths.items():
        trainer = quiet_trainer(AccelFSDPStrategy(**ENGINES["fsdp1"]), 2, max_steps=2)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2), ckpt_path=path)
        told[what] = str(caught.value)
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume(kind: str, tmp_path: Path) -> None:
    paths = {}
    run_on_ranks(2, _save, str(tmp_path / "saved"), "sharded_state_dict")
    run_on_ranks(2, _save, str(tmp_path / "local"), "local_state_dict")
    for number, name in enumerate((".metadata", "meta.pt", "__1_0.distcp", "rank_00001_of_00002.pt", "meta.pt")):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for file in (tmp_path / ("saved" if number < 3 else "local")).iterdir():
            os.link(file, folder / file.name)
        (folder / name).unlink()
        KINDS[kind](folder / name)
        paths[f"{number}/{name}"] = str(folder)
    if kind == "FIFO":
        os.mkfifo(tmp_path / "full.ckpt")
        paths["full.ckpt"] = str(tmp_path / "full.ckpt")
    for told in run_on_ranks(2, _resume, paths):
        for what, message in told.items():
            assert f"{tmp_path}/{what} is a {kind}, expected a file" in message, message
