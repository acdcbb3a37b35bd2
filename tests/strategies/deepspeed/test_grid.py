"""The oracle grid: ZeRO 0 to 3, accumulation, clipping and both optimizers, each as a plain loop trains."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import CONFIGS, train_deepspeed
from tests.strategies.oracle import Case, Outcome, assert_same, train_plain

CASES = [  # with accumulation 3, the last of 7 micro-batches is a window of its own
    Case(accumulate=accumulate, clip_norm=clip_norm, optimizer=optimizer)
    for accumulate, clip_norm, optimizer in itertools.product((1, 3), (None, 0.1), ("sgd", "adamw"))
]


def train_all(cases: list[Case], config: dict[str, Any]) -> list[Outcome]:
    return [train_deepspeed(case, config) for case in cases]


@pytest.mark.core("stage3_offload")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_trains_as_a_plain_loop(config: dict[str, Any]) -> None:
    offloaded = "offload_optimizer" in config["zero_optimization"]  # DeepSpeed's own Adam then: a test of its own
    cases = [case for case in CASES if not (offloaded and case.optimizer == "adamw")]
    outcomes = run_on_ranks(2, train_all, cases, config, timeout_s=240)[0]
    for case, found in zip(cases, outcomes, strict=True):
        expected = train_plain(case, 2)
        if case.clip_norm is None:  # the plain loop needs no norm then, DeepSpeed tells it all the same
            assert len(found.grad_norms) == expected.global_step
            found.grad_norms.clear()
        else:
            assert max(expected.grad_norms) > 2 * case.clip_norm, "the case must really clip"
        assert_same(found, expected)
        assert all(torch.isfinite(weight).all() for weight in found.weights.values())
