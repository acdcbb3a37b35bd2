"""Sharded saves that other processes complete: when `hand_over` returns, all ranks may be killed.

[Note: whole or not at all] Each rank plans and sends the plan to its saving process, and then to rank 0. When all have
done so, rank 0 sends its own process how to complete the checkpoint, and then reports to the other ranks. Whoever is
killed before, no process knows how to complete it, and that of rank 0 removes the folder; whoever is killed afterwards,
they complete it.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from typing_extensions import Self, override

from ....checkpoint.manifest import Manifest
from ....checkpoint.storage import is_remote
from ....state.process_group import timeout_of
from ....state.rendezvous import format_errors_by_rank
from ....state.store import poll
from ...common.checkpoint_files import NewFolder
from ...saving.staging import SharedMemory, SharedStager, unnamed_file
from .planner import CachedPlan, LocalSavePlanner, MergedPlan, PlanMessage, SavePlanCache, WriteLocations
from .writer import FolderWriter, finish_checkpoint

if TYPE_CHECKING:  # it imports Lightning, which the process does without
    from ...saving.async_save import AsyncSaver


@dataclass
class _Begun:
    """Rank 0's answer when all ranks begin a save."""

    problems: list[str]
    number: str = ""
    """Of the folder."""
    made: str = ""
    """A file that all ranks must see there: see `NewFolder.check_shared`."""


