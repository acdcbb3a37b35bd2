"""``accelight plan``: its options, and the call behind them. Torch is imported when it runs, not before."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan_config import STRATEGIES, PlanConfig

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
EXIT_OK, EXIT_FAILED = 0, 1


def add_plan(add_parser: Callable[..., argparse.ArgumentParser], summary: str = "") -> None:
    """Add the subcommand.

    Args:
        add_parser: Of the whole command's subcommands.
        summary: For the help of the whole command.
    """
    parser = add_parser(
        "plan",
        help=summary,
        description="Show how much memory training uses on each process, before it is launched: the Trainer runs some "
        "steps with the real strategy in one process, without weights and without that memory. The exit status is 1 "
        "if none of the tried variants fits in --memory.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("module", nargs="?", metavar="MODULE:CLASS", help="LightningModule: package.module:Class or path/file.py:Class")
    add("--module-args", type=_json, default={}, metavar="JSON", help="keyword arguments of the class")
    add(
        "--hf-config",
        metavar="CONFIG",
        help="instead of a module, a Hugging Face config: a folder, config.json, or a hub name",
    )
    add(
        *("--batch",),
        action="append",
        metavar="SPEC",
        help="a tensor of one process's micro-batch, NAME:SHAPE:DTYPE such as input_ids:8x2048:int64 (can be "
        "repeated), or module:function that returns a batch (default: the module's example_input_array)",
    )
    add("--batch-size", type=int, metavar="N", help="with --hf-config: samples in one process's micro-batch")
    add("--seq-len", type=int, metavar="N", help="with --hf-config: tokens per sample")
    add("--world-size", type=int, default=1, metavar="N", help="number of processes (default: 1)")
    add(
        "--strategy",
        choices=sorted(STRATEGIES),
        default="fsdp2",
        help="strategy that shards the model (default: fsdp2)",
    )
    add("--strategy-args", type=_json, default={}, metavar="JSON", help="other keyword arguments of the strategy")
    add("--wrap", action="append", default=[], metavar="CLASS", help="FSDP: class of the units (can be repeated)")
    add("--activation-checkpointing", action="store_true", help="recompute the units in backward")
    add("--precision", default="32-true", help="same as the Trainer's (default: 32-true)")
    add("--accumulate", type=int, default=1, metavar="N", help="micro-batches per optimizer step (default: 1)")
    add("--clip", type=float, metavar="NORM", help="maximum gradient norm")
    add(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="memory of each process, e.g. 24GB: also try variants that could fit",
    )
    add("--plot", type=Path, metavar="FILE.svg", help="draw the units, and the memory at the peak by part")
    add("--json", action="store_true", help="print as JSON")
    add("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.module is None) == (arguments.hf_config is None):
        raise ValueError("Pass either MODULE:CLASS or --hf-config.")
    if arguments.hf_config is not None and arguments.module_args:
        raise ValueError("--module-args are of MODULE:CLASS. Change the config itself for --hf-config.")
    if (arguments.batch_size or arguments.seq_len) and (arguments.hf_config is None or arguments.batch):
        raise ValueError("--batch-size and --seq-len are the batch of --hf-config: use either them or --batch.")
    plan_config = PlanConfig(
        module=arguments.module,
        module_args=arguments.module_args,
        hf_config=arguments.hf_config,
        batch=tuple(arguments.batch or ()),
        batch_size=arguments.batch_size,
        sequence_length=arguments.seq_len,
        world_size=arguments.world_size,
        strategy=arguments.strategy,
        strategy_args=arguments.strategy_args,
        wrap=tuple(arguments.wrap),
        activation_checkpointing=arguments.activation_checkpointing,
        precision=arguments.precision,
        accumulate=arguments.accumulate,
        clip=arguments.clip,
    )
    from .shape_tensors import PlanningError
    from .svg import check_svg_path

    if arguments.plot is not None:
        check_svg_path(arguments.plot)  # before minutes of planning
    try:
        return _plan(plan_config, arguments)
    except PlanningError as error:
        if arguments.debug:
            raise
        print(f"accelight: error: {error}", file=sys.stderr)
        return EXIT_FAILED


def _plan(plan_config: PlanConfig, arguments: argparse.Namespace) -> int:
    if arguments.memory is None:
        plan = plan_of(plan_config)
        if arguments.plot is not None:
            plan.save_plot(arguments.plot)
        print(json.dumps(plan.to_dict(), indent=2) if arguments.json else plan)
        return EXIT_OK
    return _try(plan_config, arguments.memory, arguments.plot, as_json=arguments.json)


def _try(plan_config: PlanConfig, memory_bytes: int, plot: Path | None, *, as_json: bool) -> int:
    from .memory_plan import draw
    from .planner import advice, table, try_variants

    variants = try_variants(plan_config, memory_bytes, plan_of)
    fits = any(variant.fits(memory_bytes) for variant in variants)
    if plot is not None:
        pictured = [(variant.change, variant.plan or variant.refused) for variant in variants]
        plot.write_text(draw(pictured, memory_bytes), encoding="utf-8")
    if as_json:
        output: dict[str, Any] = {
            "memory_bytes": memory_bytes,
            "advice": advice(variants, memory_bytes),
            "variants": [
                {
                    "change": variant.change,
                    "fits": variant.fits(memory_bytes),
                    "plan": None if variant.plan is None else variant.plan.to_dict(),
                    "refused": variant.refused,
                }
                for variant in variants
            ],
        }
        print(json.dumps(output, indent=2))
    else:
        print(f"{variants[0].plan}\n")
        print(f"{table(variants, memory_bytes)}\n\n{advice(variants, memory_bytes)}")
    return EXIT_OK if fits else EXIT_FAILED


def plan_of(plan_config: PlanConfig) -> MemoryPlan:
    """Return the plan of what is asked for."""
    from .planner import plan_memory

    plan = plan_memory(
        plan_config.make_module,
        plan_config.make_batch,
        plan_config.make_strategy,
        world_size=plan_config.world_size,
        precision=plan_config.precision,
        accumulate_grad_batches=plan_config.accumulate,
        gradient_clip_val=plan_config.clip,
    )
    return replace(plan, settings=plan_config.in_words())


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object: use {{"name": value}}.')
    return found


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use a number and B, KB, MB, GB, KiB, MiB or GiB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])
