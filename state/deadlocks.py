"""Ends a run whose ranks wait for each other: each in a collective, or on the store, that another one does not join.

A daemon thread of each rank looks twice a second at the thread that trains. While that thread moves, nothing else
happens: a step pays nothing. Once it has been in one place for two seconds, the flight recorder names the gloo
collectives that it has issued and that have not completed; a wait on the store shows in the stack. The rank then
reports on the store what it waits for, and withdraws the report as soon as it moves.

[Note: who can move] Ranks are deadlocked if all of them have reported and none can move. A rank in a collective can
move if every member of its group has issued the same one: its data is on the way. A wait on the store ends only by what
another rank does. While one rank computes, reads data or waits for a device there is no deadlock, however long it
takes.

[Note: ending it] No call of torch (2.13) interrupts a gloo collective: neither ``abort`` nor ``destroy_process_group``.
It fails when its connection does, as after the loss of a process. So each rank shuts its connections with the other
ranks down. Waits on the store look for the verdict themselves.

[Note: a rank that fails] A rank whose run ends with an exception writes it to the store, next to the addresses of its
connections. It shuts nothing down: ranks that fail alike may go on in the same group. A rank that is still in that run,
and has waited for two seconds, ends its own wait with that text, so that nobody waits for the group's timeout.
"""

from __future__ import annotations

import contextlib
import gc
import json
import linecache
import logging
import math
import os
import socket
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .process_group import group_store, live_group
from .store import DeadlockError, ProcessFailedError, default_store, interrupt_waits, poll

if TYPE_CHECKING:
    from types import CodeType, FrameType

    import torch.distributed as dist


_log = logging.getLogger(__name__)

_LOOKS_EVERY_S = 0.5
_LOOKS_LATER_EVERY_S = 2.0
"""While the thread stays in one place: to read the flight recorder takes some 0.1 s of a core."""
_STILL_LOOKS = 4
"""In how many looks the thread has not moved when its rank reports."""
_SAME_INPUTS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "barrier")
"""Collectives that need inputs of one size on all ranks, by what their names contain."""
_OWN = [Path(__file__).parents[1] / name for name in ("state", "checkpoint", "strategies", "callbacks")]
_LIBRARIES = ("site-packages", "dist-packages", Path(os.__file__).parent.name)


_Collective: TypeAlias = tuple[str, int, str, int, tuple[int, ...]]
"""Group, number in it, name, elements of the input, ranks of the group."""


