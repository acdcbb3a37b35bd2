"""Every cell of the table in docs/optimizers.md: equal to one process, or refused by name before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategies.trained_optimizers import ENGINES, OPTIMIZERS, problem


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name",
    [name if entry.core else pytest.param(name, marks=pytest.mark.exhaustive) for name, entry in OPTIMIZERS.items()],
)
def test_an_optimizer_trains_as_the_table_says(name: str, engine: str, tmp_path: Path) -> None:
    if needs := OPTIMIZERS[name].needs:
        pytest.importorskip(needs)
    assert problem(name, engine, tmp_path) == ""
