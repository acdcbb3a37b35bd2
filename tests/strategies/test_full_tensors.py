"""``full_gradients()`` and ``full_parameters()``: ties, several modules, unreduced gradients, any strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.strategies import full_gradients, full_parameters
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer, strategy_named


class Block(nn.Sequential):
    """A unit."""


class Tied(LightningModule):
    """Scales tied gradients under one of their names, and reads them where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Sequential(nn.Linear(4, 4)), Block(nn.Linear(4, 4))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.get_parameter("0.weight")
        self.problems: list[str] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.head(self.second(self.first(batch[0]))).square().mean()

    def on_after_backward(self) -> None:
        if self.trainer.accumulate_grad_batches > 1:
            try:
                with full_gradients(self.trainer.strategy) as gradients:
                    self.problems.append(f"{len(gradients)} gradients")
            except RuntimeError as error:
                self.problems.append(str(error))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with full_gradients(self.trainer.strategy) as gradients:
            assert gradients["head.weight"] is gradients["first.0.weight"]
            gradients["first.0.weight"].mul_(0.1)
        for context in (full_gradients, full_parameters):
            for modules in ([self.first, self.second], [self.first, self.first]):
                try:
                    with context(self.trainer.strategy, modules) as found:
                        self.problems.append(f"{len(found)} tensors")
                except ValueError as error:
                    self.problems.append(str(error))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(engine: str, accumulate: int) -> tuple[dict[str, Tensor], list[str]]:
    strategy: Any = engine if engine == "ddp" else strategy_named(engine)
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_steps=1, accumulate_grad_batches=accumulate)
    module = Tied()
    data = torch.arange(32.0).reshape(8, 4) / 32
    trainer.fit(module, DataLoader(TensorDataset(data), 2))
    with full_parameters(trainer.strategy, writeback=False) as weights:
        return {name: one.detach().clone() for name, one in weights.items()}, module.problems


_SAME_NAME = "Two of the modules have a parameter named '0.weight': enter a context for each module."


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero2", "zero3"])
def test_tied_gradients_are_one_and_names_are_not_mixed_up(engine: str) -> None:
    expected, problems = run_on_ranks(2, _fit, "ddp", 1)[0]
    found = run_on_ranks(2, _fit, engine, 1)[0]
    torch.testing.assert_close(found[0], expected)
    assert found[1] == problems == [_SAME_NAME, "2 tensors"] * 2


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero2"])
def test_gradients_are_refused_until_they_are_reduced(engine: str) -> None:
    problems = run_on_ranks(2, _fit, engine, 2)[0][1]
    assert "while gradients accumulate" in problems[0]
    assert problems[1] == "5 gradients"
