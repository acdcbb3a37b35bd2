"""The ``accelight`` command with all that it can do. Merging must start fast: what plans is imported to plan."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from .checkpoint.cli import main as run_command

PLAN_HELP = "show how much memory training uses, before it is launched"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `accelight.checkpoint.cli.main`."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(
        words, more=(_add_plan if words[:1] == ["plan"] else _name_plan, _add_timings, _add_convert_config)
    )


def _add_plan(add_parser: Callable[..., ArgumentParser]) -> None:
    from .strategies.planning.command import add_plan

    add_plan(add_parser, PLAN_HELP)


def _name_plan(add_parser: Callable[..., ArgumentParser]) -> None:
    """For the help of the whole command."""
    add_parser("plan", help=PLAN_HELP)


def _add_timings(add_parser: Callable[..., ArgumentParser]) -> None:
    summary = "show how long each process of a run takes for a micro-batch"
    parser = add_parser(
        "timings",
        help=summary,
        description=f"{summary.capitalize()}, as its Watchdog has saved it.",
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="timings.json, or a folder that has it")
    parser.add_argument("--json", action="store_true", help="print what the file holds")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=_show_timings)


def _show_timings(arguments: Namespace) -> int:
    from .strategies.common.sections import Timings

    path: Path = arguments.path
    if path.is_dir():
        found = [path / name for name in ("timings.json", "watchdog/timings.json") if (path / name).exists()]
        if not found:
            raise FileNotFoundError(f"{path} has no timings.json: Watchdog writes it every report_every_s seconds.")
        path = found[0]
    try:
        timings = Timings.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    print(timings.to_json() if arguments.json else timings)
    return 0


def _add_convert_config(add_parser: Callable[..., ArgumentParser]) -> None:
    what = "the Trainer that an Accelerate config file asks for"
    parser = add_parser(
        "convert-config", help=f"show {what}", description=f"Show {what}, as Python code.", allow_abbrev=False
    )
    default = "default: the one that accelerate config writes"
    parser.add_argument("path", type=Path, metavar="PATH", nargs="?", help=f"the file, YAML or JSON; {default}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=_convert_config)


def _convert_config(arguments: Namespace) -> int:
    from .strategies.convert_config import DEFAULT_PATH, convert, read_config

    print(convert(read_config((arguments.path or DEFAULT_PATH).expanduser())))
    return 0
