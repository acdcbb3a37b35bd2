"""``save-zero``: how long training stands still for a checkpoint of DeepSpeed's, written at once and in the background.

``ACCELIGHT_BENCH_GB`` sets the size of the weights, ``ACCELIGHT_BENCH_DIR`` the folder on the disk that is to be
measured, with room for ten times as much::

    python -m benchmarks save-zero                              # 0.2 GB of weights, a minute or two
    ACCELIGHT_BENCH_GB=0.05 python -m benchmarks save-zero

Two gloo processes train with each stage, all alive at once, and save in turn, between two steps, into a new name.
AdamW's state in fp32 is three times the weights; stage 2 writes the weights beside it. Ratios are those within a round,
with intervals of 95 % by bootstrap (`paired`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import paired, results
from benchmarks.save import fit, in_background, scratch_folder, synchronous
from benchmarks.turns import alive, in_rounds, turn

_NUM_ROUNDS = int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "9"))
_NUM_RANKS = 2
_TARGET = 0.1
_STAGES = ("zero2", "zero3")
_SIZE = "num_bytes"
"""A file beside a side's checkpoints with their size."""


def run() -> None:
    """Print medians and ratios; the target stands beside them."""
    with scratch_folder() as (scratch, num_bytes):
        with alive(list(_STAGES), _NUM_RANKS, _Saves(scratch, num_bytes)) as live:
            rounds = in_rounds(
                {f"{stage} {way}": partial(turn, live, stage, way) for stage in _STAGES for way in _ways()},
                _NUM_ROUNDS,
                num_unmeasured=2,
            )
        written = {stage: int(Path(scratch, stage, _SIZE).read_text()) for stage in _STAGES}
    for name in rounds:
        print(f"  {name:34} {paired.median_of(rounds, name).in_ms()}")
    for stage in _STAGES:
        found = paired.ratio(rounds, f"{stage} async_save", f"{stage} save")
        print(f"  {stage} async_save / save, {written[stage] / 10**9:.2f} GB: {found}   target <= {_TARGET}")
    results.keep(
        "save-zero",
        {"bytes_of_weights": num_bytes, "bytes_written": written, "processes": _NUM_RANKS, "seconds": rounds},
    )


@dataclass(frozen=True)
class _Saves:
    """Trains in one of a stage's processes, and saves between steps as it is told."""

    folder: str
    num_bytes: int

    def __call__(self, stage: str, connection: Connection) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        from accelight.strategies import AccelDeepSpeedStrategy

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(stage[-1])}}
        strategy = AccelDeepSpeedStrategy(hf_ds_config=config, async_save=True)
        fit(strategy, Path(self.folder, stage), self.num_bytes, _ways(), connection)


def _ways() -> dict[str, Callable[[Any, str], Callable[[], Any]]]:
    def at_once(trainer: Any, path: str) -> Callable[[], Any]:
        synchronous(trainer, path)

        def note_size() -> None:
            if trainer.is_global_zero:
                size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
                Path(path).with_name(_SIZE).write_text(str(size))

        return note_size

    return {"save": at_once, "async_save": in_background}
