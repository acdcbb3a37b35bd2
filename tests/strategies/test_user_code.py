"""Users' code on parameters, gradients and buffers trains as under ``ddp``, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelight.strategies.sharded_tensors.guards import Watch, plainly
from tests.ranks import run_on_ranks
from tests.strategies.trained_patterns import (
    BATCHES_OF_PATTERNS,
    PARALLEL,
    fit_after_an_error,
    fits_after_interrupts,
    numbers_without_a_fit,
    problems,
    silent_problems,
)
from tests.strategies.user_patterns import ENGINES, PATTERNS, in_table

_BATCHES = [
    pytest.param(batch, marks=pytest.mark.machines) if batch.startswith("rest") else batch
    for batch in BATCHES_OF_PATTERNS
]


@pytest.mark.core("core-fsdp2", "core-zero3")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch", _BATCHES)
def test_users_code_trains_as_under_ddp(batch: str, engine: str) -> None:
    reports = run_on_ranks(2, problems, BATCHES_OF_PATTERNS[batch], engine, timeout_s=240)
    assert reports == [[], []], "\n".join(line for report in reports for line in report)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", PARALLEL)
@pytest.mark.parametrize("batch", BATCHES_OF_PATTERNS)
def test_users_code_where_ranks_share_batches(batch: str, engine: str) -> None:
    reports = run_on_ranks(2, problems, BATCHES_OF_PATTERNS[batch], engine, timeout_s=240)
    assert reports == [[], []], "\n".join(line for report in reports for line in report)


@pytest.mark.core("zero3-prefetching")
@pytest.mark.parametrize("engine", ["zero3-prefetching", "zero3-persistent"])
def test_changes_in_steps_of_stage_3(engine: str) -> None:
    """Parameters are on their way when the step begins; or stay gathered between steps."""
    names = ["ChangeBeforeForward", "ChangeAtEndOfStep", "ClampInForwardHook", "TeacherUpdatedInStep"]
    reports = run_on_ranks(2, problems, names, engine, timeout_s=120)
    assert reports == [[], []], "\n".join(line for report in reports for line in report)


@pytest.mark.core("fsdp1")
@pytest.mark.parametrize("engine", ENGINES)
def test_test_and_predict_steps_see_whole_weights(engine: str) -> None:
    of_engine = run_on_ranks(2, numbers_without_a_fit, engine, timeout_s=120)
    under_ddp = run_on_ranks(2, numbers_without_a_fit, "ddp")
    for found, expected in zip(of_engine, under_ddp, strict=True):
        assert found == pytest.approx(expected, rel=0, abs=5e-6)  # sums in another order


@pytest.mark.core("fsdp1", "fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_in_a_call_is_the_users_and_ends_with_its_fit(engine: str) -> None:
    for error, problem in run_on_ranks(2, fit_after_an_error, engine, timeout_s=120):
        assert "Given normalized_shape=[7], expected input with shape [*, 7]" in error
        assert problem == ""


@pytest.mark.core("fsdp1")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupt_ends_with_its_fit(engine: str) -> None:
    for problems_by_place in run_on_ranks(2, fits_after_interrupts, engine, timeout_s=120):
        assert not any(problems_by_place.values()), problems_by_place


def test_one_process_of_stage_3_has_no_whole_weights_either() -> None:
    names = ["WeightsInWorkers", "WeightsInThreads", "LateInForwards", "LateInSteps", "LateInDatasets"]
    assert run_on_ranks(1, problems, names, "zero3", timeout_s=120) == [[]]


def test_one_process_of_fsdp2_has_dtensors_too() -> None:
    names = ["LateInSteps", "LateWritesInSteps", "LateInForwards", "LateInForwardHooks"]
    assert run_on_ranks(1, problems, names, "fsdp2", timeout_s=120) == [[]]


@pytest.mark.parametrize(("num_ranks", "engine"), [(1, "fsdp1"), (2, "fsdp1-no_shard")])
def test_what_fsdp1_does_not_shard_takes_assignments(num_ranks: int, engine: str) -> None:
    names = ["WeightsOfLayersSwapped", "TeacherAssignedInStep", "ScaleInMidWindow", "TeacherByAssignment"]
    assert run_on_ranks(num_ranks, problems, names, engine, timeout_s=120) == [[]] * num_ranks


def test_units_that_are_not_sharded_refuse_workers() -> None:
    assert run_on_ranks(2, problems, ["WeightsInWorkers"], "fsdp1-no_shard", timeout_s=120) == [[], []]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_ranks", "engine"), [(1, "fsdp1"), (1, "fsdp2"), (1, "zero3"), (2, "fsdp1-no_shard")])
@pytest.mark.parametrize("batch", _BATCHES)
def test_nothing_is_silently_wrong_where_nothing_is_sharded(batch: str, num_ranks: int, engine: str) -> None:
    reports = run_on_ranks(num_ranks, silent_problems, BATCHES_OF_PATTERNS[batch], engine, timeout_s=240)
    assert reports == [[]] * num_ranks, "\n".join(line for report in reports for line in report)


@pytest.mark.exhaustive
def test_stage_1_has_the_answers_of_stage_2() -> None:
    test_users_code_trains_as_under_ddp("core", "zero1")


def test_patterns_of_one_row_have_the_same_answers() -> None:
    for does, entries in in_table(PATTERNS.values()).items():
        assert all(entry.answers == entries[0].answers for entry in entries), does


def test_a_watch_inside_of_another_leaves_it_on() -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), []

    def use(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(func.__name__)
        return plainly(func, args, kwargs)

    watch = Watch([parameter])
    with watch.until_end(use):  # a step, which runs a backward of its own
        with watch.until_end(use):
            pass
        parameter.sum()
    assert seen == ["sum"]
    assert type(parameter) is nn.Parameter
