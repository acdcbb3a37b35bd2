"""One process first, the others after it: waiting on the store, so that no collective's timeout runs meanwhile.

[Note: keys] A block's key in the store is its path of counters: the third block is ``3``, the first one nested in it
``3.1``. All processes pass the same blocks, so they agree on the path without a word; and a block left by an exception
before its inner ones leaves the counters of the blocks after it equal on all processes. The counters belong to the
process group, as the store does, and not to the states: resetting a state must not make old keys look new.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from . import staying
from .process_group import group_store, live_group

if TYPE_CHECKING:
    import torch.distributed as dist

    from .upstream import Store

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
    """Whether this process may have to stay: see the note in `staying`."""
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
        progress = group_store("accelight/first") if staying.is_needed(group) else None
        _counters[group] = _Counters(group.size() - 1, progress, group.rank() == 0)
        staying.count(group, "main_process_first", _counters[group])
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
