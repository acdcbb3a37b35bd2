"""What the tests of the strategies add to pytest's own output."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "-"}


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
