"""What a run leaves to the process it ran in: nothing of the strategy's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.common.launch import SubprocessScriptLauncher
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


class Keeping(Callback):
    """Keeps the checkpoints that it is shown, as a callback that uploads them does."""

    def __init__(self) -> None:
        self.shown: list[tuple[set[str], dict[str, Any]]] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.shown.append((set(checkpoint), checkpoint))


def _save_and_compare(version: int, state_dict_type: str, path: str) -> list[tuple[set[str], set[str]]]:
    keeping = Keeping()
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type=state_dict_type)
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=1, callbacks=[keeping])
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(dist.get_world_size()))
    trainer.save_checkpoint(path)
    return [(before, set(checkpoint)) for before, checkpoint in keeping.shown]


@pytest.mark.parametrize(
    ("version", "state_dict_type"),
    [(1, "full_state_dict"), (1, "local_state_dict"), (2, "full_state_dict"), (2, "sharded_state_dict")],
)
def test_a_save_leaves_the_checkpoint_that_hooks_were_shown(tmp_path: Path, version: int, state_dict_type: str) -> None:
    """Weights are taken out of a sharded one while it is written, and random states are put in."""
    for shown in run_on_ranks(2, _save_and_compare, version, state_dict_type, str(tmp_path / "saved")):
        [(before, afterwards)] = shown
        assert "state_dict" in before
        assert afterwards == before


def _count_writes(path: str) -> int:
    with mock.patch("torch.save", wraps=torch.save) as save:
        _save_and_compare(2, "full_state_dict", path)
    return save.call_count


def test_a_process_that_is_alone_serialises_once(tmp_path: Path) -> None:
    """Whoever counts or replaces ``torch.save`` finds what Lightning's own strategies do."""
    assert run_on_ranks(1, _count_writes, str(tmp_path / "saved.ckpt")) == [1]


@pytest.mark.parametrize(("num_processes", "num_nodes", "expected"), [(1, 1, None), (1, 2, "1")])
def test_a_process_that_is_alone_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, num_processes: int, num_nodes: int, expected: str | None
) -> None:
    """Of two nodes with one process each, the second does not know its place without it."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    SubprocessScriptLauncher(LightningEnvironment(), num_processes, num_nodes)._call_children_scripts()
    assert os.environ.get("LOCAL_WORLD_SIZE") == expected
