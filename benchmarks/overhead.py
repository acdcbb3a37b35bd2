"""``overhead``: what the Trainer adds to a hand-written FSDP2 loop, ours against Lightning's ``ModelParallelStrategy``.

Accelerate's own loop, FSDP2 forced on the CPU where it would fall back to DDP, stands beside them: it has no Trainer.
What a Trainer costs whatever the strategy is what Lightning's plainest one, DDP, adds to DDP by hand. All sides are
alive at once and take turns of 24 steps (`turns`); differences are those within a round, with intervals of 95 % by
bootstrap (`paired`)::

    python -m benchmarks overhead                              # five minutes on two idle cores
    ACCELIGHT_BENCH_REPEATS=1000 python -m benchmarks overhead # narrower intervals

``ACCELIGHT_BENCH_PROCESSES`` sets the processes (default "1,2"). With more of them than cores, waiting is measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import paired, results
from benchmarks.sharded_training import (
    ACCELERATE,
    BY_HAND,
    DDP_BY_HAND,
    LIGHTNING_DDP,
    LIGHTNING_FSDP2,
    OURS_FSDP2,
    Work,
    train,
)
from benchmarks.sharded_training import run as run_counting
from benchmarks.turns import Turns, take_turns
from tests.ranks import run_on_ranks

ADDED_TO = {LIGHTNING_DDP: DDP_BY_HAND, LIGHTNING_FSDP2: BY_HAND, ACCELERATE: BY_HAND, OURS_FSDP2: BY_HAND}
KINDS = (BY_HAND, DDP_BY_HAND, *ADDED_TO)
WIDTH = 32
_FEW, _MORE = (Work(num_layers=4, width=WIDTH, accumulate=1, num_steps=number) for number in (5, 10))


def run() -> None:
    """Print added time and collectives a step; the targets stand beside them."""
    turns = Turns(int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "110")))
    measured = {}
    for world_size in map(int, os.environ.get("ACCELIGHT_BENCH_PROCESSES", "1,2").split(",")):
        calls = {kind: _collectives_a_step(world_size, kind) for kind in KINDS}
        rounds = take_turns(KINDS, world_size, _train, turns, torch.randn(2, WIDTH))
        for kind in KINDS:
            print(
                f"{world_size} x {kind:32} {paired.median_of(rounds, kind).in_ms()} a step   added "
                f"{paired.difference(rounds, kind, ADDED_TO.get(kind, kind)).in_ms()}   "
                f"{calls[kind]:4.1f} collectives a step"
            )
        _say("step", paired.ratio(rounds, OURS_FSDP2, ACCELERATE), "Accelerate's loop's")
        for peer in (LIGHTNING_FSDP2, ACCELERATE):
            _say("added", paired.ratio_of_added(rounds, OURS_FSDP2, peer, BY_HAND), peer)
        for kind in (LIGHTNING_FSDP2, OURS_FSDP2):
            print(f"    {kind}, beyond what the Trainer adds with DDP: {_beyond_the_trainer(rounds, kind).in_ms()}")
        measured[str(world_size)] = {"seconds_per_step": rounds, "collectives_per_step": calls}
    results.keep("overhead", {"turns": asdict(turns), "added_to": ADDED_TO, "processes": measured})


def _beyond_the_trainer(rounds: Mapping[str, Sequence[float]], kind: str) -> paired.Interval:
    return paired.difference_of_added(rounds, (kind, ADDED_TO[kind]), (LIGHTNING_DDP, DDP_BY_HAND))


def _say(what: str, found: paired.Interval | None, peer: str) -> None:
    if found is None:
        print(
            f"    {what}, ours / {peer}: none, for it is not sure that the peer adds anything: more rounds would tell"
        )
    else:
        print(f"    {what}, ours / {peer}: {found}   target: <= 1.0")


def _train(kind: str, loader: torch.utils.data.DataLoader[Any]) -> None:
    train(kind, _FEW, loader)


def _collectives_a_step(world_size: int, kind: str) -> float:
    few, more = (run_on_ranks(world_size, run_counting, kind, work, True)[0].calls.total() for work in (_FEW, _MORE))
    return (more - few) / (_MORE.num_steps - _FEW.num_steps)
