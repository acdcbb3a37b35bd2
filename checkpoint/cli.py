"""The ``accelight`` command and its subcommands ``merge-weights``, ``verify`` and ``inspect``.

It starts fast: only the standard library is imported, and little of that.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from .. import __version__
from .files import CheckpointError, printable_message


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
    except (CheckpointError, OSError, ImportError, UnicodeError) as error:
        return _fail(error, EXIT_BAD_CHECKPOINT)
    except (ValueError, TypeError) as error:
        return _fail(error, EXIT_USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", 128 + signal.SIGINT)
    except _TerminatedError:
        return _fail("terminated", 128 + signal.SIGTERM)
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
    if isinstance(error, OSError) and error.strerror and error.filename and not error.filename2:
        error = f"{os.fspath(error.filename)}: {error.strerror}."
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


# ------------------------------------------------------------------------------------------------
# The subcommands of ``accelight``: their options and the functions behind them.


T = TypeVar("T")
AddParser = Callable[..., argparse.ArgumentParser]


class _Report(Protocol):
    def to_dict(self) -> dict[str, object]: ...


EXIT_OK, EXIT_BAD_CHECKPOINT, EXIT_USAGE = 0, 1, 2


def add_commands(add_parser: AddParser) -> None:
    """Add all subcommands."""
    _add_merge(add_parser)
    _add_verify(add_parser)
    _add_inspect(add_parser)


def _checked(check: Callable[[str], T]) -> Callable[[str], T]:
    """Return ``check`` as an argparse type: its ValueError becomes a usage error with its own words."""

    def convert(text: str) -> T:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _size(text: str) -> int:
    from .writing.plan import parse_size

    return parse_size(int(text) if text.isdigit() else text)


def _dtype(text: str) -> str:
    from .formats.base import conversion_target

    conversion_target(text)
    return text


def _spellings(name: str) -> list[str]:
    """Return an option with hyphens, and with underscores as Accelerate's command has it."""
    return [f"--{name}", f"--{name.replace('-', '_')}"]


