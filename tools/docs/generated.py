"""The parts of pages that programs write, between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def with_lines(page: str, path: Path, name: str, lines: Iterable[str]) -> str:
    """Return a page with new lines in the place of those that it has.

    Args:
        page: Its text.
        path: Its file, for errors.
        name: Of the part.
        lines: Without their ends.

    Raises:
        ValueError: If the page has no such part.
    """
    between = re.compile(rf"(?<=<!-- {name}: begin -->\n).*(?=<!-- {name}: end -->)", re.DOTALL)
    if not between.search(page):
        raise ValueError(f"{path} lacks the lines between which this part stands: <!-- {name}: begin --> and end.")
    text = "\n".join(lines) + "\n"
    return between.sub(lambda _: text, page)
