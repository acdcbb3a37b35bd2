"""The tables of users' code in the guides to FSDP and DeepSpeed: ``python -m tools.docs.user_code`` writes them.

They come from `tests.strategies.user_patterns`, which the tests train. `tests/docs/test_tables.py` compares the pages
with what this makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.strategies.user_patterns import PATTERNS, Refused, in_table
from tools.docs.generated import with_lines

_DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[Path, dict[str, str]] = {
    _DOCS / "fsdp.md": {"FSDP1": "fsdp1", "FSDP2": "fsdp2"},
    _DOCS / "deepspeed.md": {"ZeRO-1, ZeRO-2": "zero2", "ZeRO-3": "zero3"},
}
"""The columns of each page's table, and the engines that they are of."""


def main() -> None:
    """Put the tables into the pages."""
    for path in PAGES:
        path.write_text(with_table(path), encoding="utf-8")


def with_table(path: Path) -> str:
    """Return the text of a page with a new table in the place of the one that it has."""
    return with_lines(path.read_text(encoding="utf-8"), path, "user code", _rows(PAGES[path]))


def _rows(engines: dict[str, str]) -> Iterator[str]:
    yield f"| what code does | {' | '.join(engines)} |"
    yield "| --- |" + " --- |" * len(engines)
    for does, [entry, *_] in in_table(PATTERNS.values()).items():
        if entry.module.ignored is not None and "fsdp2" not in engines.values():
            continue  # ZeRO shards every module
        cells = [_cell(entry.answers.get(engine)) for engine in engines.values()]
        yield f"| {does} | {' | '.join(cells)} |"


def _cell(answer: Refused | None) -> str:
    if answer is None:
        return "right"
    return f"refused: {answer.instead}"


if __name__ == "__main__":
    main()
