"""What Accelerate's launcher exports beside what a Trainer is given: one rule for all strategies."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from accelight.state import AcceleratorState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

STRATEGIES = pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "deepspeed"])


def _strategy(kind: str, options: dict[str, Any]) -> Any:
    if kind == "deepspeed":
        return AccelDeepSpeedStrategy(**{"zero_stage": 2, **options})
    return AccelFSDPStrategy(**{"fsdp_version": int(kind[-1]), **options})


def _told(caught: list[warnings.WarningMessage], variable: str) -> list[str]:
    return [str(warning.message) for warning in caught if variable in str(warning.message)]


# ------------------------------------------------------------------ precision
def _precision(kind: str, options: dict[str, Any], precision: Any) -> tuple[str, str, list[str]]:
    before = AcceleratorState().mixed_precision
    trainer = quiet_trainer(_strategy(kind, options), 2, max_steps=1, precision=precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    after = AcceleratorState().mixed_precision
    reset_state()
    return before, after, _told(caught, "ACCELERATE_MIXED_PRECISION")


@STRATEGIES
@pytest.mark.parametrize("precision", [None, "32-true"])
def test_a_precision_that_the_trainer_does_not_have_is_said_to_be_ignored(kind: str, precision: Any) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    first, second = run_on_ranks(2, _precision, kind, {}, precision, env=env)
    [warning] = first[2]
    assert warning.startswith(
        "ACCELERATE_MIXED_PRECISION=bf16 has no effect: under a Trainer its own precision decides"
    )
    assert "'32-true' here. Give Trainer(precision='bf16-mixed'), or unset the variable." in warning
    assert second[2] == []
    assert [found[:2] for found in (first, second)] == [("bf16", "no")] * 2


@STRATEGIES
@pytest.mark.parametrize(
    ("value", "precision", "expected"),
    [("no", None, "no"), ("no", "bf16-mixed", "bf16"), ("bf16", "bf16-mixed", "bf16")],
)
def test_nothing_is_said_where_the_trainer_has_it(kind: str, value: str, precision: Any, expected: str) -> None:
    env = {"ACCELERATE_MIXED_PRECISION": value}
    for before, after, told in run_on_ranks(2, _precision, kind, {}, precision, env=env):
        assert (before, after, told) == (value, expected, [])


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_policy_that_wins_over_the_trainer_is_what_the_state_tells(kind: str) -> None:
    env, options = {"ACCELERATE_MIXED_PRECISION": "bf16"}, {"mixed_precision_policy": "bf16"}
    for _, after, told in run_on_ranks(2, _precision, kind, options, None, env=env):
        assert (after, told) == ("bf16", [])


def test_a_config_that_switches_half_precision_on_is_what_the_state_tells() -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    options = {"hf_ds_config": config, "zero_stage": None}
    for _, after, told in run_on_ranks(2, _precision, "deepspeed", options, None, env=env):
        assert (after, told) == ("bf16", [])
