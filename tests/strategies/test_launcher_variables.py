"""What Accelerate's launcher exports beside what a Trainer is given: one rule for all strategies."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from accelight.state import AcceleratorState, GradientState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import NUM_MICRO_BATCHES, Case, Outcome, TinyModule, quiet_trainer, rank_loader

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
    assert warning.startswith("ACCELERATE_MIXED_PRECISION=bf16 has no effect: the Trainer's own precision")
    assert "'32-true', is used. Unset the variable, or use Trainer(precision='bf16-mixed')." in warning
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


@STRATEGIES
def test_nothing_is_said_to_a_trainer_that_is_wholly_in_that_precision(kind: str) -> None:
    for _, _, told in run_on_ranks(2, _precision, kind, {}, "bf16-true", env={"ACCELERATE_MIXED_PRECISION": "bf16"}):
        assert told == []


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


# ------------------------------------------------------------------ accumulation and clipping
def _numbers(kind: str, options: dict[str, Any], given: dict[str, Any]) -> tuple[int, int, list[str]]:
    trainer = quiet_trainer(_strategy(kind, options), 2, max_epochs=1, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    found = GradientState().num_steps, trainer.global_step
    reset_state()
    return *found, _told(caught, "ACCELERATE_GRADIENT")


@STRATEGIES
@pytest.mark.parametrize(
    ("value", "options", "given", "expected", "winner"),
    [
        ("3", {}, {}, 3, None),
        ("3", {}, {"accumulate_grad_batches": 3}, 3, None),
        ("1", {}, {"accumulate_grad_batches": 2}, 2, None),  # what the launcher exports where nobody asked
        ("auto", {}, {"accumulate_grad_batches": 2}, 2, None),
        ("3", {}, {"accumulate_grad_batches": 2}, 2, r"Trainer(accumulate_grad_batches=2)"),
        ("3", {"gradient_accumulation": 2}, {}, 2, "gradient_accumulation=2"),
    ],
    ids=["alone", "same", "default", "auto", "trainer", "strategy"],
)
def test_the_variable_counts_where_nobody_else_gives_a_number(
    kind: str, value: str, options: dict[str, Any], given: dict[str, Any], expected: int, winner: str | None
) -> None:
    env = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": value}
    first, second = run_on_ranks(2, _numbers, kind, options, given, env=env)
    assert [found[:2] for found in (first, second)] == [(expected, -(-NUM_MICRO_BATCHES // expected))] * 2
    assert len(first[2]) == (winner is not None)
    for warning in first[2]:
        assert warning.startswith(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={value} has no effect: {winner} takes precedence. Unset"
        )
    assert second[2] == []


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("where", ["config", "field"])
def test_a_deepspeed_config_wins_over_the_variable_and_not_over_the_trainer(where: str, number: int) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": number}
    if where == "config":
        options = {"hf_ds_config": {"zero_optimization": {"stage": 2}, **options}, "zero_stage": None}
    env = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}
    found = run_on_ranks(2, _numbers, "deepspeed", options, {}, env=env)[0]
    assert found[:2] == (number, -(-NUM_MICRO_BATCHES // number))
    assert f"=3 has no effect: gradient_accumulation_steps (DeepSpeed config)={number} takes precedence." in found[2][0]
    told = run_on_ranks(2, _refused, {**options, "gradient_accumulation": 4}, {}, env=env)[0]
    assert f"gradient_accumulation=4 and gradient_accumulation_steps (DeepSpeed config)={number} differ." in told
    told = run_on_ranks(2, _refused, options, {"accumulate_grad_batches": 4}, env=env)[0]
    assert f"gradient_accumulation_steps: {number} in the DeepSpeed config, Trainer(accumulate_grad_batches)=4" in told


def _refused(options: dict[str, Any], given: dict[str, Any]) -> str:
    trainer = quiet_trainer(_strategy("deepspeed", options), 2, max_epochs=1, **given)
    with pytest.raises(ValueError, match=r"contradicts|differ") as caught:
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    reset_state()
    return str(caught.value)


def _clipping(given: dict[str, Any]) -> tuple[float, list[str]]:
    strategy = AccelDeepSpeedStrategy(zero_stage=2)
    trainer = quiet_trainer(strategy, 2, max_steps=1, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    reset_state()
    return strategy.deepspeed_config["gradient_clipping"], _told(caught, "ACCELERATE_GRADIENT")


def test_the_variable_clips_where_the_trainer_does_not() -> None:
    env = {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}
    assert run_on_ranks(2, _clipping, {}, env=env)[0] == (0.5, [])
    assert run_on_ranks(2, _clipping, {"gradient_clip_val": 0.5}, env=env)[0] == (0.5, [])
    clipping, [warning] = run_on_ranks(2, _clipping, {"gradient_clip_val": 0.3}, env=env)[0]
    assert clipping == 0.3
    assert "ACCELERATE_GRADIENT_CLIPPING=0.5 has no effect: Trainer(gradient_clip_val=0.3) takes precedence." in warning
