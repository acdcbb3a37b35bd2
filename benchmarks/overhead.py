"""``overhead``: what the Trainer adds to a hand-written FSDP2 loop, ours against Lightning's ``ModelParallelStrategy``.

Accelerate's own loop, FSDP2 forced on the CPU where it would fall back to DDP, stands beside them: it has no Trainer.

``ACCELIGHT_BENCH_STEPS`` sets the steps of a run (default 200), ``ACCELIGHT_BENCH_PROCESSES`` the processes (default
"1,2").
"""

from __future__ import annotations

import os
import statistics

from benchmarks.sharded_training import ACCELERATE, BY_HAND, LIGHTNING_FSDP2, OURS_FSDP2, Work
from benchmarks.sharded_training import run as train
from tests.ranks import run_on_ranks

KINDS = (BY_HAND, LIGHTNING_FSDP2, ACCELERATE, OURS_FSDP2)
REPEATS = 5


def run() -> None:
    """Print added time and collectives a step; the targets stand beside them."""
    num_steps = int(os.environ.get("ACCELIGHT_BENCH_STEPS", "200"))
    for world_size in map(int, os.environ.get("ACCELIGHT_BENCH_PROCESSES", "1,2").split(",")):
        work = Work(num_layers=4, width=32, accumulate=1, num_steps=num_steps)
        few, more = (Work(4, 32, 1, number) for number in (5, 10))
        calls = {
            kind: [run_on_ranks(world_size, train, kind, size, True)[0].calls.total() for size in (few, more)]
            for kind in KINDS
        }
        rounds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(REPEATS):
            for kind, values in rounds.items():
                seconds = run_on_ranks(world_size, train, kind, work, False, timeout_s=300)[0].seconds_per_step
                values.append(statistics.median(seconds))
        medians = {kind: statistics.median(values) for kind, values in rounds.items()}
        for kind in KINDS:
            added = (medians[kind] - medians[BY_HAND]) * 1000
            per_step = (calls[kind][1] - calls[kind][0]) / 5
            spread = (max(rounds[kind]) - min(rounds[kind])) * 1000
            print(
                f"{world_size} x {kind:32} {medians[kind] * 1000:7.3f} ms a step   spread {spread:6.3f} ms   added "
                f"{added:6.3f} ms   {per_step:5.1f} collectives a step"
            )
        ratio = (medians[OURS_FSDP2] - medians[BY_HAND]) / max(1e-9, medians[LIGHTNING_FSDP2] - medians[BY_HAND])
        print(f"    added, ours / Lightning's: {ratio:.2f}   targets: <= 1.05, and no collective more")