@dataclass
class HandedSave:
    """One checkpoint, on its way from the ranks to the processes that write it."""

    path: Path
    state: dict[str, Any]
    metadata: bytes
    """The file for everything else, on rank 0."""
    manifest: Manifest
    plans: SavePlanCache
    stager: SharedStager
    process: SavingProcess
    _merged: MergedPlan | None = None
    """On rank 0, what all ranks write."""

    def hand_over(self, group: dist.ProcessGroup) -> Callable[[dist.ProcessGroup | None], None]:
        """Hand the checkpoint to other processes, which write it; every rank must call it.

        Args:
            group: Through which the ranks notice who ends.

        Returns:
            What waits until it is written, on every rank, with a group to notice who ends.

        Raises:
            RuntimeError: On every rank, if any rank failed; it names the rank.
        """
        messages, what = self.plans.messages, f"saving {self.path}"
        planner, kept, error = LocalSavePlanner(), None, None
        try:
            planner.set_up_planner(self.stager.copy(self.state), is_coordinator=dist.get_rank() == 0)
            kept = self.plans.of(planner)
            proposal: str | PlanMessage = self.plans.message(kept)
        except Exception as caught:  # noqa: BLE001 (raised on all ranks when rank 0 has sent it)
            proposal, error = f"{type(caught).__name__}: {caught}", caught
        begun = messages.gather_then_broadcast(proposal, self._begin, what, group)
        if begun.problems or kept is None:
            raise RuntimeError("\n".join([f"{what} failed.", *begun.problems])) from error
        folder = NewFolder(self.path, begun.number)
        try:
            problem = None if dist.get_rank() == 0 else self._submit(planner, begun, kept, None)
            ending = Ending(self.metadata, self.manifest, timeout_of(group).total_seconds())
            commit = partial(self._commit, partial(self._submit, planner, begun, kept, ending))
            if problems := messages.gather_then_broadcast(problem, commit, what, group):
                raise RuntimeError("\n".join([f"{what} failed.", *problems]))
            self.plans.keep(kept)
        except BaseException:
            self.process.close()
            if dist.get_rank() == 0:
                folder.drop()
            raise
        return partial(self._wait, folder)

    @property
    def _absolute(self) -> Path:
        return self.path.absolute()  # the other process is where this one was when it was started

    def _begin(self, proposals: list[str | PlanMessage]) -> _Begun:
        """Make the folder and merge the ranks' plans; on rank 0, when all ranks have begun to save."""
        if problems := _errors_by_rank([proposal if isinstance(proposal, str) else None for proposal in proposals]):
            return _Begun(problems)
        self._merged = self.plans.merge([proposal for proposal in proposals if isinstance(proposal, PlanMessage)])
        number = secrets.token_hex(8)
        self.process.submit(Begun(self._absolute, number))
        return _Begun([], number, NewFolder(self.path, number).begin())

    @staticmethod
    def _commit(submit: Callable[[], str | None], problems: list[str | None]) -> list[str]:
        """Commit the save; on rank 0, when the other processes know their parts: see [Note: whole or not at all]."""
        if not any(problems):
            problems[0] = submit()
        return _errors_by_rank(problems)

    def _submit(self, planner: LocalSavePlanner, begun: _Begun, kept: CachedPlan, ending: Ending | None) -> str | None:
        """Send this rank's process its part; return what went wrong."""
        folder = NewFolder(self.path, begun.number)
        try:
            folder.check_shared(begun.made)
            if ending is not None:  # all others have seen it
                (folder.unfinished / begun.made).unlink()
            data = [planner.resolve_data(item) for item in planner.finish_plan(kept.plan).items]
            merged, plan = self._merged, None
            number = kept.number if merged is None else merged.number
            if number not in self.process.known_plans:
                plan = Plan(kept.plan, merged)
            part = Part(
                path=self._absolute,
                known_as=NewFolder(self.path).unfinished,
                number=begun.number,
                rank=dist.get_rank(),
                num_ranks=dist.get_world_size(),
                plan_number=number,
                plan=plan,
                kept_plans=self.plans.message(kept).kept if merged is None else self.plans.merged_numbers,
                ending=ending,
            )
            self.process.submit(part, data, self.stager.memory)
        except Exception as error:  # noqa: BLE001 (raised on all ranks when rank 0 has sent it)
            return f"{type(error).__name__}: {error}"
        return None

    def _wait(self, folder: NewFolder, group: dist.ProcessGroup | None) -> None:
        """Wait until the checkpoint has its name.

        Raises:
            RuntimeError: On every rank, if it has not got it.
        """
        what, problem, complete = f"saving {self.path}", None, False
        try:
            answer = self.process.answer()
            problem, complete = answer.problem, answer.complete
        except SavingProcessEnded as ended:
            problem = str(ended)
            if dist.get_rank() != 0:
                _record_problem(folder, problem)

        def outcome(problems: list[str | None]) -> list[str]:
            if complete:
                return []
            folder.drop()
            return _errors_by_rank(problems) or [f"{folder.unfinished} was not completed."]

        problems = self.plans.messages.gather_then_broadcast(problem, outcome, f"finishing {self.path}", group)
        if problems:
            self.process.close()
            raise RuntimeError("\n".join([f"{what} failed.", *problems]))


def _errors_by_rank(problems: Sequence[str | None]) -> list[str]:
    return format_errors_by_rank([[] if problem is None else [problem] for problem in problems])


def _record_problem(folder: NewFolder, problem: str) -> None:
    """Report to rank 0's process in place of one that is gone."""
    try:
        Record(None, problem).leave(folder.unfinished, dist.get_rank())
    except OSError:  # the folder is gone: so is the save
        return


# ------------------------------------------------------------------------------------------------
# Messages from a rank to its saving process, complete enough for that process to finish alone.
#
# An order is a file without a name, whole before its descriptor is sent: it arrives whole or not at all. Tensors stand
# in it as places in shared memory, whose descriptor is sent with it.
#
# [Note: records] The processes that write a checkpoint may be on several machines, and whoever started them may be
# dead. What all of them reach for certain is the checkpoint's folder: when one has written its part, it leaves a record
# there of what lies where, or of its error. The one of rank 0 reads them, removes them, and completes the folder.


_NUM_DESCRIPTORS = 2


@dataclass(frozen=True)
class Begun:
    """Rank 0 is about to make the folder: without a further word it is to be removed."""

    path: Path
    number: str


