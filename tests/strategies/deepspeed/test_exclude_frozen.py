"""Checkpoints without what is frozen: smaller, and resumed by modules that bring the frozen weights themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accelight.checkpoint import inspect_checkpoint, merge_fsdp_weights
from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, whole_weights
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

FROZEN = ("model.embed.weight", "model.embed.bias", "model.blocks.0.linear.weight")


class Frozen(TinyModule):
    def __init__(self, *, emptied: bool = False) -> None:
        super().__init__(Case(epochs=1), Outcome())
        self.register_buffer("seen", torch.full((2,), 3.0))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in FROZEN)
            if emptied and name not in FROZEN:
                torch.nn.init.zeros_(parameter)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def strategy_for(stage: int, *, load_universal: bool = False) -> AccelDeepSpeedStrategy:
    return AccelDeepSpeedStrategy(
        hf_ds_config=ds_config(stage), exclude_frozen_parameters=True, load_universal=load_universal
    )


def train_and_resume(path: str, stage: int) -> dict[str, Tensor]:
    trainer, module = quiet_trainer(strategy_for(stage), 2, max_epochs=1), Frozen()
    trainer.fit(module, rank_loader(2))
    trainer.save_checkpoint(path)
    weights = whole_weights(module)
    again, resumed = quiet_trainer(strategy_for(stage), 2, max_epochs=1), Frozen(emptied=True)
    again.fit(resumed, rank_loader(2), ckpt_path=path)  # nothing is left to train
    torch.testing.assert_close(whole_weights(resumed), weights, rtol=0, atol=0)
    return weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_frozen_is_left_out(tmp_path: Path, stage: int) -> None:
    weights = run_on_ranks(2, train_and_resume, str(tmp_path / "saved"), stage)[0]
    report = merge_fsdp_weights(tmp_path / "saved", tmp_path / "merged")
    info = inspect_checkpoint(tmp_path / "saved")
    for skipped in (report.skipped, info.skipped):
        assert {name for name, why in skipped.items() if "save_trainable_only" in why} == set(FROZEN)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert sorted(merged) == sorted({"seen", *(f"model.{name}" for name in weights)} - set(FROZEN))
    for name in set(merged) - {"seen"}:
        assert torch.equal(merged[name], weights[name.removeprefix("model.")])


class FrozenAdam(Frozen):
    """What DeepSpeed's conversion of stage 3 knows."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)


def save(path: str) -> dict[str, Tensor]:
    trainer, module = quiet_trainer(strategy_for(3), 2, max_epochs=1), FrozenAdam()
    trainer.fit(module, rank_loader(2))
    trainer.save_checkpoint(path)
    return whole_weights(module)


def resume_elsewhere(path: str) -> dict[str, Tensor]:
    trainer, module = quiet_trainer(strategy_for(3, load_universal=True), 1, max_epochs=1), FrozenAdam(emptied=True)
    trainer.fit(module, rank_loader(1), ckpt_path=path)
    return whole_weights(module)


@pytest.mark.exhaustive
def test_another_number_of_processes_resumes(tmp_path: Path) -> None:
    weights = run_on_ranks(2, save, str(tmp_path / "saved"))[0]
    found = run_on_ranks(1, resume_elsewhere, str(tmp_path / "saved"), timeout_s=120)[0]
    torch.testing.assert_close(found, weights, rtol=0, atol=0)