@dataclass(frozen=True)
class Report:
    """The wait of one rank."""

    place: str
    """For people."""
    pending: tuple[_Collective, ...]
    """Collectives that have not completed; empty while the rank waits on the store."""
    issued: dict[str, int]
    """The number of the last collective of each group, as far as it is known."""

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps([self.place, self.pending, self.issued])

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return what `to_json` wrote."""
        place, pending, issued = json.loads(text)
        return cls(place, tuple((*one[:4], tuple(one[4])) for one in pending), issued)


def deadlocked(reports: dict[int, Report]) -> bool:
    """Return whether none of the ranks can move, given the reports of all: see [Note: who can move]."""
    return not any(_can_complete(one, reports) for report in reports.values() for one in report.pending)


def _can_complete(one: _Collective, reports: dict[int, Report]) -> bool:
    group, number, name, num_elements, ranks = one
    for rank in ranks:
        report = reports[rank]
        if report.issued.get(group, 0) < number:
            return False
        for other in report.pending:
            if other[:2] != (group, number):
                continue
            if other[2] != name or (other[3] != num_elements and any(each in name for each in _SAME_INPUTS)):
                return False
    return True


class DeadlockWatch:
    """The thread of one rank, for the default process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._rank, self._num_ranks = group.rank(), group.size()
        self._store: dist.Store = own_connection(group_store("accelight/deadlocks"))
        self.thread_id = threading.get_ident()
        """The thread that is watched."""
        self._wake, self._is_closed = threading.Event(), False
        self._before: tuple[int, int] | None = None
        self._num_still, self._pause_s = 0, _LOOKS_EVERY_S
        self._reported: str | None = None
        self._seen: dict[int, str] | None = None
        self._beat = 0
        self._looked = threading.Event()
        self.runs: set[str] = set()
        """The thread's sections, by names that all ranks have: a failure of another rank in one ends a wait."""
        self.verdict: str | None = None
        """Why the waits have ended."""
        self._thread = threading.Thread(target=self._run, name="accelight-deadlocks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, before the interpreter does and before anyone removes the file of a `FileStore`.

        Whoever frees a `FileStore` last opens its file once more, and waits for it with the GIL held.
        """
        self._is_closed = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # the store is gone, and its process
            while self.verdict is None:
                self._wake.wait(self._pause_s)
                self._wake.clear()
                if self._is_closed or not self._is_present():
                    break
                self._look()
                self._looked.set()
        self._looked.set()

    def _is_present(self) -> bool:
        """Return whether the group is still the default one: DeepSpeed's engines keep some that were destroyed."""
        group = self._group()
        return group is not None and group is live_group()

    def _look(self) -> None:
        stack = stack_of(self.thread_id)
        if not stack:
            return
        waits = _wait_in(stack)
        now = (id(waits), 0) if waits is not None else (id(stack[0]), stack[0].f_lasti)
        if now != self._before:
            self._before, self._num_still, self._pause_s = now, 0, _LOOKS_EVERY_S
            self._withdraw()
            return
        self._num_still += 1
        if self._num_still >= _STILL_LOOKS:
            self._report(stack)
        if self._num_still >= 3 * _STILL_LOOKS:
            self._pause_s = _LOOKS_LATER_EVERY_S

    def _withdraw(self) -> None:
        if self._reported is not None:
            self._reported, self._seen = None, None
            self._store.add("num_waiting", -1)
            self._hear("verdict")  # the other end of a connection may have been shut down before this rank had heard

    def _report(self, stack: list[FrameType]) -> None:
        pending, issued = _collectives(f"{self.thread_id}")
        waits = waits_on_store(stack)
        if not waits and not pending:
            self._withdraw()
            return
        what = "on the store" if waits else f"in {' and '.join(dict.fromkeys(one[2] for one in pending))}"
        text = Report(f"waits {what} {describe_place(stack)}", () if waits else pending, issued).to_json()
        if text != self._reported:
            is_new, self._reported = self._reported is None, text
            self._store.set(f"report/{self._rank}", json.dumps([0, text]))
            if is_new:
                self.publish_connections()
                self._store.add("num_waiting", 1)
            self._beat = 0
            return
        self._beat += 1
        self._store.set(f"report/{self._rank}", json.dumps([self._beat, text]))
        if self._rank == 0 and self._store.add("num_waiting", 0) == self._num_ranks:
            self._judge()
        self._hear(*(f"failed/{run}" for run in tuple(self.runs)), "verdict")

    def publish_connections(self) -> None:
        """Publish which connections lead to this rank."""
        self._store.set(f"sockets/{self._rank}", json.dumps(_connections()))

    def publish_failure(self, run: str, text: str) -> None:
        """Inform the ranks that are still in ``run`` that this one has left it: see [Note: a rank that fails].

        Args:
            run: The same on all ranks.
            text: Says what has failed; empty for what another rank's failure has caused.
        """
        self.publish_connections()
        if text:
            self._store.compare_set(f"failed/{run}", "", text)  # the first one is the cause

    def _hear(self, *keys: str) -> None:
        for key in keys:
            if self._store.check([key]):
                self._finish(self._store.get(key).decode(), DeadlockError if key == "verdict" else ProcessFailedError)
                return

    def final_verdict(self) -> str | None:
        """Return the verdict, once the thread has looked again."""
        self._looked.clear()
        self._wake.set()
        if self._thread.is_alive():
            self._looked.wait(_STILL_LOOKS * _LOOKS_EVERY_S)
        return self.verdict

    def _judge(self) -> None:
        """Pass a verdict if every rank has said the same in two looks, and has looked itself in between."""
        said = {rank: json.loads(self._store.get(f"report/{rank}")) for rank in range(self._num_ranks)}
        before, self._seen = self._seen, {rank: json.dumps(each) for rank, each in said.items()}
        if before is None:
            return
        for rank, (beat, text) in said.items():
            old_beat, old_text = json.loads(before[rank])
            if text != old_text or beat < old_beat:
                return
            if beat == old_beat:  # this rank has not looked meanwhile: compare with the older one next time
                self._seen = before
                return
        reports = {rank: Report.from_json(text) for rank, (_, text) in said.items()}
        if deadlocked(reports):
            places = "; ".join(f"process {rank} {one.place}" for rank, one in reports.items())
            self._store.set(
                "verdict",
                f"The processes wait for each other and none can continue: {places}. Each of these calls needs all "
                "processes: call it on every process, at the same point.",
            )

    def _finish(self, verdict: str, kind: type[DeadlockError]) -> None:
        self.verdict = verdict
        _log.error("%s", verdict)
        if (group := self._group()) is not None:
            interrupt_waits(group, kind(verdict))
        self.shut_down()

    def shut_down(self) -> None:
        """Shut the connections with those ranks down that wait or have left a run: see [Note: ending it]."""
        others = {
            tuple(map(tuple, reversed(one)))
            for rank in range(self._num_ranks)
            if rank != self._rank and self._store.check([f"sockets/{rank}"])  # one that computes will wait later
            for one in json.loads(self._store.get(f"sockets/{rank}"))
        }
        _shut_down(others)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, DeadlockWatch] = weakref.WeakKeyDictionary()


