"""The store of the default process group: keys by channel, waits with growing pauses, an orderly shutdown.

[Note: store shutdown] A process that waits on the store needs the process that holds it: process 0, unless torchrun's
agent does. Process 0 can finish its last ``main_process_first`` block before the others have entered theirs. If it
ended then, or destroyed the group, the others would fail. So each process counts its uses of a channel, and process 0
waits, when the group goes (destroyed, or at exit), until the others have caught up or have left themselves. A killed
process reports nothing: the group's timeout bounds the wait, and after an error of its own, which is printed only
afterwards, process 0 waits 10 s.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from typing import TYPE_CHECKING, Any, TypeVar

from .process_group import group_store, live_group, timeout_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self


T = TypeVar("T")

_log = logging.getLogger(__name__)

_SLOWEST_POLL_S = 0.25
_QUESTIONS_PER_S = 20_000  # of all processes together, to one store
_PART_BYTES = 4 * 2**20  # torch's TCPStore (2.13) closes a connection that sends more than 8 MiB at once
_NUMBER_BYTES = 4
_AFTER_AN_ERROR_S = 10.0
_SILENT_S = 5.0
_TOGETHER_S = 0.05  # processes usually end at the same time, and those that leave must still find the store
_POLL_S = 0.005

_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[type, str], Any]] = weakref.WeakKeyDictionary()
_interruptions: weakref.WeakKeyDictionary[dist.ProcessGroup, DeadlockError] = weakref.WeakKeyDictionary()
"""By default process group: why no wait of its processes can end."""


class DeadlockError(RuntimeError):
    """Raised by a wait on the store that cannot end, because the processes wait for each other."""


class ProcessFailedError(DeadlockError):
    """Raised by a wait on the store that cannot end, because another process has failed."""


def interrupt_waits(group: dist.ProcessGroup, reason: DeadlockError) -> None:
    """Make every `poll`, also in other threads, raise such an error while ``group`` is the default process group."""
    _interruptions[group] = reason


def poll(ask: Callable[[], T | None], timeout_s: float, slowest_s: float = _SLOWEST_POLL_S) -> T | None:
    """Ask repeatedly, with growing pauses, until there is an answer; None after ``timeout_s``.

    ``Store.wait`` would delay Ctrl-C, lock the store's connection for other threads, and print a warning at each
    timeout.

    Args:
        ask: Returns the answer, or None while there is none.
        timeout_s: Seconds to ask for.
        slowest_s: Longest pause between two questions.

    Raises:
        DeadlockError: If the processes wait for each other, or one has failed.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0001
    while (answer := ask()) is None:
        if _interruptions and (group := live_group()) is not None and group in _interruptions:
            reason = _interruptions[group]
            raise type(reason)(*reason.args)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return None
        time.sleep(min(pause_s, remaining_s))
        pause_s = min(pause_s * 1.5, slowest_s)
    return answer


class Channel:
    """Keys under one name in the store, for what all processes of a group do in the same order.

    Args:
        group: The default process group. The channel lives as long: counters that restarted would find old keys.
        name: Of the channel.
        counted_as: What process 0 names when it stays for the others here; None if it need not stay.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, counted_as: str | None = None) -> None:
        self._store = group_store(f"accelight/{name}")
        self._rank, self._num_ranks = group.rank(), group.size()
        self._group = weakref.ref(group)
        self._pause_s = max(0.01, self._num_ranks / _QUESTIONS_PER_S)
        self._is_counted = counted_as is not None and group in _shutdowns
        self.num_uses = 0
        """The number of this process's uses of the channel."""
        if counted_as is not None:
            count_uses(group, counted_as, lambda: self.num_uses, self.num_missing)

    @classmethod
    def of(cls, group: dist.ProcessGroup, name: str) -> Self:
        """Return the channel of this kind and name, the same at each call."""
        channels = _channels.setdefault(group, {})
        if (cls, name) not in channels:
            channels[cls, name] = cls(group, name)
        return channels[cls, name]

    def timeout_s(self) -> float:
        """Return the group's timeout; 0 once the group is gone."""
        group = self._group()
        return 0.0 if group is None else timeout_of(group).total_seconds()

    def wait_for(self, key: str, timeout_s: float, *, promptly: bool = True) -> bool:
        """Wait until the key is there, and return whether it is; ``promptly`` with short pauses between questions."""
        pause_s = self._pause_s if promptly else _SLOWEST_POLL_S
        return poll(lambda: self._store.check([key]) or None, timeout_s, pause_s) is not None

    def put(self, key: str, content: bytes) -> list[str]:
        """Write ``content`` in parts, and return their keys; the first is ``key``, and is written last."""
        parts = [content[at : at + _PART_BYTES] for at in range(0, len(content), _PART_BYTES)]
        keys = [key, *(f"{key}/part{number}" for number in range(1, len(parts)))]
        for name, part in zip(keys[1:], parts[1:], strict=True):
            self._store.set(name, part)  # type: ignore[arg-type] # bytes are fine
        self._store.set(key, len(parts).to_bytes(_NUMBER_BYTES, "little") + parts[0])  # type: ignore[arg-type]
        return keys

    def take(self, key: str) -> tuple[bytes, list[str]]:
        """Return the content that `put` wrote under ``key``, and the keys."""
        first = bytes(self._store.get(key))
        number = int.from_bytes(first[:_NUMBER_BYTES], "little")
        others = [f"{key}/part{one}" for one in range(1, number)]
        return b"".join([first[_NUMBER_BYTES:], *(bytes(self._store.get(one)) for one in others)]), [key, *others]

    def delete(self, keys: Iterable[str]) -> None:
        """Remove keys that every process has read."""
        for key in keys:
            self._store.delete_key(key)

    def finish_use(self) -> None:
        """Inform process 0 that this process no longer needs it for one use."""
        if self._is_counted and self._rank != 0:
            with suppress(RuntimeError):  # the holder of the store was killed
                self._store.add("finished", 1)

    def num_missing(self) -> int:
        """Return how many uses the other processes have yet to finish, to have finished as many as this one."""
        return self.num_uses * (self._num_ranks - 1) - self._store.add("finished", 0) if self._is_counted else 0


