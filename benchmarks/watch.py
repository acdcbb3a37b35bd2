"""``watch``: what the callbacks that watch over a run add to a step of FSDP2.

All sides are alive at once and take turns of 24 steps (`turns`); differences are those within a round, with intervals
of 95 % by bootstrap (`paired`)::

    python -m benchmarks watch    # five minutes for one process, more than ten for two

``ACCELIGHT_BENCH_PROCESSES`` sets the processes (default "1,2"), ``ACCELIGHT_BENCH_REPEATS`` the rounds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from accelight.callbacks import ReplicaCheck, StepGuard, Watchdog
from benchmarks import paired, results
from benchmarks.sharded_training import OURS_FSDP2, Work, train
from benchmarks.turns import Turns, take_turns

WIDTH = 32
NONE = "no callback"
SIDES: dict[str, Callable[[], Sequence[Callback]]] = {
    NONE: tuple,
    "Watchdog": lambda: [Watchdog(dirpath=tempfile.mkdtemp())],
    "ReplicaCheck": lambda: [ReplicaCheck()],
    "StepGuard": lambda: [StepGuard()],
}


def run() -> None:
    """Print what each adds; the target stands beside it."""
    turns = Turns(int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "150")))
    measured = {}
    for world_size in map(int, os.environ.get("ACCELIGHT_BENCH_PROCESSES", "1,2").split(",")):
        rounds = take_turns(list(SIDES), world_size, _train, turns, torch.randn(2, WIDTH))
        for side in SIDES:
            print(
                f"{world_size} x {side:14} {paired.median_of(rounds, side).in_ms()} a step   added "
                f"{paired.difference(rounds, side, NONE).in_ms()}"
                + ("   target: <= 0.05 ms" if side in ("Watchdog", "ReplicaCheck") and world_size == 1 else "")
            )
        measured[str(world_size)] = {"seconds_per_step": rounds}
    results.keep("watch", {"turns": asdict(turns), "processes": measured})


def _train(side: str, loader: DataLoader[Any]) -> None:
    train(OURS_FSDP2, Work(num_layers=4, width=WIDTH, accumulate=1, num_steps=5), loader, SIDES[side]())
