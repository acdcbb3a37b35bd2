"""The config needs batch sizes: validation data is asked for where a fit comes to a validation, and only there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.ranks import run_on_ranks
from tests.strategies.oracle import (
    NUM_MICRO_BATCHES,
    Case,
    Outcome,
    TinyModule,
    quiet_trainer,
    rank_loader,
    strategy_named,
)


class NoValidationData(TinyModule):
    asked = 0

    def val_dataloader(self) -> Any:
        self.asked += 1
        return None


class LargeValidationData(NoValidationData):
    def val_dataloader(self) -> DataLoader[Any]:
        self.asked += 1
        return rank_loader(2, batch_size=1)


class Batches:
    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(rank_loader(2, batch_size=1))

    def __len__(self) -> int:
        return len(rank_loader(2, batch_size=1))


class OwnValidationData(NoValidationData):
    def val_dataloader(self) -> Batches:
        self.asked += 1
        return Batches()


def fit(kind: type[NoValidationData], strategy: str, options: dict[str, Any]) -> tuple[int, int]:
    module = kind(Case(epochs=1), Outcome())
    trainer = quiet_trainer("ddp" if strategy == "ddp" else strategy_named(strategy), 2, **options)
    trainer.fit(module, rank_loader(2))
    size = 0 if strategy == "ddp" else trainer.strategy.config["train_micro_batch_size_per_gpu"]  # type: ignore[attr-defined]
    return module.asked, size


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2, "check_val_every_n_epoch": 3},
        {"max_epochs": 9, "max_steps": 2 * NUM_MICRO_BATCHES, "check_val_every_n_epoch": 3},
        {"max_steps": 2, "accumulate_grad_batches": 3, "check_val_every_n_epoch": 2},
        {"max_epochs": 1, "limit_val_batches": 0},
    ],
)
def test_a_fit_without_a_validation_asks_for_no_data(options: dict[str, Any]) -> None:
    for asked, size in run_on_ranks(2, fit, NoValidationData, "zero2", options):
        assert (asked, size) == (0, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 2, "check_val_every_n_epoch": 2},
        {"max_steps": 4, "accumulate_grad_batches": 3, "check_val_every_n_epoch": 2},
        {"max_epochs": 1, "check_val_every_n_epoch": 3, "num_sanity_val_steps": 1},
        {"max_epochs": 1, "check_val_every_n_epoch": None, "val_check_interval": 2},
    ],
)
def test_a_fit_that_validates_takes_the_smaller_batch(options: dict[str, Any]) -> None:
    for asked, size in run_on_ranks(2, fit, LargeValidationData, "zero2", options):
        assert (asked, size) == (1, 1)


def test_a_validation_loader_of_ones_own_need_not_know_its_batch_size() -> None:
    for asked, size in run_on_ranks(2, fit, OwnValidationData, "zero2", {"max_epochs": 1}):
        assert (asked, size) == (1, 2)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_missing_data_is_lightnings_error_where_it_is_needed(strategy: str) -> None:
    with pytest.raises(AssertionError, match="An invalid dataloader was returned"):
        run_on_ranks(2, fit, NoValidationData, strategy, {"max_epochs": 1})
