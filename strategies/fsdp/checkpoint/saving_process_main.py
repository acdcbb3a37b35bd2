"""The process that writes one rank's part of checkpoints, and finishes its orders when that rank is gone.

It has no model, no Lightning and no accelerator: torch's writer, orders and shared memory. `SavingProcess` starts it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from typing_extensions import override

from ....state.rendezvous import poll
from ...common.checkpoint_files import NewFolder
from .planner import LocalSavePlanner, WriteLocations
from .process_save import Answer, Begun, Part, Plan, Received, Record, receive
from .writer import FolderWriter, finish_folder

_LOOK_S = 1.0  # a process that the rank has forked may hold the connection open after the rank's end
_SLOWEST_S = 0.25


def main(descriptor: int, parent: int) -> None:
    """Carry out orders until the rank has no more, or is gone.

    Args:
        descriptor: Of the connection.
        parent: Process id of the rank.
    """
    connection = socket.socket(fileno=descriptor)
    writer = _Writer()
    while (received := _next(connection, parent)) is not None:
        answer = writer.carry_out(received)
        del received  # and the memory with it
        if answer is not None:
            try:
                connection.sendall(answer.line())
            except OSError:  # nobody is left who wants to know
                continue
    writer.drop_begun()
    sys.stderr.flush()
    os._exit(0)  # what torch does at an end takes longer than some saves


def _next(connection: socket.socket, parent: int) -> Received | None:
    while not select.select([connection], [], [], _LOOK_S)[0]:
        if os.getppid() != parent and not select.select([connection], [], [], 0)[0]:
            return None
    try:
        return receive(connection)
    except ConnectionError:
        return None


class _Planned(LocalSavePlanner):
    """Stands where torch's writer asks for what a plan's items are."""

    def __init__(self, plan: SavePlan, data: Sequence[Any]) -> None:
        super().__init__()
        self._data = {item.index: value for item, value in zip(plan.items, data, strict=True)}

    @override
    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._data[write_item.index]


@dataclass
class _Writer:
    """Carries out orders; knows the plans that come again."""

    _plans: dict[int, Plan] = field(default_factory=dict)
    _begun: NewFolder | None = None

    def carry_out(self, received: Received) -> Answer | None:
        """Do what was ordered."""
        order = received.order
        if isinstance(order, Begun):
            self._begun = NewFolder(order.path, order.number)
            return None
        self._begun = None
        if order.plan is not None:
            self._plans[order.plan_number] = order.plan
        self._plans = {number: plan for number, plan in self._plans.items() if number in order.kept_plans}
        return self._write(order, received.data)

    def drop_begun(self) -> None:
        """Remove the folder of a save of which no more was heard."""
        if self._begun is not None:
            self._begun.drop()

    def _write(self, part: Part, data: Sequence[Any]) -> Answer:
        plan, folder = self._plans[part.plan_number], NewFolder(part.path, part.number)
        writer = FolderWriter(folder.unfinished, part.known_as)
        own = _written(writer, part, plan.own, data)
        if part.ending is None:
            return Answer(_left(own, folder.unfinished, part.rank), complete=False)
        try:
            records = [own, *_records_of_others(folder, part, part.ending.timeout_s)]
            places = [one.places for one in records if one.places is not None]
            if len(places) == part.num_ranks and plan.merged is not None:
                finish_folder(folder, writer, plan.merged, places, part.ending.metadata, part.ending.manifest)
                return Answer(None, complete=True)
            problem = own.problem
        except Exception as error:  # noqa: BLE001 (reported to the ranks that are left)
            problem = own.problem or f"{type(error).__name__}: {error}"
        folder.drop()
        return Answer(problem, complete=False)


def _written(writer: FolderWriter, part: Part, plan: SavePlan, data: Sequence[Any]) -> Record:
    """Write a rank's part; return where everything is, or the error."""
    try:
        writer.set_up_storage_writer(part.rank == 0, rank=part.rank, use_collectives=True)
        results = writer.write_data(plan, _Planned(plan, data)).wait()
        return Record(WriteLocations.of(plan, results))
    except Exception as error:  # noqa: BLE001 (reported to the ranks that are left)
        _remove_part(Path(writer.path), part.rank)
        return Record(None, f"{type(error).__name__}: {error}")


def _left(own: Record, folder: Path, rank: int) -> str | None:
    """Leave the record for rank 0's process, and return the problem, if there is one."""
    try:
        own.leave(folder, rank)
    except OSError as error:  # a full disk: without this part there is room to say so
        own = Record(None, own.problem or f"{type(error).__name__}: {error}")
        _remove_part(folder, rank)
        with suppress(OSError):  # the folder is gone: so is the save
            own.leave(folder, rank)
    return own.problem


def _remove_part(folder: Path, rank: int) -> None:
    for path in folder.glob(f"__{rank}_*.distcp"):
        with suppress(OSError):
            path.unlink()


def _records_of_others(folder: NewFolder, part: Part, timeout_s: float) -> list[Record]:
    """Wait until all others have written.

    Raises:
        TimeoutError: If one does not say so in time.
    """
    found: dict[int, Record] = {}

    def all_are_there() -> bool | None:
        for rank in Record.ranks_in(folder.unfinished):
            found[rank] = Record.take(folder.unfinished, rank)
        return len(found) == part.num_ranks - 1 or None

    if poll(all_are_there, timeout_s, _SLOWEST_S) is None:
        absent = [rank for rank in range(1, part.num_ranks) if rank not in found]
        raise TimeoutError(f"the processes that write for ranks {absent} did not finish in {timeout_s:g} s.")
    return [found[rank] for rank in sorted(found)]
