"""Hundreds of lines of users' code, each alone, on each engine against ddp."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks
from tests.strategies.user_lines import LINES, problems_of_lines
from tests.strategies.user_patterns import ENGINES


@pytest.mark.core("gradients-zero3", "steps-fsdp1")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", LINES)
def test_a_line_trains_as_under_ddp(where: str, engine: str) -> None:
    reports = run_on_ranks(2, problems_of_lines, where, engine, timeout_s=400)
    assert reports == [[], []]
