"""The table of ``tools.matrix``: environments by areas, from what was run, and its place in the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .areas import AREAS, Cell
from .environments import SHOWN

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


@dataclass
class Row:
    """What was run in an environment."""

    versions: dict[str, str] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    why: str = ""
    """The environment is not here: the reason."""
    error: str = ""
    """Its versions cannot be installed together: what uv said."""

    def save(self, path: Path) -> None:
        """Write it, to be put into a table with others."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = {area: cell.as_dict() for area, cell in self.cells.items()}
        text = json.dumps({"versions": self.versions, "why": self.why, "error": self.error, "cells": cells}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Row:
        """Read what was written; an empty row where there is nothing."""
        if not path.exists():
            return cls()
        content = json.loads(path.read_text(encoding="utf-8"))
        cells = {area: Cell(**cell) for area, cell in content["cells"].items()}
        return cls(content["versions"], cells, content["why"], content["error"])

    @property
    def is_good(self) -> bool:
        """Whether nothing in it failed."""
        return not self.error and all(cell.is_good for cell in self.cells.values())


def table(rows: Mapping[str, Row]) -> str:
    """Return the Markdown: versions, results, and what failed or was skipped with its reasons."""
    packages = ("python", *SHOWN)
    titles = [title for title in AREAS if any(title in row.cells for row in rows.values())]
    first = [f"| environment | {' | '.join(packages)} |", "| --- |" + " --- |" * len(packages)]
    second = [f"| environment | {' | '.join(titles)} |", "| --- |" + " --- |" * len(titles)]
    notes: list[str] = []
    for name, row in rows.items():
        if row.why or row.error:
            notes.append(f"- {name}: skipped: {row.why}" if row.why else f"- {name}: fails to install: {row.error}")
            continue
        first.append(f"| {name} | {' | '.join(row.versions.get(package, 'none') for package in packages)} |")
        cells = [str(row.cells[title]) if title in row.cells else "not run" for title in titles]
        second.append(f"| {name} | {' | '.join(cells)} |")
        notes += [f"- {name}, {line}" for title, cell in row.cells.items() for line in _notes(title, cell)]
    parts = ["\n".join(first), *(["\n".join(second)] if titles else []), *(["\n".join(notes)] if notes else [])]
    return "\n\n".join(parts)


def _notes(title: str, cell: Cell) -> list[str]:
    lines = [f"{title}: fails: {failure}" for failure in cell.failed]
    return lines + [f"{title}: skipped: {reason}" for reason in dict.fromkeys(cell.skipped)]


def put_into(document: Path, text: str) -> None:
    """Replace what stands between the markers of a document.

    Raises:
        ValueError: If they are not there, once each and in this order.
    """
    content = document.read_text(encoding="utf-8")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{document} has no place for the table: it goes between {BEGIN} and {END}.")
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
