"""Under a composite backend, as on GPUs, Lightning evaluates in inference mode: weights are trained on all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import BATCH_SIZE, Case, Outcome, TinyModule, dataset, quiet_trainer


class Evaluated(TinyModule):
    """Sees what it is evaluated in."""

    modes: set[bool]

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.modes.add(torch.is_inference_mode_enabled())
        self.model(batch[0])


def _loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(dataset(2), batch_size=BATCH_SIZE)


def _trainer(stage: int) -> Any:
    config = {"zero_optimization": {"stage": stage}}
    strategy = AccelDeepSpeedStrategy(hf_ds_config=config, process_group_backend="cpu:gloo")
    return quiet_trainer(strategy, 2, max_epochs=2)


def _train(stage: int, evaluated: bool) -> tuple[set[bool], list[float]]:
    module, loaders = Evaluated(Case(), Outcome()), [_loader()] if evaluated else []
    module.modes = set()
    if evaluated:
        _trainer(stage).validate(module, _loader())
    _trainer(stage).fit(module, _loader(), *loaders)
    return module.modes, module.outcome.losses


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluating_before_and_within_fit_changes_nothing(stage: int) -> None:
    modes, losses = run_on_ranks(2, _train, stage, True, init_group=False)[0]
    assert modes == {True, False}
    assert losses == run_on_ranks(2, _train, stage, False, init_group=False)[0][1]
