"""Metrics of torchmetrics inside a model: their hash is another one after each update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader, strategy_named


class SquaredError(Metric):
    """A loss; what it keeps differs from rank to rank, and so does whether its hash has changed."""

    full_state_update = False
    seen: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [])

    def update(self) -> None:
        if dist.get_rank() == 0:
            self.seen.append(0.5)

    def compute(self) -> Tensor:
        return torch.tensor(self.seen).sum()

    def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
        self.update()
        return (found - wanted).pow(2).mean()


class WithMetric(TinyModule):
    """The metric has two names."""

    def __init__(self) -> None:
        super().__init__(Case(epochs=1), Outcome())
        self.loss = SquaredError()
        self.logged = torch.nn.ModuleList([self.loss])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self.model(batch[0])
        return self.loss(found, batch[1]) + 0 * sum(one(found, batch[1]) for one in self.logged)

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.logged[0](batch[1], batch[1])


def train(strategy: str) -> int:
    trainer = quiet_trainer(strategy_named(strategy), 2, max_epochs=1, limit_train_batches=4)
    trainer.fit(WithMetric(), rank_loader(2))
    return trainer.global_step


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero3"])
def test_ranks_know_a_metric_whatever_its_state(strategy: str) -> None:
    assert run_on_ranks(2, train, strategy, group_timeout_s=20) == [4, 4]