@dataclass(frozen=True)
class Plan:
    """The part of an order that is the same for all saves by one plan."""

    own: SavePlan
    merged: MergedPlan | None
    """On rank 0, what all ranks write."""


@dataclass(frozen=True)
class Ending:
    """Rank 0's additions to the folder."""

    metadata: bytes
    """The file for everything else."""
    manifest: Manifest
    timeout_s: float
    """The time to wait for each other rank's part."""


@dataclass(frozen=True)
class Part:
    """A rank's part of one checkpoint."""

    path: Path
    known_as: Path
    """The place of the checkpoint, for ``.metadata``: as a rank itself would give it."""
    number: str
    """Of the folder, see `NewFolder`."""
    rank: int
    num_ranks: int
    plan_number: int
    plan: Plan | None
    """None if it was sent with an earlier part."""
    kept_plans: Sequence[int]
    """Numbers of the plans that may come again."""
    ending: Ending | None
    """On rank 0."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a part, one line of JSON."""

    problem: str | None
    """The error of this rank's process."""
    complete: bool
    """Whether the checkpoint has its name; rank 0 alone knows."""

    def line(self) -> bytes:
        """Return it as it is sent."""
        return json.dumps([self.problem, self.complete]).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Return the object that was sent as this line."""
        return cls(*json.loads(line))


@dataclass(frozen=True)
class Record:
    """A record that a rank's process leaves in the folder: see [Note: records]."""

    places: WriteLocations | None
    problem: str | None = None

    def leave(self, folder: Path, rank: int) -> None:
        """Write it; it has its name when it is whole."""
        places = self.places
        content = {
            "problem": self.problem,
            "files": [] if places is None else places.files,
            "rows": [] if places is None else places.rows,
        }
        path = folder / _record_name(rank)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)

    @staticmethod
    def ranks_in(folder: Path) -> list[int]:
        """Return which ranks have left one.

        Raises:
            FileNotFoundError: If the folder is gone.
        """
        return [int(match[1]) for name in os.listdir(folder) if (match := _RECORD.fullmatch(name))]

    @classmethod
    def take(cls, folder: Path, rank: int) -> Self:
        """Read and remove it."""
        path = folder / _record_name(rank)
        content = json.loads(path.read_text())
        path.unlink()
        if content["problem"] is not None:
            return cls(None, content["problem"])
        return cls(WriteLocations(content["files"], content["rows"]))


_RECORD = re.compile(r"\.written_(\d+)")


def _record_name(rank: int) -> str:
    return f".written_{rank:05d}"


# ---------------------------------------------------------------------- how they are sent
@dataclass
class Received:
    """An order, and what its tensors lie in."""

    order: Begun | Part
    data: list[Any] = field(repr=False)
    """Of a part: tensors and bytes in the order of its plan."""


def send(connection: socket.socket, order: Begun | Part, data: Sequence[Any], memory: SharedMemory | None) -> None:
    """Send an order.

    Args:
        connection: To the process that writes.
        order: What to do.
        data: Of a part: what its plan's items are.
        memory: Where the tensors in ``data`` lie; what does not is sent by value.

    Raises:
        OSError: If there is nobody to receive it.
    """
    content = unnamed_file()
    try:
        with os.fdopen(os.dup(content), "wb") as stream:
            pickle.dump(order, stream)
            _Pickler(stream, memory).dump(list(data))
        descriptors = [content] if memory is None else [content, memory.descriptor]
        socket.send_fds(connection, [b"."], descriptors)
    finally:
        os.close(content)


