"""Run the tests that tell whether versions fit: the lowest that are claimed, the pinned, the newest, and some between.

The wheel is built and installed into each environment with uv, without this checkout's files, and each area's tests run
against it. One environment is made at a time and removed afterwards: torch takes some gigabytes. Results are kept, so
that a table can be put together from several runs.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.versions.areas import AREAS, INSTALLATION, fits_together, run_area, say, together
from tools.versions.environments import (
    ENVIRONMENTS,
    RELEASES,
    ROOT,
    MissingPythonError,
    UnresolvableError,
    build_wheel,
    make,
    renew,
    versions,
)
from tools.versions.report import Row, put_into, table

DOCUMENT = ROOT / "docs" / "compatibility.md"


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="ENVIRONMENT",
        help=f"of {', '.join(ENVIRONMENTS)}; by default those of releases: {', '.join(RELEASES)}",
    )
    parser.add_argument("--area", action="append", choices=list(AREAS), help="one or more; all by default")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".matrix", help="for environments, logs and results (%(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the environments there, and use those that are")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one area (%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"put all results there are into docs/{DOCUMENT.name}")
    options = parser.parse_args(given)
    unknown = [name for name in options.names if name not in ENVIRONMENTS]
    if unknown:
        parser.error(f"there is no environment {', '.join(unknown)}; there are {', '.join(ENVIRONMENTS)}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; 1 if something fails."""
    options = _arguments(given)
    names = options.names or list(RELEASES)
    folder: Path = options.folder.resolve()
    wheel = build_wheel(folder / "wheel")
    rows = {name: examine(name, options.area or list(AREAS), folder, wheel, options) for name in names}
    print(table(rows))
    if options.write:
        known = {name: Row.load(_results(folder, name)) for name in RELEASES}
        put_into(DOCUMENT, table({name: row for name, row in known.items() if row != Row()}))
    return int(not all(row.is_good for row in rows.values()))


def examine(name: str, areas: Sequence[str], folder: Path, wheel: Path, options: argparse.Namespace) -> Row:
    """Make an environment, run areas in it, remove it, and keep what was found beside what is known of other areas."""
    env = folder / "environments" / name
    try:
        if options.keep and (env / "bin" / "python").exists():
            renew(wheel, env)
        else:
            say(f"{name}: installing")
            make(name, wheel, env)
        found = versions(env)
        known = Row.load(_results(folder, name))
        row = Row(found, known.cells if known.versions == found else {})
        for area in areas:
            cell = run_area(area, env, folder / "logs" / name, options.timeout)
            if area == INSTALLATION:
                cell = together([fits_together(wheel, ENVIRONMENTS[name].python, folder / "bare"), cell])
            row.cells[area] = cell
            say(f"{name}, {area}: {cell}")
            row.save(_results(folder, name))
    except (MissingPythonError, UnresolvableError) as error:
        say(f"{name}: {error}")
        row = Row(why=str(error)) if isinstance(error, MissingPythonError) else Row(error=str(error))
        row.save(_results(folder, name))
    finally:
        for used in (folder / "bare", *([] if options.keep else [env])):
            shutil.rmtree(used, ignore_errors=True)
    row.cells = {area: row.cells[area] for area in AREAS if area in row.cells}
    return row


def _results(folder: Path, name: str) -> Path:
    return folder / "results" / f"{name}.json"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(error, error.stderr, sep="\n", file=sys.stderr)
        sys.exit(2)
    except (OSError, ModuleNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