def watch_for_deadlocks(group: dist.ProcessGroup) -> DeadlockWatch | None:
    """Watch the calling thread, for a default process group of several ranks; each call moves the watch."""
    import torch.distributed as dist

    if group.size() == 1 or dist.get_backend(group) == "fake":
        return None
    if group not in _watches:
        watch = _watches[group] = DeadlockWatch(group)
        weakref.finalize(group, watch.close)  # at the latest at the exit
    _watches[group].thread_id = threading.get_ident()
    return _watches[group]


def watch_of_live_group() -> DeadlockWatch | None:
    """Return this process's watch for the present default group, if there is one."""
    group = live_group()
    return None if group is None else _watches.get(group)


def found_deadlock() -> str | None:
    """Return why the waits of the present group's ranks were ended, if they were; call it after an error."""
    watch = watch_of_live_group()
    return None if watch is None else watch.final_verdict()


def own_connection(store: dist.Store) -> dist.Store:
    """Return the store through a connection that no wait of another thread occupies, where torch can make one."""
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


# ------------------------------------------------------------------ what the watched thread does
def stack_of(thread_id: int) -> list[FrameType]:
    """Return the frames of another thread, innermost first; none if it has ended.

    Python 3.11 makes these objects when they are asked for. If that begins a garbage collection, the other thread may
    go on and leave the frame that an object is being made for, which is a segmentation fault some time later: garbage
    waits meanwhile, and so do other threads that look.
    """
    with _one_looks:
        collects = gc.isenabled()
        gc.disable()
        try:
            stack, frame = [], sys._current_frames().get(thread_id)
            while frame is not None:
                stack.append(frame)
                frame = frame.f_back
            return stack
        finally:
            if collects:
                gc.enable()


_one_looks = threading.Lock()
"""Else the first of two threads, Watchdog's and this one's, would switch collections on while the other looks."""
if hasattr(os, "register_at_fork"):  # else a process forked meanwhile would never collect
    _end = _one_looks.release
    os.register_at_fork(before=_one_looks.acquire, after_in_parent=_end, after_in_child=_end)


