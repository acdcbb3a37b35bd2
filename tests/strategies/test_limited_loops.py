"""Limits of the Trainer end the loop and the window, and not the loader: no real sample is taken for its padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accelight.state import GradientState, gather_for_metrics
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer

NUM_SAMPLES = 7
"""Four batches of one on each of two processes; the last sample is a repetition."""


class Noting(TinyModule):
    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        self.trained, self.validated, self.windows = list[int](), list[int](), list[tuple[bool, bool]]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        state = GradientState()
        self.trained += gather_for_metrics(batch[2]).tolist()
        self.windows.append((state.sync_gradients, state.end_of_dataloader))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated += gather_for_metrics(batch[2]).tolist()
        self.model(batch[0])


def numbered_loader() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(NUM_SAMPLES, 5), torch.randn(NUM_SAMPLES, 3), torch.arange(NUM_SAMPLES))
    return DataLoader(data, 1, sampler=DistributedSampler(data, shuffle=False))


def build_strategy(name: str) -> Any:
    if name == "deepspeed":
        return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": {"stage": 2}})
    return AccelFSDPStrategy(fsdp_version=int(name.removeprefix("fsdp")))


def fit_with(strategy: str, **limits: Any) -> Noting:
    module = Noting()
    settings: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 2, **limits}
    quiet_trainer(build_strategy(strategy), 2, **settings).fit(
        module, numbered_loader(), [numbered_loader() for _ in range(3)]
    )
    return module


def fit_with_limits(strategy: str) -> list[Any]:
    limited = fit_with(strategy, limit_train_batches=3, limit_val_batches=2)
    whole = fit_with(strategy, limit_train_batches=4, limit_val_batches=4)
    stopped = fit_with(strategy, max_steps=1)
    return [
        (limited.trained, limited.validated, limited.windows),
        (whole.trained, whole.validated),
        (stopped.trained, stopped.windows),
    ]


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed"])
def test_a_limit_ends_the_window_and_drops_no_sample(strategy: str) -> None:
    everything, beyond = list(range(7)), [(False, False), (True, False)]
    for limited, whole, stopped in run_on_ranks(2, fit_with_limits, strategy, timeout_s=100):
        assert limited == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3] * 3, [*beyond, (True, True)])
        assert whole == (everything, everything * 3)  # a limit at the loader's end is its end
        assert stopped == ([0, 1, 2, 3], beyond)


def fit_and_evaluate_nothing(strategy: str) -> list[Any]:
    empty = DataLoader(TensorDataset(torch.empty(0, 5), torch.empty(0, 3)), 1)
    module = Noting()
    trainer = quiet_trainer(build_strategy(strategy), 2, max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(module, empty, empty)
    stopped_at = trainer.global_step
    results = trainer.validate(module, empty)
    trainer.fit(module, numbered_loader())  # and nothing is left over that stands in the way of a real epoch
    return [stopped_at, results, module.trained, trainer.global_step, GradientState().in_dataloader]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "deepspeed"])
def test_no_data_is_no_step_and_no_hang(strategy: str) -> None:
    for found in run_on_ranks(2, fit_and_evaluate_nothing, strategy, timeout_s=100):
        assert found == [0, [], list(range(7)) * 2, 4, False]
