"""Hundreds of lines of users' code, each alone, on each engine against ddp."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks
from tests.strategies.user_lines import LINES, problems_of_lines
from tests.strategies.user_patterns import ENGINES
from tests.strategies.user_programs import problems_of_programs


@pytest.mark.timeout(900)  # some three hundred fits in one test
@pytest.mark.core("gradients-zero3", "steps-fsdp1", "late-fsdp2", "late_forwards-fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", LINES)
def test_a_line_trains_as_under_ddp(where: str, engine: str) -> None:
    reports = run_on_ranks(2, problems_of_lines, where, engine, timeout_s=600)
    assert reports == [[], []]


@pytest.mark.core("from_0-fsdp2", "from_0-zero3")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", [0, 15, 30, 45], ids="from_{}".format)
def test_random_lines_in_random_places_train_as_under_ddp(first: int, engine: str) -> None:
    reports = run_on_ranks(2, problems_of_programs, engine, range(first, first + 15), timeout_s=200)
    assert reports == [[], []]
