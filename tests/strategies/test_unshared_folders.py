"""Folders that nodes do not share: no checkpoint that lacks what a node has, and an error that says where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from accelight.state import PartialState
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.common import checkpoint_files
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

WAYS = ("fsdp1", "fsdp1-local", "fsdp2", "fsdp2-later", "fsdp2-safetensors", "zero2")


def _strategy(way: str) -> Any:
    if way == "zero2":
        return AccelDeepSpeedStrategy(zero_stage=2)
    kind = "local_state_dict" if way == "fsdp1-local" else "sharded_state_dict"
    return AccelFSDPStrategy(fsdp_version=int(way[4]), state_dict_type=kind, auto_wrap_policy="no_wrap")


def _save(way: str, shared: str) -> str:
    """Save where each process has a folder of its own, as a node has; return the error."""
    rank, start, patience = PartialState().process_index, Path.cwd(), checkpoint_files.SEEN_WITHIN_S
    own = Path(shared, f"node{rank}")
    own.mkdir()
    if rank == 1:  # what a killed save has left there
        (own / ".saved.ckpt.unfinished").mkdir()
        (own / ".model.safetensors.unfinished").touch()
    try:
        trainer = quiet_trainer(_strategy(way), 2, max_steps=1, callbacks=[])
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
        if way == "fsdp2-later":
            trainer.save_checkpoint(Path(shared, "first.ckpt"))
        checkpoint_files.SEEN_WITHIN_S = 0.3
        os.chdir(own)
        strategy: Any = trainer.strategy
        save = strategy.save_safetensors if way == "fsdp2-safetensors" else trainer.save_checkpoint
        with pytest.raises(RuntimeError) as caught:
            save("model.safetensors" if way == "fsdp2-safetensors" else "saved.ckpt")
        os.chdir(start)
        left = {path.name for path in own.iterdir()}
        assert rank == 1 or not left, left
        trainer.save_checkpoint(Path(shared, "after.ckpt"))  # in one that they share
        return str(caught.value)
    finally:
        os.chdir(start)
        checkpoint_files.SEEN_WITHIN_S = patience


@pytest.mark.core("fsdp2-later", "zero2", "fsdp2-safetensors")
@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_a_node_does_not_see_is_an_error_naming_the_process(way: str, tmp_path: Path) -> None:
    for error in run_on_ranks(2, _save, way, str(tmp_path)):
        assert "process 1: RuntimeError: " in error
        assert (
            "each process writes its part of a checkpoint into one shared folder. Save to a file system that all"
            in error
        )
    assert not list(tmp_path.rglob("saved.ckpt"))
    assert not list((tmp_path / "after.ckpt").rglob(".accelight-shared-*"))
