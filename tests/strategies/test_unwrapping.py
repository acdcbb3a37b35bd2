"""`unwrap_model` finds the user's module in whatever trains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from accelight.state import reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, unwrap_model
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


class Manual(TinyModule):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        return loss


class Unwrapping(Callback):
    def __init__(self) -> None:
        self.found: tuple[bool, bool] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        outer: Any = trainer.strategy.model
        self.found = outer is pl_module, unwrap_model(outer) is pl_module


def _unwrap(options: dict[str, Any], module: type[TinyModule]) -> tuple[bool, bool] | None:
    strategy: Any = "ddp"
    if "zero_stage" in options:
        strategy = AccelDeepSpeedStrategy(**options)
    elif options:
        strategy = AccelFSDPStrategy(**options)
    unwrapping = Unwrapping()
    trainer = quiet_trainer(strategy, 2, max_epochs=1, limit_train_batches=1, callbacks=[unwrapping])
    trainer.fit(module(Case(), Outcome()), rank_loader(2))
    reset_state()
    return unwrapping.found


@pytest.mark.parametrize(
    ("options", "module"),
    [
        ({"fsdp_version": 1}, TinyModule),
        ({"fsdp_version": 1}, Manual),
        ({"fsdp_version": 2}, TinyModule),
        ({"zero_stage": 2}, TinyModule),
        ({}, TinyModule),
    ],
    ids=["fsdp1", "fsdp1-manual", "fsdp2", "deepspeed", "ddp"],
)
def test_the_module_is_found_in_what_trains_it(options: dict[str, Any], module: type[TinyModule]) -> None:
    assert run_on_ranks(2, _unwrap, options, module, timeout_s=180) == [(False, True)] * 2


def test_what_nobody_wrapped_is_returned_as_it_is() -> None:
    plain = nn.Linear(1, 1)
    assert unwrap_model(plain, keep_fp32_wrapper=False) is plain
    parallel = nn.DataParallel(plain)
    assert unwrap_model(parallel) is plain


def test_compiled_models_stay_compiled_unless_told_otherwise() -> None:
    plain = nn.Linear(1, 1)
    compiled: Any = torch.compile(plain)
    assert unwrap_model(compiled) is compiled
    assert unwrap_model(nn.DataParallel(compiled)) is compiled
    assert unwrap_model(nn.DataParallel(compiled), keep_torch_compile=False) is plain
    assert unwrap_model(compiled, keep_torch_compile=False) is plain
    assert unwrap_model(torch.compile(nn.DataParallel(plain))) is plain  # type: ignore[arg-type]
