"""The table of DeepSpeed's features in ``docs/deepspeed.md``: ``python -m tools.docs.deepspeed_features`` writes it.

It comes from `FEATURES`, by which a config is checked. `tests/docs/test_tables.py` compares the page with what this
makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from accelight.strategies.deepspeed.ds_config import FEATURES, Feature
from tools.docs.generated import with_lines

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
_ZERO = "zero_optimization."


def main() -> None:
    """Put the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """Return the page with a new table in the place of the one that it has."""
    return with_lines(page, PAGE, "features", _rows())


def _rows() -> Iterator[str]:
    yield "| key | answer | effect, or what to do instead |"
    yield "| --- | --- | --- |"
    for feature in FEATURES:
        keys = ", ".join(f"`{key.replace(_ZERO, '....')}`" for key in feature.keys)
        yield f"| {keys} | {_answer(feature)} | {feature.note} |"


def _answer(feature: Feature) -> str:
    if len(feature.stages) == 4:
        return feature.answer
    return f"{feature.answer} at stage{'s' if len(feature.stages) > 1 else ''} {' and '.join(map(str, feature.stages))}"


if __name__ == "__main__":
    main()
