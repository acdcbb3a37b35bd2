"""``accumulate``: optimizer steps with accumulation 8, against Lightning's own strategies and a hand-written loop.

``ACCELIGHT_BENCH_WIDTH`` sets the width of its eight layers (default 512, 2 M parameters; 1984 for 31 M)::

    ACCELIGHT_BENCH_WIDTH=1984 python -m benchmarks accumulate
"""

from __future__ import annotations

import os
import statistics

from benchmarks import results
from benchmarks.sharded_training import (
    BY_HAND,
    KEPT,
    LIGHTNING_FSDP1,
    LIGHTNING_FSDP2,
    OURS_FSDP1,
    OURS_FSDP2,
    Work,
)
from benchmarks.sharded_training import (
    run as train,
)
from tests.ranks import run_on_ranks

KINDS = {
    LIGHTNING_FSDP1: LIGHTNING_FSDP1,
    OURS_FSDP1: LIGHTNING_FSDP1,
    OURS_FSDP1 + KEPT: LIGHTNING_FSDP1,
    LIGHTNING_FSDP2: LIGHTNING_FSDP2,
    OURS_FSDP2: LIGHTNING_FSDP2,
    OURS_FSDP2 + KEPT: LIGHTNING_FSDP2,
    BY_HAND: LIGHTNING_FSDP2,
}
"""Each, and what it is compared with."""
REPEATS = 5


def run() -> None:
    """Print counts, medians, spread and ratios; the targets stand beside them."""
    work = Work(num_layers=8, width=int(os.environ.get("ACCELIGHT_BENCH_WIDTH", "512")), accumulate=8, num_steps=5)
    counted = {kind: run_on_ranks(2, train, kind, work, True, timeout_s=300)[0] for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(REPEATS):
        for kind, values in seconds.items():
            values += run_on_ranks(2, train, kind, work, False, timeout_s=300)[0].seconds_per_step
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    for kind, peer in KINDS.items():
        gathered, reduced = (
            sum(number for name, number in counted[kind].num_bytes.items() if part in name) / work.num_steps / 1e6
            for part in ("gather", "reduce_scatter")
        )
        spread = max(seconds[kind]) - min(seconds[kind])
        print(
            f"{kind:32} {medians[kind] * 1000:8.1f} ms a step   spread {spread * 1000:7.1f} ms   gathered "
            f"{gathered:8.1f} MB, reduced {reduced:8.1f} MB a step   {medians[peer] / medians[kind]:5.2f} x {peer}"
        )
    title = f"A step of {work.accumulate} micro-batches, 2 processes, {work.num_layers} layers of {work.width}"
    results.keep_panels(
        "accumulate",
        {title: seconds},
        num_bytes={kind: one.num_bytes for kind, one in counted.items()},
        num_steps=work.num_steps,
    )
    print(
        "targets: one reduction a step by default (an eighth of ModelParallelStrategy's; Lightning's FSDPStrategy "
        "makes one, too), one gather as well when kept; >= 1.5 and >= 3 times"
    )
