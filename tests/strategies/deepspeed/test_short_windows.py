"""The last, short window of an epoch, divided by what it has: asked for in the code, and by the environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, train_deepspeed
from tests.strategies.oracle import Case, Outcome, assert_same, train_plain

STAGES = (1, 2, 3)
UNASKED = Case(accumulate=3)  # the last of 7 micro-batches is a window of its own
MEAN = Case(accumulate=3, short_windows="mean")


def train_all(case: Case) -> list[Outcome]:
    return [train_deepspeed(case, ds_config(stage)) for stage in STAGES]


@pytest.mark.parametrize(
    ("case", "env"),
    [
        pytest.param(MEAN, {}, id="plugin"),
        pytest.param(UNASKED, {"ACCELIGHT_SHORT_WINDOWS": "mean"}, id="environment"),
    ],
)
def test_a_short_window_is_the_mean_of_what_it_has(case: Case, env: dict[str, str]) -> None:
    expected = train_plain(MEAN, 2)
    for found in run_on_ranks(2, train_all, case, env=env, timeout_s=240)[0]:
        found.grad_norms.clear()  # the plain loop needs none without clipping
        assert_same(found, expected)


class Looking(Callback):
    """Notes the norm of the gradients that a hook sees before each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with trainer.strategy.full_gradients(pl_module, writeback=False) as gradients:
            self.norms.append(torch.nn.utils.get_total_norm(list(gradients.values())).item())


def train_looking() -> list[tuple[Outcome, list[float]]]:
    found = []
    for stage in (0, *STAGES):
        looking = Looking()
        found.append((train_deepspeed(MEAN, ds_config(stage), callbacks=[looking]), looking.norms))
    return found


def test_hooks_see_the_gradients_that_are_stepped_on() -> None:
    expected = train_plain(replace(MEAN, clip_norm=1e9), 2)  # clips nothing, and notes norms
    for found, norms in run_on_ranks(2, train_looking, timeout_s=240)[0]:
        assert norms == pytest.approx(expected.grad_norms, rel=1e-5)
        found.grad_norms.clear()
        assert_same(found, train_plain(MEAN, 2))


def test_the_two_divisions_differ() -> None:
    mean, unasked = train_plain(MEAN, 2), train_plain(UNASKED, 2)
    assert any(not torch.allclose(mean.weights[name], weight, rtol=1e-3) for name, weight in unasked.weights.items())