def waits_for_ranks(thread_id: int, stack: list[FrameType]) -> str | None:
    """Return the wait of a blocked thread: for the store, or collectives with their numbers in their groups.

    None if it waits for no other rank. Takes 0.1 s of a core where torch's flight recorder is full.

    Args:
        thread_id: Of the thread.
        stack: Its frames, see `stack_of`.
    """
    if waits_on_store(stack):
        return "the store"
    pending, _ = _collectives(f"{thread_id}")
    return " and ".join(f"{one[2]} {one[1]} of group {one[0]}" for one in pending) or None


def _collectives(thread: str) -> tuple[tuple[_Collective, ...], dict[str, int]]:
    """Return the gloo collectives of a thread that have not completed, and the number of each group's last one."""
    from .upstream import flight_record, ranks_of

    pending: list[_Collective] = []
    issued: dict[str, int] = {}
    for entry in flight_record():
        name = entry["profiling_name"]
        if entry["is_p2p"] or not name.startswith("gloo:"):
            continue
        group, number = entry["process_group"][0], int(entry["collective_seq_id"])
        if number < issued.get(group, 0):  # of a new group under the name of one that was destroyed
            pending = [one for one in pending if one[0] != group]
        issued[group] = number
        if not entry["retired"] and entry["thread_id"] == thread:
            num_elements = sum(math.prod(size) for size in entry["input_sizes"])
            pending.append((group, number, name.removeprefix("gloo:"), num_elements, ()))
    return tuple((*one[:4], ranks_of(one[0])) for one in pending), issued


def waits_on_store(stack: list[FrameType]) -> bool:
    """Return whether a thread with these frames waits on the store for another rank."""
    return _wait_in(stack) is not None


def _wait_in(stack: list[FrameType]) -> FrameType | None:
    return next((frame for frame in stack if frame.f_code is poll.__code__), None)


def describe_place(stack: list[FrameType]) -> str:
    """Return the user's line that a thread is in, and the last function outside of torch that it has called."""
    called = ""
    for frame in stack:
        if not _is_of_a_library(frame.f_code.co_filename) or frame is stack[-1]:
            break
        if not called and not _is_of_torch(frame.f_code):
            called = f", in {getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
    file, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, line).strip()
    return f"at {file}:{line} in {frame.f_code.co_name}" + (f" ({source})" if source else "") + called


def _is_of_a_library(file: str) -> bool:
    path = Path(file)
    return (
        file.startswith("<")
        or any(path.is_relative_to(folder) for folder in _OWN)
        or any(name in path.parts for name in _LIBRARIES)
    )


def _is_of_torch(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return code is poll.__code__ or "torch" in path.parts or path.parent == Path(threading.__file__).parent


# ------------------------------------------------------------------ connections of gloo
def _connections() -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Return the two ends of each TCP connection of this process, its own end first."""
    found = []
    for connection in _sockets():
        with connection, contextlib.suppress(OSError):
            found.append(_ends(connection))
    return found


def _ends(connection: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    own, other = connection.getsockname(), connection.getpeername()
    return (str(own[0]), int(own[1])), (str(other[0]), int(other[1]))


def _sockets() -> list[socket.socket]:
    found = []
    folder = Path("/proc/self/fd")
    for name in os.listdir(folder) if folder.exists() else ():
        try:
            if not os.readlink(folder / name).startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
            found.append(one)
        else:
            one.close()
    return found


def _shut_down(others: set[Any]) -> None:
    """Shut the connections down that another rank has the other end of; those of the store stay."""
    ports = {os.environ.get("MASTER_PORT", "")} | {f"{port}" for port in _store_ports()}
    for connection in _sockets():
        with connection, contextlib.suppress(OSError):
            ends = _ends(connection)
            if ends in others and not ports & {f"{port}" for _, port in ends}:
                connection.shutdown(socket.SHUT_RDWR)


def _store_ports() -> list[int]:
    import torch.distributed as dist

    store = default_store()
    return [store.port] if isinstance(store, dist.TCPStore) else []
