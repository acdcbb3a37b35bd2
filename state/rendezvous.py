"""Meetings of ranks through the store: barriers in the order of the program, and a shutdown that waits for all ranks.

[Note: staying] Whoever waits on the store needs the process that holds it, process 0 as a rule: wherever it listens for
the others itself, without torchrun's agent. Its last ``main_process_first`` block is done before the others have even
come to theirs; if it ended then, or destroyed the group, they would find nobody. So everyone counts its uses; when the
group goes (destroyed, or the program ends) process 0 waits until the others have caught up, or have left themselves and
said so. A process that was killed says nothing: the group's timeout bounds the waiting, and after an error of its own,
which would only be printed late, process 0 gives the others 10 s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import util
from typing import TYPE_CHECKING, Protocol, TypeVar

from .process_group import group_store, live_group, timeout_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from .upstream import Store, TCPStore


_log = logging.getLogger(__name__)

_AFTER_AN_ERROR_S = 10.0
_SILENT_S = 5.0
_TOGETHER_S = 0.05  # all end at the same time, as a rule: leaving, they must not find the store just gone
_POLL_S = 0.005


class Use(Protocol):
    """Something that processes do with the store, equally often."""

    @property
    def num_uses(self) -> int:
        """How often this process has."""
        ...

    def num_missing(self) -> int:
        """Return how many uses of the others are still to come, to be as many as here."""
        ...


@dataclass
class _Stay:
    store: Store
    host: str
    port: int
    process_index: int
    num_processes: int
    timeout_s: float
    uses: dict[str, Use] = field(default_factory=dict)

    def leave(self) -> None:
        """Say so, or, on process 0, let the others leave first where they need it."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and no process is left to notify
            if self.process_index == 0:
                self._wait()
            elif _listens(self.host, self.port):
                self.store.set(f"left/{self.process_index}", json.dumps(self._counts()))

    def _counts(self) -> dict[str, int]:
        return {name: use.num_uses for name, use in self.uses.items()}

    def _wait(self) -> None:
        started = time.monotonic()
        limit_s = self.timeout_s if getattr(sys, "last_value", None) is None else _AFTER_AN_ERROR_S
        has_logged = False
        while (missing := self._missing()) and time.monotonic() - started < limit_s:
            if not has_logged and time.monotonic() - started > _SILENT_S:
                _log.warning(
                    "Process 0 stays for the others, which have not come to %s yet; at most %g s more. (Ctrl-C ends "
                    "it.)",
                    " and ".join(missing),
                    limit_s - _SILENT_S,
                )
                has_logged = True
            time.sleep(_POLL_S if time.monotonic() - started < 1 else 0.1)
        started = time.monotonic()
        while len(self._left()) < self.num_processes - 1 and time.monotonic() - started < _TOGETHER_S:
            time.sleep(_POLL_S)

    def _missing(self) -> list[str]:
        """Return the names of the uses that others are still to come to."""
        missing = {name: use.num_missing() for name, use in self.uses.items() if use.num_uses}
        if not any(missing.values()):
            return []
        left = self._left()
        return [
            name
            for name, count in missing.items()
            if count > sum(max(0, self.uses[name].num_uses - counts.get(name, 0)) for counts in left)
        ]

    def _left(self) -> list[dict[str, int]]:
        """Return what those had counted that have left."""
        keys = [f"left/{index}" for index in range(1, self.num_processes)]
        return [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]


_stays: weakref.WeakKeyDictionary[dist.ProcessGroup, _Stay] = weakref.WeakKeyDictionary()


def watch(group: dist.ProcessGroup) -> None:
    """See to it that this process leaves ``group`` as it should: see [Note: staying]. Communicates nothing now."""
    import torch.distributed as dist

    if group in _stays or dist.get_world_size(group) == 1:
        return
    listening = _listening_store()
    if listening is None:
        return
    stay = _Stay(
        group_store("accelight/stay"),
        listening.host,
        listening.port,
        dist.get_rank(group),
        dist.get_world_size(group),
        timeout_of(group).total_seconds(),
    )
    _stays[group] = stay
    leave = weakref.finalize(group, stay.leave)  # also at the program's end
    util.Finalize(None, leave, exitpriority=0)  # in a process that multiprocessing started, which knows no atexit


def count(group: dist.ProcessGroup, name: str, use: Use) -> None:
    """Let ``use`` be among what process 0 stays for."""
    stay = _stays.get(group)
    if stay is not None:
        stay.uses[name] = use


def is_needed(group: dist.ProcessGroup) -> bool:
    """Return whether process 0 may have to stay: it listens for the others itself."""
    return group in _stays


def _listening_store() -> TCPStore | None:
    """Return the default group's TCP store; None for others, and where torchrun's agent holds it and outlives us."""
    from .upstream import PrefixStore, TCPStore, _get_default_store

    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return store


def _listens(host: str, port: int) -> bool:
    """Return whether somebody does. To ask the store would print a long warning where it is gone."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------
# One process first, the others after it: waiting on the store, so that no collective's timeout runs meanwhile.
#
# [Note: keys] A block's key in the store is its path of counters: the third block is ``3``, the first one nested in it
# ``3.1``. All processes pass the same blocks, so they agree on the path without a word; and a block left by an
# exception before its inner ones leaves the counters of the blocks after it equal on all processes. The counters belong
# to the process group, as the store does, and not to the states: resetting a state must not make old keys look new.


T = TypeVar("T")

_interruptions: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""By default process group: why no wait of its processes can end."""

_DONE = "done"
_LONGEST_WAIT = timedelta(days=7)
_SLOWEST_POLL_S = 0.25
_QUESTIONS_PER_S = 20_000  # of all processes together, to one store


