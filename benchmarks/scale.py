"""``scale``: calls and bytes of an optimizer step on 2, 4 and 8 processes, counted, against the formula.

``ACCELIGHT_BENCH_PROCESSES`` sets the processes (default "2,4,8")::

    ACCELIGHT_BENCH_PROCESSES=2,4 python -m benchmarks scale

With U units of B bytes in all and A micro-batches a step, each unit is gathered twice for a micro-batch (forward and
backward), and its gradients are reduced and scattered once for a step: 2AU calls of 2AB bytes, and U of B. With
``reshard_during_accumulation=False`` it is gathered once for a step. Two copies (HSDP) gather and scatter among half of
the processes, and add U all-reduces of this process's shards. Lightning itself sends one small broadcast a micro-batch.
Start and end are left out: it is the difference between a longer and a shorter run.
"""

from __future__ import annotations

import os
from collections import Counter

from benchmarks.sharded_training import COPIES, KEPT, OURS_FSDP1, OURS_FSDP2, Work
from benchmarks.sharded_training import run as train
from tests.ranks import run_on_ranks

NUM_LAYERS = 4
WIDTH = 32
"""Divides by every number of processes: nothing is padded."""
STEPS = (3, 5)
Counts = dict[str, tuple[float, float]]
"""Calls and bytes a step, by kind."""


def run() -> None:
    """Print what was counted beside the formula."""
    failed = False
    for world_size in map(int, os.environ.get("ACCELIGHT_BENCH_PROCESSES", "2,4,8").split(",")):
        for version in (OURS_FSDP1, OURS_FSDP2):
            for suffix in ("", KEPT, COPIES) if world_size > 2 else ("", KEPT):
                for accumulate in (1, 4):
                    found = _count(world_size, version + suffix, accumulate)
                    expected = _formula(world_size, suffix, accumulate)
                    failed |= found != expected
                    print(
                        f"{world_size} x {version + suffix:32} accumulation {accumulate}   {_listed(found)}   "
                        + ("as the formula says" if found == expected else f"FORMULA: {_listed(expected)}")
                    )
    print("target: equal to the formula everywhere" + (": NOT MET" if failed else ": met"))


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


def _formula(world_size: int, suffix: str, accumulate: int) -> Counts:
    num_bytes = 4.0 * NUM_LAYERS * WIDTH * (WIDTH + 1)
    gathers = 1 if suffix == KEPT else 2 * accumulate
    expected: Counts = {
        "broadcast": (accumulate, 0.0),
        "gather": (gathers * NUM_LAYERS, gathers * num_bytes),
        "reduce_scatter": (NUM_LAYERS, num_bytes),
    }
    if suffix == COPIES:
        expected["allreduce"] = (NUM_LAYERS, num_bytes / (world_size // 2))
    return dict(sorted(expected.items()))


def _listed(counts: Counts) -> str:
    return ", ".join(f"{calls:g} {kind} {num_bytes / 1e3:g} kB" for kind, (calls, num_bytes) in counts.items())
