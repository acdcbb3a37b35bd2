"""The ``accelight`` command. It starts fast: nothing but the standard library is imported, and little of that."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from .errors import CheckpointError

T = TypeVar("T")

EXIT_OK, EXIT_BAD_CHECKPOINT, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (bad checkpoint, or the system's no), 2 (usage)."""
    arguments = _parser().parse_args(argv)
    collects = gc.isenabled()
    gc.disable()  # a hundred thousand tensors are many objects to go through in vain
    try:
        return int(arguments.run(arguments)) if arguments.debug else _run(arguments)
    finally:
        if collects:
            gc.enable()


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run(arguments))
    except (CheckpointError, OSError, ModuleNotFoundError) as error:
        return _fail(error, EXIT_BAD_CHECKPOINT)
    except (ValueError, TypeError) as error:
        return _fail(error, EXIT_USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was left behind", 130)


def _fail(error: object, status: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"accelight: error: {text}", file=sys.stderr)
    return status


class _Version(argparse.Action):
    """``--version``, looking the version up only when asked."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: object):
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"accelight {version('accelight')}")
        parser.exit()


def _checked(check: Callable[[str], T]) -> Callable[[str], T]:
    """Return ``check`` as an argparse type: its ValueError becomes a usage error with its own words."""

    def convert(text: str) -> T:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _size(text: str) -> int:
    from .shards import parse_size

    return parse_size(int(text) if text.isdigit() else text)


def _dtype(text: str) -> str:
    from .dtypes import conversion_target

    conversion_target(text)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accelight", description="Tools for sharded checkpoints.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_merge(commands.add_parser)
    return parser


def _add_merge(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_parser(
        "merge-weights",
        help="merge a sharded checkpoint into safetensors",
        description="Merge the weights of a sharded (FSDP, torch.distributed.checkpoint) checkpoint into safetensors.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint_dir", metavar="CKPT", help="checkpoint folder, or the folder above it")
    add("output_path", metavar="OUT", help="folder for model.safetensors; made where missing")
    add(
        *_spellings("max-shard-size"),
        type=_checked(_size),
        metavar="SIZE",
        help="split into files of at most this, e.g. 5GB",
    )
    add("--dtype", type=_checked(_dtype), help="convert floating-point tensors: fp32, fp16, bf16 or fp64")
    add(
        *_spellings("strip-prefix"),
        metavar="ATTR",
        help="keep what is under this attribute, or 'auto'",
    )
    add("--include", action="append", metavar="PATTERN", help="write only names that match; may be repeated")
    add("--exclude", action="append", metavar="PATTERN", help="leave out names that match; may be repeated")
    add(
        *_spellings("unsafe-serialization"),
        action="store_true",
        help="write pytorch_model.bin instead",
    )
    add(
        *_spellings("remove-checkpoint-dir"),
        action="store_true",
        help="remove the checkpoint after a comparison",
    )
    add("--threads", type=int, metavar="N", help="threads that copy (default: what measured best)")
    add("--verify", action="store_true", help="read the result back and compare every byte with its source")
    add("--json", action="store_true", help="print the report as JSON")
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=_merge)


def _spellings(name: str) -> list[str]:
    """Return an option with hyphens, and with underscores as Accelerate's command has it."""
    return [f"--{name}", f"--{name.replace('-', '_')}"]


def _merge(arguments: argparse.Namespace) -> int:
    from .merge import merge_fsdp_weights

    report = merge_fsdp_weights(
        arguments.checkpoint_dir,
        arguments.output_path,
        not arguments.unsafe_serialization,
        arguments.remove_checkpoint_dir,
        max_shard_size=arguments.max_shard_size,
        dtype=arguments.dtype,
        strip_prefix=arguments.strip_prefix,
        include=arguments.include,
        exclude=arguments.exclude,
        threads=arguments.threads,
        progress=False if arguments.quiet or arguments.json else None,
        verify=arguments.verify,
    )
    if arguments.json:
        import json

        print(json.dumps(report.to_dict(), indent=2))
    elif not arguments.quiet:
        print(report)
        for reason, names in report.skipped_by_reason().items():
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            print(f"  left out, {reason}: {len(names)} ({shown})", file=sys.stderr)
    return EXIT_OK
