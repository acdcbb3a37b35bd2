"""Ranks agree: errors raised on all ranks, messages through the store, the order of collectives, missing ranks."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ...state import rendezvous
from ...state.deadlocks import found_deadlock
from ...state.process_group import backends_by_device, group_store, require_group, timeout_of
from ...state.rendezvous import DeadlockError, poll, shortest_pause
from ..upstream.torch_fake import is_planned

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from ...state.upstream import Store


T = TypeVar("T")


def num_ranks() -> int:
    """Return the number of processes; one without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def raise_together(
    what: str, problems: Sequence[str], cause: BaseException | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank if any rank has a problem; every rank must call it, on a group of all (default: the default).

    Raises:
        RuntimeError: With ``what`` failed and each problem, with the ranks that have it.
    """
    everyone: list[list[str] | None] = [list(problems)]
    if num_ranks() > 1:
        everyone = [None] * num_ranks()
        dist.all_gather_object(everyone, list(problems), group=group)
    if lines := format_errors_by_rank([found or () for found in everyone]):
        raise RuntimeError("\n".join([f"{what} failed.", *lines])) from cause


def format_errors_by_rank(problems: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each problem, with the ranks that have it.

    Args:
        problems: Of each rank.
    """
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, found in enumerate(problems):
        for problem in found:
            ranks_by_problem.setdefault(problem, []).append(rank)
    return [f"{_ranks(ranks, len(problems))}: {problem}" for problem, ranks in ranks_by_problem.items()]


@contextmanager
def raise_on_all_ranks(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a body that does not communicate, on every rank; an exception of one is raised on all.

    Raises:
        RuntimeError: As `raise_together`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 (raised again below, once the others know)
        error = caught
    raise_together(what, [] if error is None else [f"{type(error).__name__}: {error}"], error, group)


def run_on_rank_zero(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 while the others wait; its result, or its failure, is everyone's.

    ``group`` holds all ranks; the default group by default.

    Raises:
        RuntimeError: If it failed, naming ``what`` and the error.
    """
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[1] = action()
        except Exception as caught:  # noqa: BLE001 (raised again below, after the others have the error)
            error = caught
            outcome[0] = f"{type(caught).__name__}: {caught}"
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[0] is not None:
        raise RuntimeError(f"{what} failed on rank 0: {outcome[0]}") from error
    result: T = outcome[1]
    return result


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "every process"
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------------------------
# Messages to rank 0 and from it, through the store of the process group: nobody waits but for what it is to be told.
#
# Collectives of Python objects send everything to everybody, in several steps, through the device where NCCL is the
# backend. Here each rank sends rank 0 its own, and rank 0 answers in some bytes.
#
# [Note: who has ended] The store does not show. Where processes write for minutes, all begin to reduce one number over
# gloo, each when its message is sent: the connection of a process that ends breaks at once, and the reduction with it.
#
# [Note: clearing up] Whoever sends rank 0 a message has received all that rank 0 had sent before. So when everybody's
# message is there, rank 0 removes what it sent before, and the messages.


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
        self._sent: list[str] = []
        self._is_watched = rendezvous.is_needed(group)
        self.num_uses = 0
        """How many messages this rank has sent or received."""
        rendezvous.count(group, f"what process 0 tells of {name}", self)

    def broadcast_from_rank_zero(self, action: Callable[[], R], what: str) -> R:
        """Run ``action`` on rank 0 and return its result, pickled for the others, who wait for that alone.

        Raises:
            RuntimeError: On every rank, if it failed, naming ``what`` and the error; or if rank 0 does not say.
        """
        return self._send_from_rank_zero(action, what)

    def gather_then_broadcast(
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
            return self._send_from_rank_zero(lambda: action([]), what, _Watch(watched_over))
        key = self._next()
        return self._send_from_rank_zero(lambda: action(self._collect(key, content, _Watch(watched_over))), what)

    @contextmanager
    def raise_on_all_ranks(self, what: str) -> Iterator[None]:
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
        if failures := self.gather_then_broadcast(problems, format_errors_by_rank, what):
            raise RuntimeError("\n".join([f"{what} failed.", *failures])) from error

    def num_missing(self) -> int:
        """Return how many messages the others have yet to pass, to have passed as many as this rank."""
        return self.num_uses * (self._num_ranks - 1) - self._store.add("passed", 0)

    def _send_from_rank_zero(self, action: Callable[[], R], what: str, watch: _Watch | None = None) -> R:
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
        except Exception as error:  # noqa: BLE001 (raised again below, after the others have the error)
            failed = error
            content = pickle.dumps((f"{type(error).__name__}: {error}", None))
        if self._num_ranks > 1:
            self._sent += self._put(key, content)
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
        for old in (*self._sent, *read):  # see [Note: clearing up]
            self._store.delete_key(old)
        self._sent.clear()
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


# ------------------------------------------------------------------------------------------------
# Ranks say what each is about to do, where doing different things would mix their values or end the processes.
#
# They meet on the process group's store and not in a collective: a rank that does not come may be in a collective of
# the user's meanwhile, which would be answered with ours.


_PATIENCE = timedelta(seconds=30)
_LIBRARIES = ("accelight.state.", "accelight.strategies.", "torch.", "contextlib")
_COUNT = itertools.count()


class CollectiveOrderChecker:
    """Compares actions of all ranks, in the order in which each calls `compare`.

    Every rank makes it at the same time. One comparison takes a rank three requests to the store, whatever the number
    of ranks.

    Args:
        way_out: What to do about a difference: the end of each error.
        timeout: How long a rank waits for the others.
    """

    def __init__(self, way_out: str, timeout: timedelta) -> None:
        self._way_out, self._timeout = way_out, timeout
        # Rank 0's number: an error before may have let another rank make fewer.
        number = run_on_rank_zero(lambda: next(_COUNT), "Numbering a comparison")
        self._prefix, self._count = f"accelight/compared/{number}", 0

    def compare(self, action: str) -> None:
        """Say what this rank is about to do, and return when all ranks have said the same.

        Raises:
            RuntimeError: On every rank, if they say different things; or on this one, if some say nothing in time.
        """
        if is_planned():
            return
        store, rank, num_ranks = group_store(self._prefix), dist.get_rank(), dist.get_world_size()
        self._count += 1
        verdict = f"verdict/{self._count}"
        store.set(f"said/{rank}", json.dumps([self._count, action]))
        if store.add("arrived", 1) == self._count * num_ranks:  # the last: all have left the verdict before this one
            said = [_said(store, each)[1] for each in range(num_ranks)]
            store.set(verdict, json.dumps(said if len(set(said)) > 1 else []))
            store.delete_key(f"verdict/{self._count - 1}")
        else:
            try:
                self._wait(store, verdict, action)
            except DeadlockError as error:
                raise RuntimeError(f"{error} {self._way_out}") from None
        different = json.loads(store.get(verdict))
        if different:
            raise RuntimeError(f"{_different(different)} {self._way_out}")

    def _wait(self, store: Store, verdict: str, action: str) -> None:
        def is_there() -> bool | None:
            return store.check([verdict]) or None

        num_ranks = dist.get_world_size()
        for patience in (min(_PATIENCE, self._timeout), self._timeout):
            if poll(is_there, patience.total_seconds(), shortest_pause(num_ranks)) is not None:
                return
            here = [each for each in range(num_ranks) if _said(store, each)[0] >= self._count]
            absent = ", ".join(f"{each}" for each in range(num_ranks) if each not in here)
            text = f"Process {dist.get_rank()} {action} now, and process {absent} does not"
            if patience >= self._timeout:
                raise RuntimeError(f"{text}. {self._way_out}")
            if here[0] == dist.get_rank():
                warnings.warn(f"{text}, so far. {self._way_out}", stacklevel=2)


class ComparedPlaces:
    """Lets ranks do what needs all of them at a line of the user's code, once all have come to that line.

    A line that all ranks have come to once is not compared again.

    Args:
        way_out: As for `CollectiveOrderChecker`.
        timeout: As there.
    """

    def __init__(self, way_out: str, timeout: timedelta) -> None:
        self._compared = CollectiveOrderChecker(way_out, timeout)
        self._known: set[tuple[CodeType, int]] = set()

    def come(self, action: str) -> None:
        """Come to the line that has called the library or torch.

        Args:
            action: What this rank is about to do there.

        Raises:
            RuntimeError: If the others do something else, as `CollectiveOrderChecker.compare`.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
            frame = frame.f_back
        if frame is None or (place := (frame.f_code, frame.f_lasti)) in self._known:
            return
        self._compared.compare(f"{action} at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})")
        self._known.add(place)


def _different(actions: Sequence[str]) -> str:
    """Return a sentence that says of each rank what it does."""
    listed = "; ".join(f"process {rank} {action}" for rank, action in enumerate(actions))
    return f"Processes use different parts of the model at one time: {listed}."


def _said(store: Store, rank: int) -> tuple[int, str]:
    """Return the number of a rank's last comparison, and what it said; 0 if it has said nothing."""
    key = f"said/{rank}"
    if not store.check([key]):
        return 0, ""
    count, action = json.loads(store.get(key))
    return count, action


# ------------------------------------------------------------------------------------------------
# The maximum of small numbers over all ranks, on its way while each rank goes on.


AllReduceMaxAsync = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""Begins to reduce numbers to their maximum over all ranks, and returns what waits for them."""


class PendingAllReduceMax:
    """Begins to reduce; all ranks must make one at the same place, and whoever wants the numbers waits.

    A rank that waits, waits for the slowest. Where most ranks need not know, most need not wait.

    Args:
        values: As many on each rank; int32.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self._own = values
        self._work: Any = None
        if num_ranks() == 1:
            return
        self._values = torch.tensor(values, dtype=torch.int32)
        if "cpu" not in dist.get_backend_config() and dist.get_backend() != "gloo":
            self._values = self._values.to(torch.accelerator.current_accelerator())
        self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, async_op=True)

    def wait(self) -> Sequence[int]:
        """Return the numbers, when all ranks have begun."""
        if self._work is None:
            return self._own
        self._work.wait()  # again at once
        return self._values.tolist()


# ------------------------------------------------------------------------------------------------
# Which process it was when a collective fails because one does not take part: gloo says only that it has waited.
#
# [Note: who answers] A process that leaves training with such an error says so on the store, and looks for some seconds
# whether the others do. One that failed with an error of its own says which: the others failed in consequence. One that
# was killed does not answer, nor one behind a link that is cut, or that is busy elsewhere. On the store's far side of a
# cut nobody can be asked: then it is the store's host that does not answer.


_log = logging.getLogger(__name__)

ANSWERS_WITHIN_S = 10.0
"""Others fail at the same moment or, where their own timeout has begun later, not much after it."""
_SIGNS = ("gloo/transport", "gloo::", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_POLL_S = 0.1
_NOTED_WITHIN_S = 2.0
_MOST_CHARACTERS = 2000


@dataclass
class _Answers:
    """What has been heard so far; filled by a thread that a cut link may hold for ever."""

    reached: bool = False
    heard: dict[int, str] = field(default_factory=dict)
    """By process: the error of its own with which it has failed; empty where that is a consequence of another's."""


def is_of_connection(error: BaseException | None) -> bool:
    """Return whether ``error``, or what it came from, says that another process did not take part in a collective."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def lost_processes(run: str) -> str:
    """Ask who else has failed, and return a sentence about those that do not answer.

    Args:
        run: Names this run of training; the same on all processes, and another one in each run.
    """
    answers, everyone = _Answers(), set(range(dist.get_world_size()))
    prefix, rank = f"{run}/failed", dist.get_rank()
    asking = threading.Thread(target=_ask, args=(prefix, rank, everyone, answers), daemon=True)
    asking.start()
    asking.join(ANSWERS_WITHIN_S + 1)
    if not answers.reached:
        where = f"{os.environ.get('MASTER_ADDR', 'the host of process 0')}:{os.environ.get('MASTER_PORT', '')}"
        return (
            f"nor does the store at {where.rstrip(':')}, which process 0 or its torchrun agent holds: process 0 has "
            "ended, or its host cannot be reached from here."
        )
    if failed := {rank: text for rank, text in sorted(answers.heard.items()) if text}:
        return "because " + "; ".join(f"process {rank} failed with {text}" for rank, text in failed.items())
    missing = sorted(everyone - answers.heard.keys())  # the group may be gone by now: Ray ends it from another thread
    if not missing:
        return "but all of them answer: they wait for each other, or the timeout is too short."
    which = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return f"and {which} did not answer within {ANSWERS_WITHIN_S:g} s: ended, not to be reached, or busy elsewhere."


def _ask(prefix: str, rank: int, everyone: set[int], answers: _Answers) -> None:
    try:
        store = group_store(prefix)
        store.set(f"{rank}", "")
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        while answers.heard.keys() != everyone and not any(answers.heard.values()) and time.monotonic() < deadline:
            for other in everyone - answers.heard.keys():
                if store.check([f"{other}"]):
                    answers.heard[other] = store.get(f"{other}").decode()
                answers.reached = True
            time.sleep(_POLL_S)
    except (RuntimeError, ValueError):  # the store is gone, or the group
        return


def tell_lost_processes(error: BaseException, run: str) -> None:
    """End the text of ``error`` with which processes are missing, if it is a collective's that failed for want of one.

    Any other error is noted on the store, where the processes that fail in consequence find it.

    Args:
        error: With which training ends here.
        run: As for `lost_processes`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_planned():
        return
    if not is_of_connection(error):
        noting = threading.Thread(target=_note_failure, args=(error, run), daemon=True)
        noting.start()
        noting.join(_NOTED_WITHIN_S)
        return
    where = f"Process {dist.get_rank()} on {socket.gethostname()} could not communicate with the others,"
    _end_with(error, found_deadlock() or f"{where} {lost_processes(run)}")


def _note_failure(error: BaseException, run: str) -> None:
    try:
        text = f"{type(error).__name__}: {error}"
        group_store(f"{run}/failed").set(f"{dist.get_rank()}", text[:_MOST_CHARACTERS])
    except (RuntimeError, ValueError):  # the store is gone, or the group
        return


def _end_with(error: BaseException, sentence: str) -> None:
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{sentence}",)  # so that it ends str(error), too, which loggers print
    elif sys.version_info >= (3, 11):
        error.add_note(sentence)
    else:
        _log.error(sentence)
