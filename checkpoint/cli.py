"""The ``accelight`` command. It starts fast: nothing but the standard library is imported, and little of that."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .. import __version__
from .commands import EXIT_BAD_CHECKPOINT, EXIT_USAGE, AddParser, add_commands
from .errors import CheckpointError, printable_message


def main(argv: Sequence[str] | None = None, more: Sequence[Callable[[AddParser], None]] = ()) -> int:
    """Run the command and return its exit status: 0, 1 (bad checkpoint, or an error of the system), 2 (usage).

    Args:
        argv: The words of the command; default those of this process.
        more: Each adds a subcommand of a higher floor.
    """
    arguments = _parser(more).parse_args(argv)
    collects = gc.isenabled()
    gc.disable()  # a hundred thousand tensors are many objects for the collector to scan, and none is garbage
    try:
        with _raising_on_sigterm():
            return int(arguments.run(arguments)) if arguments.debug else _run(arguments)
    finally:
        if collects:
            gc.enable()


def _run(arguments: argparse.Namespace) -> int:
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it exits
        return 128 + signal.SIGPIPE
    except (CheckpointError, OSError, ModuleNotFoundError, UnicodeError) as error:
        return _fail(error, EXIT_BAD_CHECKPOINT)
    except (ValueError, TypeError) as error:
        return _fail(error, EXIT_USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was left behind", 128 + signal.SIGINT)
    except _TerminatedError:
        return _fail("terminated; nothing was left behind", 128 + signal.SIGTERM)
    return status


class _TerminatedError(BaseException):
    """SIGTERM as an exception, as KeyboardInterrupt is SIGINT: what was begun is removed on the way out."""


@contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise _TerminatedError

    try:
        previous = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread: signals are left to the program that called this from there
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _fail(error: object, status: int) -> int:
    text = printable_message(" ".join(str(error).split())) or type(error).__name__
    print(f"accelight: error: {text}", file=sys.stderr)
    return status


def _parser(more: Sequence[Callable[[AddParser], None]] = ()) -> argparse.ArgumentParser:
    what = "Tools for sharded checkpoints and sharded training." if more else "Tools for sharded checkpoints."
    parser = argparse.ArgumentParser(prog="accelight", description=what, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"accelight {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_commands(commands.add_parser)
    for add in more:
        add(commands.add_parser)
    return parser
