"""The ``accelight`` command with all that it can do. Merging must start fast: what plans is imported to plan."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence

from .checkpoint.cli import main as run_command

PLAN_HELP = "show how much memory training uses, before it is launched"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `accelight.checkpoint.cli.main`."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(words, more=(_add_plan if words[:1] == ["plan"] else _name_plan,))


def _add_plan(add_parser: Callable[..., ArgumentParser]) -> None:
    from .strategies.planning.command import add_plan

    add_plan(add_parser, PLAN_HELP)


def _name_plan(add_parser: Callable[..., ArgumentParser]) -> None:
    """For the help of the whole command."""
    add_parser("plan", help=PLAN_HELP)
