"""Writes ``tests/slow_tests.txt``, the tests that `make test` leaves to `make test-all`, from a run's durations.

::

    .venv/bin/python -m pytest -q -n 4 -m "not machines" --durations=0 --durations-min=0.3 | tee run.log
    .venv/bin/python -m tools.slow_tests run.log

A test is slow if it takes more than `SLOW_S`. Where all cells of a function are, the fastest one stays in `make test`,
unless it takes more than `SLOWEST_S`; so do those in `ALWAYS`.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parents[1] / "tests" / "slow_tests.txt"
SLOW_S = 2.0
SLOWEST_S = 5.0
ALWAYS = (
    "tests/strategies/test_orders.py::test_random_orders[0-fsdp1]",
    "tests/strategies/test_orders.py::test_random_orders[0-fsdp2]",
    "tests/strategies/test_orders.py::test_random_orders[0-zero2]",
    "tests/strategies/test_orders.py::test_random_orders[0-zero3]",
    "tests/strategies/test_user_code.py::test_users_code_trains_as_under_ddp[core",
    "tests/docs/test_blocks.py::test_the_blocks_of_a_page_run[README.md]",
    "tests/docs/test_tables.py",
    "tests/test_architecture.py",
    "tests/test_package.py::test_imports",
)
"""Beginnings of the names of what shows most faults."""
_LINE = re.compile(r"([0-9.]+)s (?:call|setup|teardown)\s+(tests/.*\S)")


def slow_tests(lines: list[str]) -> list[str]:
    """Return the names of the slow tests, out of a run's output."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        if found := _LINE.fullmatch(line.rstrip("\n")):
            seconds[found[2]] += float(found[1])
    slow = {name for name, each in seconds.items() if each > SLOW_S and not name.startswith(ALWAYS)}
    cells: defaultdict[str, list[str]] = defaultdict(list)
    for name in seconds:
        cells[name.partition("[")[0]].append(name)
    for names in cells.values():
        fastest = min(names, key=lambda name: seconds[name])
        if slow >= set(names) and seconds[fastest] <= SLOWEST_S:
            slow.discard(fastest)
    return sorted(slow)


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in slow_tests(Path(sys.argv[1]).read_text().splitlines())))
