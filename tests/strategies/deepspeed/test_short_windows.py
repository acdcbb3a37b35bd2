"""The last, short window of an epoch, divided by what it has: asked for in the code, and by the environment."""

from __future__ import annotations

import pytest
import torch

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


def test_the_two_divisions_differ() -> None:
    mean, unasked = train_plain(MEAN, 2), train_plain(UNASKED, 2)
    assert any(not torch.allclose(mean.weights[name], weight, rtol=1e-3) for name, weight in unasked.weights.items())
