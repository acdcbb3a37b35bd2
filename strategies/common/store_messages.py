"""Messages to rank 0 and from it, through the store of the process group: nobody waits but for what it is to be told.

Collectives of Python objects send everything to everybody, in several steps, through the device where NCCL is the
backend. Here each rank sends rank 0 its own, and rank 0 answers in some bytes.

[Note: who has ended] The store does not tell. Where processes write for minutes, all begin to reduce one number over
gloo, each when its message is sent: the connection of a process that ends breaks at once, and the reduction with it.

[Note: clearing up] Whoever sends rank 0 a message has received all that rank 0 had told before. So when everybody's
message is there, what was told before is removed, and so are the messages.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...state import staying
from ...state.ordering import poll, shortest_pause
from ...state.process_group import backends_by_device, group_store, require_group, timeout_of
from .agreed_outcome import told_by_rank

T = TypeVar("T")
R = TypeVar("R")

_PART_BYTES = 4 * 2**20  # torch's TCPStore (2.13) closes the connection of who sends more than 8 MiB at once
_NUMBER_BYTES = 4
_GRACE_S = 10.0  # rank 0 is waiting, too, and says for whom


class StoreMessages:
    """Numbered messages between rank 0 and all others; every rank goes through the same ones in the same order.

    Args:
        group: The default process group.
        name: Of these messages; each thread needs its own.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._store = group_store(f"accelight/messages/{name}")
        self._rank, self._num_ranks = group.rank(), group.size()
        self._group = weakref.ref(group)
        self._slowest_s = shortest_pause(self._num_ranks)
        self._told: list[str] = []
        self._is_watched = staying.is_needed(group)
        self.num_uses = 0
        """How many messages this rank has sent or received."""
        staying.count(group, f"what process 0 tells of {name}", self)

    def from_rank_zero(self, action: Callable[[], R], what: str) -> R:
        """Run ``action`` on rank 0 and return its result, pickled for the others, who wait for that alone.

        Raises:
            RuntimeError: On every rank, if it failed, naming ``what`` and the error; or if rank 0 does not say.
        """
        return self._told_by_rank_zero(action, what)

    def through_rank_zero(
        self, content: T, action: Callable[[list[T]], R], what: str, watched_over: dist.ProcessGroup | None = None
    ) -> R:
        """Send ``content`` to rank 0, run ``action`` there on everybody's in rank order, and return its result.

        Args:
            content: Of this rank, pickled.
            action: Run on rank 0.
            what: For errors.
            watched_over: A group of all ranks, whose end is noticed at once if the group's backend for the CPU is
                gloo: see [Note: who has ended].

        Raises:
            RuntimeError: On every rank, if it failed, naming ``what`` and the error; or if a rank did not send its
                own within the group's timeout, or has ended, naming the rank.
        """
        if self._rank != 0:
            self._send(content)
            return self._told_by_rank_zero(lambda: action([]), what, _Watch(watched_over))
        key = self._next()
        return self._told_by_rank_zero(lambda: action(self._collect(key, content, _Watch(watched_over))), what)

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """Run a body that does not communicate, on every rank; an exception of one is raised on all.

        Raises:
            RuntimeError: With ``what`` failed and each problem, with the ranks that have it.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 (raised again below, once the others know)
            error = caught
        problems = [] if error is None else [f"{type(error).__name__}: {error}"]
        if failures := self.through_rank_zero(problems, told_by_rank, what):
            raise RuntimeError("\n".join([f"{what} failed.", *failures])) from error

    def num_missing(self) -> int:
        """Return how many messages the others have yet to pass, to have passed as many as this rank."""
        return self.num_uses * (self._num_ranks - 1) - self._store.add("passed", 0)

    def _told_by_rank_zero(self, action: Callable[[], R], what: str, watch: _Watch | None = None) -> R:
        key = self._next()
        if self._rank != 0:
            failure, result = pickle.loads(self._receive(key, what, watch))
            if failure is not None:
                raise RuntimeError(f"{what} failed on rank 0: {failure}")
            return result
        failed: Exception | None = None
        outcome: tuple[str | None, Any] = None, None
        try:
            outcome = None, action()
            content = pickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001 (raised again below, after the others have been told)
            failed = error
            content = pickle.dumps((f"{type(error).__name__}: {error}", None))
        if self._num_ranks > 1:
            self._told += self._put(key, content)
        if failed is not None:
            raise RuntimeError(f"{what} failed on rank 0: {type(failed).__name__}: {failed}") from failed
        return outcome[1]

    def _send(self, content: Any) -> None:
        key = self._next()
        self._put(f"{key}/{self._rank}", pickle.dumps(content))
        self._store.add(key, 1)
        self._pass()

    def _put(self, key: str, content: bytes) -> list[str]:
        """Leave ``content`` on the store, in parts, and return their keys; the first is ``key``, and comes last."""
        parts = [content[at : at + _PART_BYTES] for at in range(0, len(content), _PART_BYTES)]
        keys = [key, *(f"{key}/part{number}" for number in range(1, len(parts)))]
        for name, part in zip(keys[1:], parts[1:], strict=True):
            self._store.set(name, part)  # type: ignore[arg-type] # bytes are fine
        self._store.set(key, len(parts).to_bytes(_NUMBER_BYTES, "little") + parts[0])  # type: ignore[arg-type]
        return keys

    def _take(self, key: str) -> tuple[bytes, list[str]]:
        """Return what `_put` left under ``key``, and the keys."""
        first = bytes(self._store.get(key))
        number = int.from_bytes(first[:_NUMBER_BYTES], "little")
        others = [f"{key}/part{one}" for one in range(1, number)]
        return b"".join([first[_NUMBER_BYTES:], *(bytes(self._store.get(one)) for one in others)]), [key, *others]

    def _collect(self, key: str, own: T, watch: _Watch) -> list[T]:
        others = range(1, self._num_ranks)

        def all_are_there() -> bool:
            return not others or self._store.add(key, 0) == len(others)

        poll(lambda: all_are_there() or watch.is_broken() or None, self._timeout_s(), self._slowest_s)
        if not all_are_there():
            absent = [rank for rank in others if not self._store.check([f"{key}/{rank}"])]
            ended = "A process has ended: " if watch.is_broken() else ""
            raise RuntimeError(
                f"{ended}process{'es' if len(absent) > 1 else ''} {', '.join(map(str, absent))} did not finish"
                + ("." if ended else f" in {self._timeout_s():g} s.")
            )
        contents, read = [own], [key]
        for rank in others:
            content, keys = self._take(f"{key}/{rank}")
            contents.append(pickle.loads(content))
            read += keys
        for old in (*self._told, *read):  # see [Note: clearing up]
            self._store.delete_key(old)
        self._told.clear()
        return contents

    def _receive(self, key: str, what: str, watch: _Watch | None) -> bytes:
        def is_there() -> bool | None:
            return self._store.check([key]) or None

        def is_there_or_never() -> bool | None:
            return is_there() or (watch is not None and watch.is_broken()) or None

        try:
            answer = poll(is_there_or_never, self._timeout_s() + _GRACE_S, self._slowest_s)
            if answer and poll(is_there, _GRACE_S, self._slowest_s) is None:
                raise RuntimeError(f"{what} failed: a process has ended, and process 0 does not say which.")
            if answer is None:
                raise RuntimeError(f"{what} failed: process 0 said nothing for {self._timeout_s():g} s.")
            return self._take(key)[0]
        finally:
            self._pass()

    def _next(self) -> str:
        self.num_uses += 1
        return f"{self.num_uses}"

    def _pass(self) -> None:
        if self._is_watched:
            self._store.add("passed", 1)

    def _timeout_s(self) -> float:
        group = self._group()
        return 0.0 if group is None else timeout_of(group).total_seconds()


class _Watch:
    """Notices the end of a process that has not yet come to where this one is."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._work: Any = None
        self._is_broken = False
        if group is not None and backends_by_device(group).get("cpu") == "gloo":
            self._work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)

    def is_broken(self) -> bool:
        if self._work is not None and self._work.is_completed():
            try:
                self._work.wait()
            except RuntimeError:
                self._is_broken = True
            self._work = None
        return self._is_broken


_messages: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, StoreMessages]] = weakref.WeakKeyDictionary()


def store_messages(name: str = "the main thread") -> StoreMessages:
    """Return the messages of this name in the default process group, the same at each call.

    Args:
        name: What another thread does. Two threads must not share messages: their orders may differ between ranks.
    """
    group = require_group(f"What the processes tell each other of {name}")
    by_name = _messages.setdefault(group, {})
    if name not in by_name:
        by_name[name] = StoreMessages(group, name)
    return by_name[name]
