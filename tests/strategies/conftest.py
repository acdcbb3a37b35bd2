"""What the tests of the strategies share: an object store, and a table after pytest's own output."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.object_store import Store, running_store

_MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "-"}


@pytest.fixture(scope="session")
def _server() -> Iterator[Store]:
    """Run one server for all tests: processes that they share keep connections, and fsspec keeps file systems."""
    with running_store() as store:
        for name in store.environment:
            os.environ.pop(name, None)
        yield store


@pytest.fixture
def store(_server: Store) -> Iterator[Store]:
    """Return an empty store, which the usual variables name."""
    with _server.empty():
        yield _server


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which cells of the oracle grid (``test_fsdp_grid.py``) ran, and how."""
    rows: dict[tuple[int, str, str], dict[tuple[str, str], str]] = defaultdict(dict)
    for outcome, mark in _MARKS.items():
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", []):
                if name == "grid":
                    world_size, device, engine, kind, precision = value
                    rows[world_size, device, kind][engine, precision] = mark
    if not rows:
        return
    columns = sorted({column for row in rows.values() for column in row})
    terminalreporter.section("oracle grid: each entry is accumulation 1 and 3 x no clipping, norm, value")
    titles = [f"{engine} {precision}" for engine, precision in columns]
    terminalreporter.write_line(f"{'':24}" + "".join(f"  {title}" for title in titles))
    for (world_size, device, kind), row in rows.items():
        marks = (f"  {row.get(column, ''):>{len(title)}}" for column, title in zip(columns, titles, strict=True))
        terminalreporter.write_line(f"{f'{world_size} x {device}, {kind}':24}" + "".join(marks))
