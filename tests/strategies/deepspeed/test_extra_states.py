"""What modules keep beside tensors (``get_extra_state``) is saved and restored with every stage of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from accelight.checkpoint import merge_fsdp_weights
from accelight.state import reset_state
from accelight.strategies import AccelDeepSpeedStrategy, load_from_checkpoint
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config
from tests.strategies.extra_states import Holds
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

STAGES = (0, 1, 2, 3)
CHANGED = {"calls": 3, "seen": [1, {"scale": 2.5}]}


class Told(Holds, nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.held = {}


class Module(TinyModule):
    def __init__(self) -> None:
        super().__init__(Case(optimizer="adamw"), Outcome())
        self.told = Told()


def _trainer(stage: int | None, *, universal: bool = False, max_epochs: int = 1) -> Any:
    strategy: Any = "auto"
    if stage is not None:
        strategy = AccelDeepSpeedStrategy(hf_ds_config=ds_config(stage), load_universal=universal)
    return quiet_trainer(strategy, dist.get_world_size() if stage is not None else 1, max_epochs=max_epochs)


def _save(stages: tuple[int | None, ...], folder: str) -> None:
    for stage in stages:
        module, trainer = Module(), _trainer(stage)
        trainer.fit(module, rank_loader(dist.get_world_size()))
        module.told.held = CHANGED
        trainer.save_checkpoint(f"{folder}/{stage}")
        reset_state()


def _load(stage: int, path: str, how: str) -> Any:
    module, loader = Module(), rank_loader(dist.get_world_size())
    trainer = _trainer(stage, universal=how == "universal", max_epochs=2)
    if how == "validate":
        trainer.validate(module, loader, ckpt_path=path, verbose=False)
    else:
        trainer.fit(module, loader, ckpt_path=path)
    reset_state()
    return module.told.held


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of each stage, by two processes, and a full one of plain Lightning."""
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(2, _save, STAGES, str(folder), timeout_s=200)
    run_on_ranks(1, _save, (None,), str(folder))
    return folder


@pytest.mark.core("2-fit", "3-validate")
@pytest.mark.parametrize("how", ["fit", "validate"])
@pytest.mark.parametrize("stage", STAGES)
def test_extra_states_are_restored(stage: int, how: str, saved: Path) -> None:
    """Stage 3 could not be validated with one: an error, for DeepSpeed reads the partitions alone then."""
    assert run_on_ranks(2, _load, stage, f"{saved}/{stage}", how) == [CHANGED] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_extra_states_are_restored_on_another_number_of_processes(stage: int, saved: Path) -> None:
    """It was lost without a word."""
    assert run_on_ranks(1, _load, stage, f"{saved}/{stage}", "universal", timeout_s=200) == [CHANGED]


@pytest.mark.parametrize("how", ["fit", "validate"])
@pytest.mark.parametrize("stage", STAGES)
def test_it_comes_from_a_full_checkpoint(stage: int, how: str, saved: Path) -> None:
    """It was lost without a word."""
    assert run_on_ranks(2, _load, stage, f"{saved}/None", how) == [CHANGED] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_made_from_the_folder_has_it(stage: int, saved: Path) -> None:
    assert load_from_checkpoint(Module, saved / str(stage)).told.held == CHANGED


@pytest.mark.parametrize("stage", [2, 3])
def test_merged_weights_are_without_it(stage: int, saved: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(saved / str(stage), tmp_path, progress=False)
    weights = load_file(tmp_path / "model.safetensors")
    assert "told.weight" in weights
    assert not [name for name in weights if "extra" in name]
