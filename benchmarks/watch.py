"""``watch``: what the callbacks that watch over a run add to a step of FSDP2.

One run puts a callback in for a turn of six steps and takes it out for another, again and again: so short that whatever
else the machine does hits both. The last four steps of a turn count. Differences are those within a round of two turns,
with intervals of 95 % by bootstrap (`paired`). A callback that does nothing shows what the Trainer takes for any::

    python -m benchmarks watch    # nine minutes for one process, more for two

The threads of `Watchdog` work beside the steps, every few seconds; what they add is the processor time that Linux
counts for them in turns of 200 steps. ``ACCELIGHT_BENCH_PROCESSES`` sets the processes (default "1,2"),
``ACCELIGHT_BENCH_REPEATS`` the rounds.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from accelight.callbacks import ReplicaCheck, StepGuard, Watchdog
from benchmarks import paired, results
from benchmarks.sharded_training import OURS_FSDP2, Work, train
from benchmarks.turns import WITH, WITHOUT, Batches, Rounds, Turns, switch_in_turns, take_turns

WIDTH = 32
CLIPPING = ", clipping"
"""Of a side: gradients are clipped by norm, with the callback and without it."""
SIDES: dict[str, Callable[[], Callback]] = {
    "nothing": Callback,
    "Watchdog": lambda: Watchdog(dirpath=tempfile.mkdtemp()),
    "ReplicaCheck": ReplicaCheck,
    f"StepGuard{CLIPPING}": StepGuard,
    "StepGuard": StepGuard,
}
_WORK = Work(num_layers=4, width=WIDTH, accumulate=1, num_steps=5)
_OF_THREADS = Turns(num_rounds=20, num_steps=200, num_unmeasured=1)
_TARGET = "   target: <= 0.05 ms"


def run() -> None:
    """Print what each adds; the target stands beside it."""
    turns = Turns(int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "1500")), num_steps=4, num_unmeasured=2)
    measured: dict[str, dict[str, Rounds]] = {}
    for world_size in map(int, os.environ.get("ACCELIGHT_BENCH_PROCESSES", "1,2").split(",")):
        of_size = measured[str(world_size)] = {}
        target = _TARGET if world_size == 1 else ""
        batch = torch.randn(2, WIDTH)
        for side in SIDES:
            rounds = of_size[side] = switch_in_turns(side, world_size, _train, turns, batch)
            print(
                f"{world_size} x {side:19} {paired.median_of(rounds, WITHOUT).in_ms()} a step without   added "
                f"{paired.difference(rounds, WITH, WITHOUT).in_ms()}{target if side != 'nothing' else ''}",
                flush=True,
            )
        [side] = of_threads = take_turns(["threads of Watchdog"], world_size, _train_watched, _OF_THREADS, batch)
        print(f"{world_size} x {side:19} {paired.median_of(of_threads, side).in_ms()} a step, beside it{target}")
        of_size |= {side: of_threads}
    results.keep("watch", {"turns": asdict(turns), "seconds_per_step": measured})


class _Switch(Callback):
    """Puts a callback into a running fit, and takes it out again."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._fit: tuple[Trainer, LightningModule] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._fit = trainer, pl_module

    def __call__(self, what: str) -> None:
        """Follow what a side is told, between two batches."""
        assert self._fit is not None
        trainer, module = self._fit
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if (what == WITH) == (self._callback in callbacks):
            return
        if what == WITH:
            callbacks.append(self._callback)
            self._callback.setup(trainer, module, "fit")
            self._callback.on_train_start(trainer, module)
        else:
            callbacks.remove(self._callback)
            self._callback.on_train_end(trainer, module)
            self._callback.teardown(trainer, module, "fit")


def _train(side: str, loader: DataLoader[Any]) -> None:
    _batches(loader).on_turn = switch = _Switch(SIDES[side]())
    train(OURS_FSDP2, _WORK, loader, [switch], max_norm=1.0 if side.endswith(CLIPPING) else None)


def _train_watched(side: str, loader: DataLoader[Any]) -> None:
    _batches(loader).clock = _time_of_threads
    train(OURS_FSDP2, _WORK, loader, [SIDES["Watchdog"]()])


def _batches(loader: DataLoader[Any]) -> Batches:
    assert isinstance(loader.dataset, Batches)
    return loader.dataset


def _time_of_threads() -> float:
    """Return the processor time of Watchdog's threads so far, in seconds."""
    own = [one.native_id for one in threading.enumerate() if one.name.startswith("accelight-watchdog")]
    return sum(int(Path(f"/proc/self/task/{one}/schedstat").read_text().split()[0]) for one in own) / 1e9
