"""Learning rates under accumulation are Accelerate's, whichever value ``adjust_scheduler`` has."""

from __future__ import annotations

from typing import Any

import accelerate
import accelerate.state
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import GradientAccumulationPlugin, GradientState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import NUM_MICRO_BATCHES, Case, Outcome, TinyModule, quiet_trainer, rank_loader

NUM_STEPS = 2
RATES = [1.0, 0.5, 0.5, 1 / 3, 1 / 3, 0.25, 0.2]
"""After each micro-batch; the last window of the epoch has one."""


def _schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (step + 1))


class Scheduled(TinyModule):
    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _schedule(optimizer), "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:  # the Trainer advances schedules after the hooks of a batch's end
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def _under_the_trainer(kind: str, adjust: bool) -> tuple[list[float], bool]:
    plugin = GradientAccumulationPlugin(num_steps=NUM_STEPS, adjust_scheduler=adjust)
    strategy: Any = (
        AccelDeepSpeedStrategy(zero_stage=2, gradient_accumulation=plugin)
        if kind == "deepspeed"
        else AccelFSDPStrategy(fsdp_version=2, gradient_accumulation=plugin)
    )
    module = Scheduled()
    quiet_trainer(strategy, 1, max_epochs=1).fit(module, rank_loader(1))
    told = GradientState().adjust_scheduler
    reset_state()
    return module.rates, told


def _by_accelerate(adjust: bool) -> tuple[list[float], int]:
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=NUM_STEPS, adjust_scheduler=adjust)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, data = nn.Linear(1, 1), TensorDataset(torch.ones(NUM_MICRO_BATCHES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepared = accelerator.prepare(model, optimizer, _schedule(optimizer), DataLoader(data, batch_size=1))
    model, optimizer, scheduler, loader = prepared
    rates = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return rates, scheduler.scheduler._step_count


def test_accelerates_flag_changes_nothing() -> None:
    """Not even the scheduler's private count, which is all that its wrapper would touch."""
    adjusted, plain = (run_on_ranks(1, _by_accelerate, adjust)[0] for adjust in (True, False))
    assert adjusted == plain == (pytest.approx(RATES), len(set(RATES)))


@pytest.mark.parametrize("adjust", [True, False])
@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_rates_follow_optimizer_steps_as_accelerates_do(kind: str, adjust: bool) -> None:
    [(rates, told)] = run_on_ranks(1, _under_the_trainer, kind, adjust)
    assert rates == pytest.approx(RATES)
    assert told is adjust
