"""What is printed in the end: a table by area, and each failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tools.conformance.known import Judgement

_AREAS = {
    "loops/optimization/": "optimization",
    "loops/": "loops",
    "checkpointing/": "checkpointing",
    "callbacks/": "callbacks",
    "trainer/optimization/": "optimization",
    "core/test_lightning_optimizer.py": "optimization",
    "tuner/": "tuner",
    "models/": "models, hooks",
}
"""How the names of tests begin, to what they are about; the first that fits."""
DEFAULT_PATHS = ("loops", "checkpointing", "callbacks", "trainer", "core", "tuner", "models")


def area_of(test: str) -> str:
    """Return what a test is about: one of the areas, else its folder."""
    return next((area for start, area in _AREAS.items() if test.startswith(start)), test.partition("/")[0])


def table(tests: Sequence[str], failed: Mapping[str, Mapping[str, str]]) -> str:
    """Return how many tests of each area pass with each strategy.

    Args:
        tests: Those that pass plain and with ddp.
        failed: Strategy to the tests among them that fail, with what each says.
    """
    totals = Counter(map(area_of, tests))
    columns = {kind: Counter(map(area_of, failures)) for kind, failures in failed.items()}
    rows = [["area", "plain and ddp", *columns]]
    for area in sorted(totals):
        rows.append([area, str(totals[area]), *(str(totals[area] - column[area]) for column in columns.values())])
    rows.append(["all", str(len(tests)), *(str(len(tests) - column.total()) for column in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join(map("  ".join, lines))


def failures(judgement: Judgement) -> str:
    """Return a line for each failure, known ones with their reasons, and for what has to be changed in the list."""
    lines = [f"known     {kind}  {test}: {reason}" for (kind, test), reason in sorted(judgement.known.items())]
    lines += [f"UNLISTED  {kind}  {test}: {why}" for (kind, test), why in sorted(judgement.unlisted.items())]
    lines += [f"PASSES    {kind}  {line.test}: take it off the list" for kind, line in judgement.passing]
    return "\n".join(lines)
