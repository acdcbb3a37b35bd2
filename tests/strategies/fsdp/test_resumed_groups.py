"""Optimizers whose groups differ, with names of their own or tensors as learning rates, resume where they were."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from accelight.strategies import AccelFSDPStrategy, full_parameters
from tests.log_messages import log_messages
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


def _halves(model: Any, first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    rest = [*model.embed.parameters(), *model.head.parameters()]
    return [{"params": list(model.blocks.parameters()), **first}, {"params": rest, **second}]


OPTIMIZERS: dict[str, Any] = {
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.02),
    "amsgrad in one": lambda model: torch.optim.AdamW(_halves(model, {"amsgrad": True}, {"amsgrad": False}), lr=0.02),
    "momentum in one": lambda model: torch.optim.SGD(_halves(model, {"momentum": 0.9}, {}), lr=0.1),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.02), foreach=False),
}


class _Module(TinyModule):
    def __init__(self, kind: str) -> None:
        super().__init__(Case(), Outcome())
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = OPTIMIZERS[self.kind](self.model)
        return optimizer


def _fit(
    kind: str, engine: str, state: str, epochs: int, save_to: str | None = None, resume_from: str | None = None
) -> tuple[list[Tensor], list[str]]:
    strategy: Any = engine if engine == "ddp" else AccelFSDPStrategy(state_dict_type=state, **ENGINES[engine])
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=epochs)
    with log_messages("accelight", level=logging.WARNING) as warnings:
        module, loader = _Module(kind), rank_loader(dist.get_world_size())
        trainer.fit(module, loader, ckpt_path=resume_from, weights_only=True if resume_from else None)
    if save_to:
        trainer.save_checkpoint(save_to)
    with full_parameters(trainer.strategy, writeback=False) as weights:
        return [one.detach().clone() for one in weights.values()], warnings


@pytest.mark.core(
    "named-fsdp2-full", "amsgrad in one-fsdp2-sharded", "tensor lr-fsdp2-sharded", "momentum in one-fsdp2"
)
@pytest.mark.parametrize("state", ["sharded_state_dict", "full_state_dict"])
@pytest.mark.parametrize("engine", ["fsdp1_orig_params", "fsdp2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resume_continues(kind: str, engine: str, state: str, tmp_path: Any) -> None:
    saved = str(tmp_path / "saved.ckpt")
    first = "ddp" if state == "full_state_dict" else engine  # whose names and numbers are those of the plain optimizer
    run_on_ranks(2, _fit, kind, first, state, 1, saved)
    [(found, warnings), _] = run_on_ranks(2, _fit, kind, engine, state, 2, None, saved)
    [(expected, _), _] = run_on_ranks(2, _fit, kind, "ddp", state, 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # AdamW divides by small roots
    assert warnings == []