# ------------------------------------------------------------------------------------------------
# The shutdown: see [Note: store shutdown].


@dataclass
class _Shutdown:
    store: dist.Store
    address: tuple[str, int]
    rank: int
    num_ranks: int
    timeout_s: float
    uses: dict[str, tuple[Callable[[], int], Callable[[], int]]] = field(default_factory=dict)
    """By name: how often this process has used the store, and how many uses the others have yet to finish."""

    def leave(self) -> None:
        """Report that this process leaves; on process 0, wait for the others that still need the store."""
        with suppress(RuntimeError):  # the store is gone, and no process is left to notify
            if self.rank == 0:
                self._wait()
            elif _listens(self.address):
                counts = {name: num_uses() for name, (num_uses, _) in self.uses.items()}
                self.store.set(f"left/{self.rank}", json.dumps(counts))

    def _wait(self) -> None:
        started = time.monotonic()
        limit_s = self.timeout_s if getattr(sys, "last_value", None) is None else _AFTER_AN_ERROR_S
        has_logged = False
        while (missing := self._missing()) and time.monotonic() - started < limit_s:
            if not has_logged and time.monotonic() - started > _SILENT_S:
                _log.warning(
                    "Process 0 waits for the others, which have not reached %s yet; at most %g s more. (Ctrl-C ends "
                    "the wait.)",
                    " and ".join(missing),
                    limit_s - _SILENT_S,
                )
                has_logged = True
            time.sleep(_POLL_S if time.monotonic() - started < 1 else 0.1)
        started = time.monotonic()
        while len(self._left()) < self.num_ranks - 1 and time.monotonic() - started < _TOGETHER_S:
            time.sleep(_POLL_S)

    def _missing(self) -> list[str]:
        """Return the names of the uses that others have yet to finish."""
        missing = {name: num_missing() for name, (num_uses, num_missing) in self.uses.items() if num_uses()}
        if not any(missing.values()):
            return []
        left = self._left()
        return [
            name
            for name, number in missing.items()
            if number > sum(max(0, self.uses[name][0]() - counts.get(name, 0)) for counts in left)
        ]

    def _left(self) -> list[dict[str, int]]:
        """Return the counts of the processes that have left."""
        keys = [f"left/{index}" for index in range(1, self.num_ranks)]
        return [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]


_shutdowns: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shutdown] = weakref.WeakKeyDictionary()


def leave_in_order(group: dist.ProcessGroup) -> None:
    """Arrange this process's part in the shutdown of ``group``. Does not communicate now."""
    if group in _shutdowns or group.size() == 1 or (store := _listening_store()) is None:
        return
    timeout_s, address = timeout_of(group).total_seconds(), (store.host, store.port)
    shutdown = _shutdowns[group] = _Shutdown(
        group_store("accelight/shutdown"), address, group.rank(), group.size(), timeout_s
    )
    leave = weakref.finalize(group, shutdown.leave)  # also at the program's end
    util.Finalize(None, leave, exitpriority=0)  # processes that multiprocessing starts do not run atexit


def count_uses(
    group: dist.ProcessGroup, name: str, num_uses: Callable[[], int], num_missing: Callable[[], int]
) -> None:
    """Make process 0 wait for these uses at the shutdown: see `_Shutdown.uses`."""
    if (shutdown := _shutdowns.get(group)) is not None:
        shutdown.uses[name] = num_uses, num_missing


def leave_now(group: dist.ProcessGroup) -> None:
    """Keep processes from waiting for each other when ``group`` ends: another group uses its store."""
    if (shutdown := _shutdowns.get(group)) is not None:
        shutdown.uses.clear()


def _listening_store() -> dist.TCPStore | None:
    """Return the default group's TCP store; None for other stores and where torchrun's agent holds it."""
    import torch.distributed as dist

    store = default_store()
    if not isinstance(store, dist.TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return store


def default_store() -> dist.Store:
    """Return the default group's store, without the prefixes that torch wraps it in."""
    import torch.distributed as dist

    from .upstream import _get_default_store

    store = _get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _listens(address: tuple[str, int]) -> bool:
    """Return whether a process listens there. Asking a store that is gone would print a long warning."""
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True