def _new_parser(
    add_parser: AddParser, name: str, run: Callable[[argparse.Namespace], int], summary: str, description: str
) -> argparse.ArgumentParser:
    """Add a subcommand with what all of them have."""
    parser = add_parser(name, help=summary, description=description, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint_dir", metavar="CKPT", help="checkpoint folder, or its parent folder")
    add("--json", action="store_true", help="print the report as JSON")
    add("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)
    return parser


def _print_json(report: _Report) -> None:
    import json

    print(json.dumps(report.to_dict(), indent=2))


def _add_merge(add_parser: AddParser) -> None:
    parser = _new_parser(
        add_parser,
        "merge-weights",
        _merge,
        "merge a sharded checkpoint into safetensors",
        "Merge the weights of a sharded checkpoint (torch.distributed.checkpoint, as FSDP saves it, or DeepSpeed's "
        "ZeRO) into safetensors.",
    )
    add = parser.add_argument
    add("output_path", metavar="OUT", help="folder or URL for model.safetensors; created if missing")
    add(
        *_spellings("max-shard-size"),
        type=_checked(_size),
        metavar="SIZE",
        help="maximum size of one file, e.g. 5GB",
    )
    _add_selection(parser)
    add(
        *_spellings("unsafe-serialization"),
        action="store_true",
        help="write pytorch_model.bin instead",
    )
    add(
        *_spellings("remove-checkpoint-dir"),
        action="store_true",
        help="compare the result with the checkpoint, then remove the checkpoint",
    )
    of_adapters = parser.add_mutually_exclusive_group()
    help_text = "write what PEFT loads of this adapter (default: the only one)"
    of_adapters.add_argument("--adapter", nargs="?", const=True, metavar="NAME", help=help_text)
    help_text = "write the base with this adapter merged into it (default: the only one); needs peft"
    of_adapters.add_argument(
        *_spellings("merge-adapter"), nargs="?", const=True, default=False, metavar="NAME", help=help_text
    )
    help_text = "write a model with adapters under the names of its module"
    of_adapters.add_argument(*_spellings("no-adapter"), dest="adapter", action="store_false", help=help_text)
    parser.set_defaults(adapter=None)
    add("--threads", type=int, metavar="N", help="number of copy threads (default: chosen from measurements)")
    of_bytes = parser.add_mutually_exclusive_group()
    help_text = "read the result back and compare every byte with its source"
    of_bytes.add_argument("--verify", action="store_true", default=None, help=help_text)
    help_text = "leave out comparing the checkpoint's bytes with their checksums while they are copied"
    of_bytes.add_argument(*_spellings("no-verify"), dest="verify", action="store_false", help=help_text)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Add what a merge and the comparison with its result share: names, dtypes, and how much is printed."""
    add = parser.add_argument
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--dtype", type=_checked(_dtype), help="convert floating-point tensors: fp32, fp16, bf16 or fp64")
    add(
        *_spellings("strip-prefix"),
        metavar="ATTR",
        help="keep only tensors under this attribute, or 'auto'",
    )
    help_text = "'ema' takes the averages of ShardedEMA (default: model)"
    add("--weights", choices=("model", "ema"), default="model", help=help_text)
    add("--include", action="append", metavar="PATTERN", help="write only names that match; can be repeated")
    add("--exclude", action="append", metavar="PATTERN", help="omit names that match; can be repeated")


def _merge(arguments: argparse.Namespace) -> int:
    from .merge import merge_fsdp_weights

    report = merge_fsdp_weights(
        arguments.checkpoint_dir,
        arguments.output_path,
        not arguments.unsafe_serialization,
        arguments.remove_checkpoint_dir,
        max_shard_size=arguments.max_shard_size,
        adapter=arguments.adapter,
        merge_adapter=arguments.merge_adapter,
        threads=arguments.threads,
        verify=arguments.verify,
        **_selection(arguments),
    )
    if arguments.json:
        _print_json(report)
    elif not arguments.quiet:
        print(report)
        for reason, names in report.skipped_by_reason().items():
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            print(printable_message(f"  left out, {reason}: {len(names)} ({shown})"), file=sys.stderr)
    return EXIT_OK


def _selection(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `_add_selection`, as arguments of the functions."""
    chosen = {name: getattr(arguments, name) for name in ("dtype", "strip_prefix", "include", "exclude", "weights")}
    return chosen | {"progress": False if arguments.quiet or arguments.json else None}


def _add_verify(add_parser: AddParser) -> None:
    parser = _new_parser(
        add_parser,
        "verify",
        _verify,
        "compare a merged result with its checkpoint",
        "Compare every byte of a merged result with the checkpoint. Pass the same options as for the merge.",
    )
    help_text = "folder with the merged model, or a .safetensors or .bin file"
    parser.add_argument("output_path", metavar="OUT", help=help_text)
    _add_selection(parser)


def _verify(arguments: argparse.Namespace) -> int:
    from .verify import verify_merged

    report = verify_merged(arguments.checkpoint_dir, arguments.output_path, **_selection(arguments))
    if arguments.json:
        _print_json(report)
    elif not report.is_equal:
        print(f"accelight: error: {report}", file=sys.stderr)
    elif not arguments.quiet:
        print(report)
    return EXIT_OK if report.is_equal else EXIT_BAD_CHECKPOINT


def _add_inspect(add_parser: AddParser) -> None:
    parser = _new_parser(
        add_parser,
        "inspect",
        _inspect,
        "show what a sharded checkpoint holds",
        "Show what a sharded checkpoint holds, from its metadata alone; no tensor is read.",
    )
    parser.add_argument("--tensors", action="store_true", help="also list every tensor of the model")


def _inspect(arguments: argparse.Namespace) -> int:
    from .locate import inspect_checkpoint

    info = inspect_checkpoint(arguments.checkpoint_dir)
    if arguments.json:
        _print_json(info)
        return EXIT_OK
    print(info)
    if arguments.tensors and info.tensors:
        print(f"\n{info.tensor_table()}")
    return EXIT_OK
