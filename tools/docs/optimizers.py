"""The table of optimizers in ``docs/optimizers.md``: ``python -m tools.docs.optimizers`` writes it.

It comes from `tests.strategies.trained_optimizers`, each cell of which the tests train. `tests/docs/test_tables.py`
compares the page with what this makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.strategies.trained_optimizers import OPTIMIZERS
from tools.docs.generated import with_lines

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
_COLUMNS = {"FSDP1": "fsdp1", "FSDP2": "fsdp2", "ZeRO-1, ZeRO-2, ZeRO-3": "zero2"}
_WORDS = {"right": "right", "whole": "with `whole_tensor_optimizers=True`", "refused": "refused"}


def main() -> None:
    """Put the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """Return the page with a new table in the place of the one that it has."""
    return with_lines(page, PAGE, "optimizers", _rows())


def _rows() -> Iterator[str]:
    yield f"| optimizer | {' | '.join(_COLUMNS)} |"
    yield "| --- |" + " --- |" * len(_COLUMNS)
    for entry in OPTIMIZERS.values():
        yield f"| {entry.name} | {' | '.join(_WORDS[entry.answer(engine)] for engine in _COLUMNS.values())} |"


if __name__ == "__main__":
    main()
