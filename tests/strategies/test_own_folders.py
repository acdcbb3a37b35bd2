"""Checkpoints of which each process writes its part into a folder of its own: together they are one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.common.checkpoint_files import in_own_folders
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

MANIFEST = "accelight.json"


def _strategy(kind: str, **more: Any) -> Any:
    if kind.startswith("zero"):
        return AccelDeepSpeedStrategy(zero_stage=int(kind[-1]), **more)
    if kind == "local":
        return AccelFSDPStrategy(fsdp_version=1, state_dict_type="local_state_dict", **more)
    return AccelFSDPStrategy(fsdp_version=int(kind[-1]), **{"state_dict_type": "sharded_state_dict", **more})


def _train(strategy: Any, epochs: int, ckpt_path: Path | None = None) -> Any:
    trainer = quiet_trainer(strategy, 2, max_epochs=epochs)
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return trainer


def _save(kind: str, folder: Path) -> list[str]:
    trainer = _train(_strategy(kind), 1)
    trainer.save_checkpoint(folder / "shared")
    own = folder / f"own-{dist.get_rank()}"
    for name in ("first", "second"):  # the second by the plan of an earlier save
        with in_own_folders():
            trainer.save_checkpoint(own / name)
    dist.barrier()
    trainer.save_checkpoint(folder / "after")
    return sorted(path.name for path in own.iterdir())


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _go_on(kind: str, folder: Path) -> float:
    trainer = _train(_strategy(kind), 2, folder)
    return float(trainer.lightning_module.outcome.losses[-1])


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "zero0", "zero2", "zero3"])
def test_the_folders_together_are_the_checkpoint(kind: str, tmp_path: Path) -> None:
    assert run_on_ranks(2, _save, kind, tmp_path) == [["first", "second"]] * 2
    shared, weights = tmp_path / "shared", {}
    expected = run_on_ranks(2, _go_on, kind, shared)
    for name in ("first", "second", "shared", "after"):
        joined = tmp_path / name
        if name in ("first", "second"):
            parts = [tmp_path / f"own-{rank}" / name for rank in range(2)]
            assert not _files(parts[0]) & _files(parts[1])
            for part in parts:
                shutil.copytree(part, joined, dirs_exist_ok=True)
            assert run_on_ranks(2, _go_on, kind, joined) == expected
        assert _files(joined) == _files(shared)
        digests = json.loads((joined / MANIFEST).read_text())["digests"]
        assert set(digests) == set(json.loads((shared / MANIFEST).read_text())["digests"])
        report = merge_fsdp_weights(joined, tmp_path / f"{name}-merged")
        weights[name] = load_file(tmp_path / f"{name}-merged" / report.files[0])
    for found in weights.values():
        assert sorted(found) == sorted(weights["shared"])
        assert all(torch.equal(found[name], tensor) for name, tensor in weights["shared"].items())


def _one_cannot(kind: str, folder: Path) -> tuple[str, list[str]]:
    trainer = _train(_strategy(kind), 1)
    own = folder / f"own-{dist.get_rank()}"
    if dist.get_rank() == 1:
        own.write_text("no folder")
    with in_own_folders(), pytest.raises(RuntimeError) as caught:
        trainer.save_checkpoint(own / "saved")
    return str(caught.value), sorted(path.name for path in own.iterdir()) if own.is_dir() else []


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("zero2", marks=pytest.mark.exhaustive)])
def test_one_that_cannot_write_is_named_on_all(kind: str, tmp_path: Path) -> None:
    for said, left in run_on_ranks(2, _one_cannot, kind, tmp_path):
        assert "process 1: " in said
        assert "own-1" in said
        assert not left


def _save_in_background(kind: str, folder: Path) -> None:
    class Saves(TinyModule):
        def on_train_epoch_end(self) -> None:
            with in_own_folders():
                self.trainer.save_checkpoint(folder / f"own-{dist.get_rank()}")

    trainer = quiet_trainer(_strategy(kind, async_save=True), 2, max_epochs=1)
    trainer.fit(Saves(Case(), Outcome()), rank_loader(2))
    trainer.save_checkpoint(folder / "shared")


def test_local_folders_of_saves_in_the_background(tmp_path: Path) -> None:
    run_on_ranks(2, _save_in_background, "local", tmp_path)
    found = [sorted(path.name for path in (tmp_path / f"own-{rank}").glob("rank_*")) for rank in range(2)]
    assert found == [["rank_00000_of_00002.pt"], ["rank_00001_of_00002.pt"]]


@pytest.mark.parametrize("kind", ["zero3", pytest.param("fsdp2", marks=pytest.mark.exhaustive)])
def test_folders_of_saves_in_the_background(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, _save_in_background, kind, tmp_path)
    for rank in range(2):
        shutil.copytree(tmp_path / f"own-{rank}", tmp_path / "joined", dirs_exist_ok=True)
    assert _files(tmp_path / "joined") == _files(tmp_path / "shared")
    shared, joined = (
        load_file(tmp_path / name / merge_fsdp_weights(tmp_path / name, tmp_path / name).files[0])
        for name in ("shared", "joined")
    )
    assert joined.keys() == shared.keys()
    assert all(torch.equal(joined[name], one) for name, one in shared.items())


def _save_in_process(folder: Path) -> None:
    class Saves(TinyModule):
        def on_train_epoch_end(self) -> None:
            with in_own_folders(), pytest.raises(ValueError, match="async_save='process' writes into one folder"):
                self.trainer.save_checkpoint(folder / f"own-{dist.get_rank()}")

    trainer = quiet_trainer(_strategy("fsdp2", async_save="process"), 2, max_epochs=1)
    trainer.fit(Saves(Case(), Outcome()), rank_loader(2))


def test_a_process_that_saves_needs_one_folder(tmp_path: Path) -> None:
    run_on_ranks(2, _save_in_process, tmp_path)
    assert not list(tmp_path.iterdir())
