"""Several ways to train that are alive at once, each in processes of its own, and take turns.

Whole runs one after the other differ by more than what a step costs: the machine warms up, other programs come and go.
Turns of some tens of milliseconds meet the same machine.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

_LONGEST_WAIT_S = 300.0
_WARM_UP = 3
"""Rounds that do not count."""
END = "end"
"""What a side is told when there are no more turns."""

Sides = Mapping[str, Sequence[Connection]]
"""To each of a side's processes."""
Rounds = dict[str, list[float]]
"""Seconds of each round, of the slowest process."""


@contextmanager
def alive(sides: Sequence[str], world_size: int, run: Callable[[str, Connection], object]) -> Iterator[Sides]:
    """Start all sides, each on processes of a gloo group of its own, and end them.

    Args:
        sides: Their names.
        world_size: Processes of each.
        run: Called with the side's name in each process, until it is told `END`. It answers whatever it is told with
            the seconds it took.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "lightning.pytorch.strategies", "accelerate"])
    ends: dict[str, list[Connection]] = {}
    processes = []
    with tempfile.TemporaryDirectory(prefix="bench_turns_") as folder:
        for number, side in enumerate(sides):
            for rank in range(world_size):
                here, there = context.Pipe()
                arguments = (f"{folder}/{number}", rank, world_size, there, run, side)
                processes.append(context.Process(target=_run, args=arguments, daemon=True))
                processes[-1].start()
                there.close()
                ends.setdefault(side, []).append(here)
        try:
            yield ends
            for connection in (connection for own in ends.values() for connection in own):
                connection.send(END)
            for process in processes:
                process.join(_LONGEST_WAIT_S)
        finally:
            for process in processes:
                process.kill()


def turn(sides: Sides, side: str, what: str = "go") -> float:
    """Let a side do something, and return the seconds that its slowest process took.

    Raises:
        RuntimeError: If a process fails, with its traceback, or says nothing for five minutes.
    """
    for connection in sides[side]:
        connection.send(what)
    found = []
    for rank, connection in enumerate(sides[side]):
        if not connection.poll(_LONGEST_WAIT_S):
            raise RuntimeError(f"{side}, rank {rank}: not a word in {_LONGEST_WAIT_S:g} s.")
        answer = connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{side}, rank {rank}:\n{answer}")
        found.append(answer)
    return max(found)


def in_rounds(turns: Mapping[str, Callable[[], float]], num_rounds: int, num_unmeasured: int = _WARM_UP) -> Rounds:
    """Take every turn once in each round, in random order: what comes after another may find its disk busy.

    Args:
        turns: By name.
        num_rounds: Measured.
        num_unmeasured: Rounds before them.
    """
    rounds: Rounds = {name: [] for name in turns}
    names, order = list(turns), random.Random(0)
    for number in range(num_unmeasured + num_rounds):
        order.shuffle(names)
        for name in names:
            seconds = turns[name]()
            if number >= num_unmeasured:
                rounds[name].append(seconds)
    return rounds


def _run(
    store: str, rank: int, world_size: int, connection: Connection, run: Callable[[str, Connection], object], side: str
) -> None:
    """Run a side in one of its processes."""
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world_size}", GROUP_RANK="0")
    os.environ.update(LOCAL_WORLD_SIZE=f"{world_size}", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ.update(TORCHELASTIC_RUN_ID="bench", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        run(side, connection)
    except BaseException:
        connection.send(traceback.format_exc())
        raise
    dist.destroy_process_group()


# ---------------------------------------------------------------------- steps
@dataclass(frozen=True)
class Turns:
    """How often each side trains for how many steps."""

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


class Batches(Dataset[list[Tensor]]):
    """The same small batch again and again; each turn's first is there when it is this side's turn."""

    def __init__(self, turns: Turns, connection: Connection, batch: Tensor) -> None:
        self._turns, self._connection, self._batch = turns, connection, batch
        self._start = 0.0
        self.on_turn: Callable[[str], object] = str
        """Called with what the side is told, before each turn."""
        self.clock: Callable[[], float] = time.perf_counter
        """What counts, in seconds."""

    def __len__(self) -> int:
        return self._turns.num_batches

    def __getitem__(self, index: int) -> list[Tensor]:
        place = index % self._turns.steps_in_turn
        if place == 0:
            if index:
                self._connection.send((self.clock() - self._start) / self._turns.num_steps)
            self.on_turn(self._connection.recv())
        if place == self._turns.num_unmeasured:
            self._start = self.clock()
        return [self._batch]


@dataclass(frozen=True)
class _Steps:
    """Trains on batches that come in turns."""

    train: Train
    turns: Turns
    batch: Tensor

    def __call__(self, side: str, connection: Connection) -> None:
        self.train(side, DataLoader(Batches(self.turns, connection, self.batch), batch_size=None))


def take_turns(sides: Sequence[str], world_size: int, train: Train, turns: Turns, batch: Tensor) -> Rounds:
    """Return seconds per step, of the slowest process, of each side in each round."""
    with alive(sides, world_size, _Steps(train, turns, batch)) as live:
        return in_rounds({side: partial(turn, live, side) for side in sides}, turns.num_rounds)


WITH, WITHOUT = "with", "without"


def switch_in_turns(side: str, world_size: int, train: Train, turns: Turns, batch: Tensor) -> Rounds:
    """Return seconds per step, of the slowest process, `WITH` and `WITHOUT` something, in each round.

    The same processes take both turns, so that what distinguishes one process from another hits both alike.

    Args:
        side: What ``train`` is called with. It sets the data's `Batches.on_turn`, which is called with either word.
        world_size: Processes.
        train: Trains on every batch.
        turns: How many; each round has two.
        batch: Every batch.
    """
    twice = replace(turns, num_rounds=2 * turns.num_rounds + _WARM_UP)
    with alive([side], world_size, _Steps(train, twice, batch)) as live:
        return in_rounds({what: partial(turn, live, side, what) for what in (WITH, WITHOUT)}, turns.num_rounds)
