"""The pages of the documentation, and what runs their blocks."""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PROCESSES = re.compile(r"^<!-- processes: (\d+) -->$", re.MULTILINE)
_FENCE = re.compile(r"^([ ]*)(`{3,})([^\n`]*)\n(.*?)^\1\2[ ]*$", re.MULTILINE | re.DOTALL)


def page_name(page: Path) -> str:
    """Return a page's path from the root, as tests are named by it."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line where it begins."""

    language: str
    text: str
    line: int


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return a page's fenced blocks in these languages, or all."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(match[3].strip(), match[4], text.count("\n", 0, match.start()) + 1) for match in _FENCE.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def num_processes(page: Path) -> int:
    """Return on how many processes a page's blocks are run: a comment of the page says so, else on one."""
    said = _PROCESSES.search(page.read_text(encoding="utf-8"))
    return int(said[1]) if said else 1


def run_page(path: str, folder: str) -> list[str]:
    """Run a page's Python blocks in ``folder``, in one namespace.

    An ``output`` block is compared with the end of what process 0 has printed since the last one, before which
    there are tables of Lightning's, or with the end of what it has logged. ``...`` stands for anything.

    Returns:
        The reasons of the blocks that were skipped.
    """
    from sybil import Sybil
    from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser, SkipParser

    os.chdir(folder)
    name = f"page_{re.sub(r'[^a-z0-9]', '_', Path(path).stem)}"
    module = sys.modules[name] = ModuleType(name)  # classes of the page say that they are of it
    is_first = os.environ.get("RANK", "0") == "0"
    printed, logged, skipped = io.StringIO(), io.StringIO(), list[str]()

    def compare(example: object) -> str | None:
        wanted = str(example.parsed)  # type: ignore[attr-defined]
        found, *others = [told.getvalue() for told in (printed, logged)]
        for told in (printed, logged):
            told.seek(0)
            told.truncate()
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        checker = doctest.OutputChecker()
        if not is_first or any(checker.check_output(f"...{wanted}", one, flags) for one in (found, *others)):
            return None
        return "\n".join(difflib.unified_diff(wanted.splitlines(), found.splitlines(), "the page", "printed"))

    parsers: list[Any] = [PythonCodeBlockParser(), CodeBlockParser(language="output", evaluator=compare), SkipParser()]
    document = Sybil(parsers=parsers).parse(Path(path))
    document.namespace.update(vars(module))
    listener = logging.StreamHandler(logged)
    logging.getLogger("lightning.pytorch").addHandler(listener)
    try:
        for example in document:
            with contextlib.redirect_stdout(printed):
                try:
                    example.evaluate()
                except SkipTest as reason:
                    skipped.append(str(reason))
    finally:
        logging.getLogger("lightning.pytorch").removeHandler(listener)
        del sys.modules[name]
    return skipped


def table_rows(page: Path, heading: str) -> Iterator[list[str]]:
    """Give the cells of each row of the tables under a heading, up to the next heading of that level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    lines = page.read_text(encoding="utf-8").splitlines()
    assert heading in lines, f"{page_name(page)} has no heading {heading!r}"
    for line in lines[lines.index(heading) + 1 :]:
        if re.match(rf"#{{1,{level}}} ", line):
            return
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
            if not all(re.fullmatch(r":?-+:?|", cell) for cell in cells):
                yield cells