class DeadlockError(RuntimeError):
    """Raised by a wait on the store that cannot end, because the processes wait for each other."""


def interrupt_waits(group: dist.ProcessGroup, reason: str) -> None:
    """Let every `poll`, also in other threads, raise `DeadlockError` while ``group`` is the default process group."""
    _interruptions[group] = reason


@dataclass
class _Counters:
    """Where this process is among the blocks of one group: finished or running blocks per open level."""

    num_others: int
    """Processes beside this one."""
    progress: Store | None
    """Where the others write down what they have left behind them; None where nobody stays for them."""
    is_holder: bool
    """Whether this process may have to stay: see [Note: staying]."""
    levels: list[int] = field(default_factory=lambda: [0])
    num_waited_for: int = 0
    """Open blocks that other processes wait for this one to leave."""

    def enter(self) -> str:
        self.levels[-1] += 1
        path = ".".join(map(str, self.levels))
        self.levels.append(0)
        return path

    def leave(self) -> None:
        self.levels.pop()
        if len(self.levels) == 1 and self.progress is not None and not self.is_holder:
            with suppress(RuntimeError):  # its holder was killed: what this process does in its block is done
                self.progress.add("blocks", 1)

    @property
    def num_uses(self) -> int:
        """Blocks so far, without those inside others."""
        return self.levels[0]

    def num_missing(self) -> int:
        """Return how many blocks the others have yet to leave."""
        if self.progress is None:
            return 0
        return self.num_others * self.levels[0] - self.progress.add("blocks", 0)


_counters: weakref.WeakKeyDictionary[dist.ProcessGroup, _Counters] = weakref.WeakKeyDictionary()


@contextmanager
def one_first(
    group: dist.ProcessGroup,
    *,
    first: bool,
    scope: str,
    num_waiting: int,
    process_index: int,
    timeout: timedelta | float | None,
) -> Iterator[None]:
    """Run the block on one process of ``scope`` first, then on the ``num_waiting`` others.

    Raises:
        RuntimeError: On the others, if the first one's block raised or its process is gone.
        TimeoutError: On the others, if the first one's block took longer than ``timeout``.
    """
    limit = (
        _LONGEST_WAIT if timeout is None else timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    )
    if limit <= timedelta(0):
        raise ValueError(f"timeout must be positive, got {timeout!r}. Leave it out to wait as long as it takes.")
    counters = _counters_of(group)
    path = counters.enter()
    store = group_store(f"accelight/first/{scope}/{path}")
    try:
        if not first:
            _wait(store, limit, num_waiting, scope, path)
            yield
            return
        outcome = _DONE
        counters.num_waited_for += bool(num_waiting)
        try:
            yield
        except BaseException as error:
            outcome = f"process {process_index} raised {type(error).__name__} in the block it runs first: {error}"
            raise
        finally:
            counters.num_waited_for -= bool(num_waiting)
            if num_waiting:
                store.set("outcome", outcome)
    finally:
        counters.leave()


def refuse_while_waited_for(what: str, group: dist.ProcessGroup) -> None:
    """Refuse what needs all processes where the others wait for this one: each would wait for the other.

    Raises:
        RuntimeError: Inside a block that this process runs first.
    """
    if group in _counters and _counters[group].num_waited_for:
        raise RuntimeError(
            f"{what} needs all processes, and the others wait for this one to leave its main_process_first() or "
            "local_main_process_first() block. Call it before or after the block."
        )


def _counters_of(group: dist.ProcessGroup) -> _Counters:
    if group not in _counters:
        progress = group_store("accelight/first") if is_needed(group) else None
        _counters[group] = _Counters(group.size() - 1, progress, group.rank() == 0)
        count(group, "main_process_first", _counters[group])
    return _counters[group]


def _wait(store: Store, limit: timedelta, num_waiting: int, scope: str, path: str) -> None:
    try:
        if poll(lambda: store.check(["outcome"]) or None, limit.total_seconds()) is None:
            raise TimeoutError(
                f"The first process of {scope!r} has not left block {path} after {limit.total_seconds():g} s. "
                "Raise timeout=, or see what it is doing."
            )
        outcome = store.get("outcome").decode()
        if store.add("readers", 1) == num_waiting:  # the last one clears up
            store.delete_key("outcome")
            store.delete_key("readers")
    except DeadlockError:
        raise
    except RuntimeError as error:  # DistNetworkError, DistStoreError: the process that holds the store is gone
        raise RuntimeError(
            f"Lost the process group's store while waiting for the first process of {scope!r}: the process that holds "
            f"it (usually process 0) has ended. ({error})"
        ) from error
    if outcome != _DONE:
        raise RuntimeError(f"Cannot go on: {outcome}")


def shortest_pause(num_processes: int) -> float:
    """Return the seconds between two questions to the store, if all processes ask at the same time and want to know."""
    return max(0.01, num_processes / _QUESTIONS_PER_S)


def poll(ask: Callable[[], T | None], timeout_s: float, slowest_s: float = _SLOWEST_POLL_S) -> T | None:
    """Ask again and again, ever more slowly, until there is an answer; None after ``timeout_s``.

    ``Store.wait`` would keep Ctrl-C waiting, lock the store's connection for other threads, and print a warning at
    each timeout.

    Args:
        ask: Returns the answer, or None while there is none.
        timeout_s: Seconds to ask for.
        slowest_s: Longest pause between two questions.

    Raises:
        DeadlockError: If the processes wait for each other.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0001
    while (answer := ask()) is None:
        if _interruptions and (reason := _interruptions.get(live_group())) is not None:  # type: ignore[arg-type]
            raise DeadlockError(reason)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return None
        time.sleep(min(pause_s, remaining_s))
        pause_s = min(pause_s * 1.5, slowest_s)
    return answer