def receive(connection: socket.socket) -> Received | None:
    """Return the next order; None when no more will come."""
    sign, descriptors, _, _ = socket.recv_fds(connection, 1, _NUM_DESCRIPTORS)
    if not sign:
        return None
    try:
        with os.fdopen(os.dup(descriptors[0]), "rb") as stream:
            stream.seek(0)
            order = pickle.load(stream)
            memory = _mapped(descriptors[1]) if len(descriptors) > 1 else None
            return Received(order, _Unpickler(stream, memory).load())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(descriptor: int) -> mmap.mmap:
    """Return shared memory to read; nobody else sees what is written there."""
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BufferedIOBase, memory: SharedMemory | None) -> None:
        super().__init__(stream)
        self._memory = memory

    @override
    def persistent_id(self, obj: Any) -> Any:
        if self._memory is None or type(obj) not in (Tensor, nn.Parameter):
            return None
        storage = obj.untyped_storage()
        place = self._memory.place_of(storage)
        if place is None:
            return None
        return place, storage.nbytes(), obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedIOBase, memory: mmap.mmap | None) -> None:
        super().__init__(stream)
        self._memory = memory
        self._storages: dict[int, torch.UntypedStorage] = {}

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        place, num_bytes, dtype, offset, shape, strides = pid
        if self._memory is None:
            raise RuntimeError("the state has tensors in shared memory, but no shared memory was received.")
        if place not in self._storages:
            values = torch.frombuffer(self._memory, dtype=torch.uint8, offset=place, count=num_bytes)
            self._storages[place] = values.untyped_storage()
        return torch.empty(0, dtype=dtype).set_(self._storages[place], offset, shape, strides)


# ------------------------------------------------------------------------------------------------
# The saving process of a rank, which completes checkpoints although the rank is killed.
#
# [Note: one for each rank] It belongs to one rank, which has made its connection before starting it: there is no name
# by which others could reach it, nobody to elect, and the ranks of a machine write beside each other, as they do
# themselves. It is started by the first save, has a session of its own (launchers kill process groups), and ends with
# training.


_MAIN = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = {path!r}
from {package}.process_save import main
main({descriptor}, {parent})
"""
"""Whoever ends a job by a signal leaves some time before killing: that is for what is still to be written."""
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # it needs no accelerator, and must not take memory there
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OMP_NUM_THREADS": "1",
}
_LOOK_S = 1.0  # a process that the rank has forked may hold the connection open after the rank's end
_MOST_OUTPUT_BYTES = 2000


class SavingProcessEnded(RuntimeError):  # noqa: N818 (an event that becomes an error's text)
    """It is gone, and has not reported why."""


class SavingProcess:
    """Starts the process when there is something to write, sends it the order, and receives the outcome."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._output: int | None = None
        self._received = b""
        self.known_plans: frozenset[int] = frozenset()
        """Numbers of the plans that it was sent, and keeps."""

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def submit(self, order: Begun | Part, data: Sequence[Any] = (), memory: SharedMemory | None = None) -> None:
        """Send an order; when this returns, it is carried out whatever becomes of this process.

        Args:
            order: What to do.
            data: Of a part, see `send`.
            memory: As there.

        Raises:
            SavingProcessEnded: If the process is gone.
        """
        try:
            if self._connection is None:
                self._connection = self._start()
            send(self._connection, order, data, memory)
        except ConnectionError as error:
            raise SavingProcessEnded(self._end()) from error
        if self._process is not None and self._process.poll() is not None:
            raise SavingProcessEnded(self._end())
        if isinstance(order, Part):
            self.known_plans = (self.known_plans | {order.plan_number}).intersection(order.kept_plans)

    def answer(self) -> Answer:
        """Wait for what became of the part that was sent last.

        Raises:
            SavingProcessEnded: If the process is gone.
        """
        while b"\n" not in self._received:
            if self._process is None or self._connection is None:
                raise SavingProcessEnded("it was not started.")
            if select.select([self._connection], [], [], _LOOK_S)[0]:
                try:
                    received = self._connection.recv(4096)
                except ConnectionError:
                    received = b""
                if not received:
                    raise SavingProcessEnded(self._end())
                self._received += received
            elif self._process.poll() is not None:
                raise SavingProcessEnded(self._end())
        line, _, self._received = self._received.partition(b"\n")
        return Answer.of_line(line)

    def close(self) -> None:
        """End the process; orders that it has not reported as done are lost. The next order starts another one."""
        self._end(kill=True)

    def _start(self) -> socket.socket:
        if not sys.executable:
            raise RuntimeError(
                "async_save='process' starts another Python process, but sys.executable is empty. Use async_save=True."
            )
        ours, theirs = socket.socketpair()
        self._output, self._received = unnamed_file(), b""
        main = _MAIN.format(path=sys.path, package=__package__, descriptor=theirs.fileno(), parent=os.getpid())
        with theirs:
            # Its own files: a launcher waits until nobody has its pipes open any more.
            self._process = subprocess.Popen(
                [sys.executable, "-c", main],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        return ours

    def _end(self, *, kill: bool = False) -> str:
        """Detach the process, and return how it ended."""
        process, connection, output = self._process, self._connection, self._output
        self._process = self._connection = self._output = None
        self.known_plans = frozenset()
        if connection is not None:
            connection.close()
        if process is None:
            return "it was not started."
        if kill:
            process.kill()
        try:
            status = process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:  # it has closed the connection, and continues with something else
            process.kill()
            status = process.wait()
        return f"{_described(status)}{'' if output is None else _last_output(output)}"


def _described(status: int) -> str:
    how = f"status {status}" if status >= 0 else signal.Signals(-status).name
    return f"its writer process ended ({how})."


def _last_output(output: int) -> str:
    with os.fdopen(output, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _MOST_OUTPUT_BYTES))
        words = stream.read().decode(errors="replace").strip()
    return f" Its output ends with:\n{words}" if words else ""


