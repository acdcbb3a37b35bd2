"""``scale``: calls and bytes of an optimizer step on 2, 4 and 8 processes, counted, against the formula.

``ACCELIGHT_BENCH_PROCESSES`` sets the processes (default "2,4,8")::

    ACCELIGHT_BENCH_PROCESSES=2,4 python -m benchmarks scale

With U units of B bytes in all and A micro-batches a step, each unit is gathered twice for a micro-batch (forward and
backward), and its gradients are reduced and scattered once for a step: 2AU calls of 2AB bytes, and U of B. FSDP2
gathers the last unit, whose backward comes first, once for a micro-batch: A calls less. With
``reshard_during_accumulation=False`` each unit is gathered once for a step. Two copies (HSDP) gather and scatter among
half of the processes, and add U all-reduces of this process's shards. Small reductions: one of 4 (P + 1) bytes for a
step (which of the P parameters were used, and SIGTERM, in place of Lightning's broadcast), one of 4 bytes for each
other micro-batch (SIGTERM).

ZeRO reduces all B bytes at once: stage 1 once for a step, stages 2 and 3, which keep no whole gradients, once for each
micro-batch; stages 1 and 2 gather the weights once after the step, stage 3 each of its parameters (small ones stay
gathered through the window, as here). Small reductions: one of 4 bytes for each micro-batch (SIGTERM), one of
16 (P + 1) bytes beside each reduction, and one of 4 or 8 after each step (overflow and, in stage 3, the norm).

Start and end are left out: it is the difference between a longer and a shorter run.
"""

from __future__ import annotations

import os
from collections import Counter

from benchmarks import results
from benchmarks.sharded_training import COPIES, KEPT, OURS_FSDP1, OURS_FSDP2, OURS_ZERO, Work
from benchmarks.sharded_training import run as train
from tests.ranks import run_on_ranks

NUM_LAYERS = 4
WIDTH = 32
"""Divides by every number of processes: nothing is padded."""
_NUM_PARAMETERS = 2 * NUM_LAYERS
STEPS = (3, 5)
Counts = dict[str, tuple[float, float]]
"""Calls and bytes a step, by kind."""


def run() -> None:
    """Print what was counted beside the formula."""
    failed, kept = False, []
    for world_size in map(int, os.environ.get("ACCELIGHT_BENCH_PROCESSES", "2,4,8").split(",")):
        suffixes = ("", KEPT, COPIES) if world_size > 2 else ("", KEPT)
        kinds = [version + suffix for version in (OURS_FSDP1, OURS_FSDP2) for suffix in suffixes]
        for kind in [*kinds, *(f"{OURS_ZERO}{stage}" for stage in (1, 2, 3))]:
            for accumulate in (1, 4):
                found = _count(world_size, kind, accumulate)
                expected = _formula(world_size, kind, accumulate)
                failed |= found != expected
                kept.append({"processes": world_size, "kind": kind, "accumulate": accumulate, "a_step": found})
                print(
                    f"{world_size} x {kind:32} accumulation {accumulate}   {_listed(found)}   "
                    + ("as the formula says" if found == expected else f"FORMULA: {_listed(expected)}")
                )
    print("target: equal to the formula everywhere" + (": NOT MET" if failed else ": met"))
    results.keep("scale", {"counted": kept})


def _count(world_size: int, kind: str, accumulate: int) -> Counts:
    few, more = (
        run_on_ranks(world_size, train, kind, Work(NUM_LAYERS, WIDTH, accumulate, number), True, timeout_s=300)[0]
        for number in STEPS
    )
    calls = _by_kind(more.calls) - _by_kind(few.calls)
    num_bytes = _by_kind(more.num_bytes) - _by_kind(few.num_bytes)
    between = STEPS[1] - STEPS[0]
    return {kind: (calls[kind] / between, num_bytes[kind] / between) for kind in sorted(calls)}


def _by_kind(counts: Counter[str]) -> Counter[str]:
    """FSDP1 and FSDP2 call different forms of the same collective."""
    merged: Counter[str] = Counter()
    for name, number in counts.items():
        merged["gather" if "gather" in name else "reduce_scatter" if "scatter" in name else name] += number
    return merged


def _formula(world_size: int, kind: str, accumulate: int) -> Counts:
    num_bytes = 4.0 * NUM_LAYERS * WIDTH * (WIDTH + 1)
    if kind.startswith(OURS_ZERO):
        return _formula_of_zero(int(kind.removeprefix(OURS_ZERO)), accumulate, num_bytes)
    kept = kind.endswith(KEPT)
    gathers = NUM_LAYERS if kept else 2 * accumulate * NUM_LAYERS - accumulate * kind.startswith(OURS_FSDP2)
    expected: Counts = {
        "allreduce": (accumulate, 16.0 * (accumulate - 1) + 4.0 * (_NUM_PARAMETERS + 2)),
        "gather": (gathers, gathers * num_bytes / NUM_LAYERS),
        "reduce_scatter": (NUM_LAYERS, num_bytes),
    }
    if kind.endswith(COPIES):
        calls, small_bytes = expected["allreduce"]
        expected["allreduce"] = (calls + NUM_LAYERS, small_bytes + num_bytes / (world_size // 2))
    return expected


def _formula_of_zero(stage: int, accumulate: int, num_bytes: float) -> Counts:
    reductions = 1 if stage == 1 else accumulate
    num_small = accumulate + reductions + 1
    small_bytes = 16 * accumulate + 16 * (_NUM_PARAMETERS + 1) * reductions + (8 if stage == 3 else 4)
    if stage == 3:
        return {
            "allreduce": (num_small, small_bytes),
            "gather": (_NUM_PARAMETERS, num_bytes),
            "reduce_scatter": (reductions, reductions * num_bytes),
        }
    return {
        "allreduce": (num_small + reductions, small_bytes + reductions * num_bytes),
        "gather": (1, num_bytes),
    }


def _listed(counts: Counts) -> str:
    return ", ".join(f"{calls:g} {kind} {num_bytes / 1e3:g} kB" for kind, (calls, num_bytes) in counts.items())
