"""Users' code on parameters, gradients and buffers trains as under ``ddp``, or is refused by name."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks
from tests.strategies.trained_patterns import BATCHES_OF_PATTERNS, PARALLEL, numbers_without_a_fit, problems
from tests.strategies.user_patterns import ENGINES, PATTERNS, in_table


@pytest.mark.core("core-fsdp2", "core-zero3")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(batch, marks=pytest.mark.machines) if batch.startswith("rest") else batch
        for batch in BATCHES_OF_PATTERNS
    ],
)
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


def test_one_process_of_stage_3_has_no_whole_weights_either() -> None:
    names = ["WeightsInWorkers", "WeightsInThreads", "LateInForwards"]
    assert run_on_ranks(1, problems, names, "zero3", timeout_s=120) == [[]]


@pytest.mark.exhaustive
def test_stage_1_has_the_answers_of_stage_2() -> None:
    test_users_code_trains_as_under_ddp("core", "zero1")


def test_patterns_of_one_row_have_the_same_answers() -> None:
    for does, entries in in_table(PATTERNS.values()).items():
        assert all(entry.answers == entries[0].answers for entry in entries), does