# ------------------------------------------------------------------------------------------------
# The main function of that process. It writes one rank's part, and finishes its orders when that rank is gone. It
# has no model, no Lightning and no accelerator.


_SLOWEST_S = 0.25


def main(descriptor: int, parent: int) -> None:
    """Carry out orders until the rank has no more, or is gone.

    Args:
        descriptor: Of the connection.
        parent: Process id of the rank.
    """
    connection = socket.socket(fileno=descriptor)
    writer = _PartWriter()
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
class _PartWriter:
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
                finish_checkpoint(folder, writer, plan.merged, places, part.ending.metadata, part.ending.manifest)
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
        raise TimeoutError(f"the writer processes of ranks {absent} did not finish in {timeout_s:g} s.")
    return [found[rank] for rank in sorted(found)]


# ------------------------------------------------------------------------------------------------
# Refuses states that the process cannot write, before anything is trained.


def check_kind(saves: AsyncSaver | None, state_dict_type: str) -> None:
    """Check, before anything is trained, that the process can write checkpoints of this kind.

    Raises:
        ValueError: If it cannot.
    """
    if saves is not None and saves.process is not None and state_dict_type != "sharded_state_dict":
        raise ValueError(
            f"async_save='process' writes only sharded checkpoints, but state_dict_type is {state_dict_type!r}. Use "
            "state_dict_type='sharded_state_dict', or async_save=True."
        )


def check_places(saves: AsyncSaver | None, callbacks: Iterable[Any]) -> None:
    """Check, before anything is trained, where callbacks are going to save.

    Args:
        saves: In the background.
        callbacks: That save, such as ``ModelCheckpoint``.

    Raises:
        ValueError: If that is a URL of something else than the file system.
    """
    if saves is None or saves.process is None:
        return
    for callback in callbacks:
        folder = str(getattr(callback, "dirpath", None) or "")
        if is_remote(folder):
            raise ValueError(
                f"async_save='process' requires a file system that all processes share, but {type(callback).__name__} "
                f"saves to {folder}. Use a shared folder, or save in one file (state_dict_type='full_state_dict', "
                "async_save=True)."
            )
