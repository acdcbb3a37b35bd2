"""Several ways to train that are alive at once, each in processes of its own, and take turns of a few steps.

Whole runs one after the other differ by more than what a step costs: the machine warms up, other programs come and go.
Turns of some tens of milliseconds meet the same machine.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

_LONGEST_WAIT_S = 300.0
_WARM_UP = 3
"""Rounds that do not count."""


@dataclass(frozen=True)
class Turns:
    """How often each side trains for how long."""

    num_rounds: int
    num_steps: int = 24
    """Measured in a turn."""
    num_unmeasured: int = 6
    """Before them: the caches are full of another side's."""

    @property
    def steps_in_turn(self) -> int:
        """All steps of a turn."""
        return self.num_unmeasured + self.num_steps

    @property
    def num_batches(self) -> int:
        """What a side asks for in all turns, and once more, which ends the last."""
        return (self.num_rounds + _WARM_UP) * self.steps_in_turn + 1


Train = Callable[[str, "DataLoader[Any]"], object]
"""Trains one side, in one of its processes, on every batch of a loader."""


class _Batches(Dataset[list[Tensor]]):
    """The same small batch again and again; each turn's first is there when it is this side's turn."""

    def __init__(self, turns: Turns, connection: Connection, batch: Tensor) -> None:
        self._turns, self._connection, self._batch = turns, connection, batch
        self._start = 0.0

    def __len__(self) -> int:
        return self._turns.num_batches

    def __getitem__(self, index: int) -> list[Tensor]:
        place = index % self._turns.steps_in_turn
        if place == 0:
            if index:
                self._connection.send(time.perf_counter() - self._start)
            self._connection.recv()
        elif place == self._turns.num_unmeasured:
            self._start = time.perf_counter()
        return [self._batch]


def take_turns(
    sides: Sequence[str], world_size: int, train: Train, turns: Turns, batch: Tensor
) -> dict[str, list[float]]:
    """Return seconds per step, of the slowest process, of each side in each round.

    Raises:
        RuntimeError: If a process fails, with its traceback, or says nothing for five minutes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "lightning.pytorch.strategies", "accelerate"])
    ends: dict[str, list[Connection]] = {}
    processes = []
    with tempfile.TemporaryDirectory(prefix="bench_turns_") as folder:
        for number, side in enumerate(sides):
            for rank in range(world_size):
                here, there = context.Pipe()
                arguments = (f"{folder}/{number}", rank, world_size, there, train, side, turns, batch)
                processes.append(context.Process(target=_run, args=arguments, daemon=True))
                processes[-1].start()
                there.close()
                ends.setdefault(side, []).append(here)
        try:
            rounds: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(turns.num_rounds + _WARM_UP):
                first = number % len(sides)
                for side in (*sides[first:], *sides[:first]):  # none is always after the same one
                    seconds = _turn(side, ends[side])
                    if number >= _WARM_UP:
                        rounds[side].append(seconds / turns.num_steps)
            for connection in (connection for own in ends.values() for connection in own):
                connection.send("end")
            for process in processes:
                process.join(_LONGEST_WAIT_S)
        finally:
            for process in processes:
                process.kill()
    return rounds


def _turn(side: str, connections: Sequence[Connection]) -> float:
    for connection in connections:
        connection.send("go")
    found = []
    for rank, connection in enumerate(connections):
        if not connection.poll(_LONGEST_WAIT_S):
            raise RuntimeError(f"{side}, rank {rank}: not a word in {_LONGEST_WAIT_S:g} s.")
        answer = connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{side}, rank {rank}:\n{answer}")
        found.append(answer)
    return max(found)


def _run(
    store: str, rank: int, world_size: int, connection: Connection, train: Train, side: str, turns: Turns, batch: Tensor
) -> None:
    """Train one side in one of its processes."""
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world_size}", GROUP_RANK="0")
    os.environ.update(LOCAL_WORLD_SIZE=f"{world_size}", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ.update(TORCHELASTIC_RUN_ID="bench", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        train(side, DataLoader(_Batches(turns, connection, batch), batch_size=None))
    except BaseException:
        connection.send(traceback.format_exc())
        raise
    dist.destroy_process_group()
