"""Ranks wait for each other, send rank 0 messages, raise each other's errors, and find out which of them is missing.

All of it goes through the store, except `run_on_rank_zero`, and `raise_together` and `raise_on_all_ranks` without
`StoreMessages`. These use collectives: a collective fails at once when a process ends, and a wait on the store does
not.
"""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from .deadlocks import found_deadlock, watch_of_live_group
from .process_group import backends_by_device, group_store, is_planned, live_group, require_group
from .store import Channel, DeadlockError, ProcessFailedError, poll

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from .deadlocks import DeadlockWatch


T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)


def num_ranks() -> int:
    """Return the number of processes; one without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def raise_together(
    what: str,
    problems: Sequence[str],
    cause: BaseException | None = None,
    through: dist.ProcessGroup | StoreMessages | None = None,
) -> None:
    """Raise on every rank if any rank has a problem; every rank must call it.

    Args:
        what: For the error.
        problems: Of this rank.
        cause: Of this rank's problems.
        through: A group of all ranks (default: the default group), or messages.

    Raises:
        RuntimeError: ``what`` failed, with a line for each problem.
    """
    if isinstance(through, StoreMessages):
        lines = through.gather_then_broadcast(problems, format_errors_by_rank, what)
    else:
        everyone: list[Any] = [list(problems)] * num_ranks()
        if len(everyone) > 1:
            dist.all_gather_object(everyone, list(problems), group=through)
        lines = format_errors_by_rank(everyone)
    if lines:
        raise RuntimeError("\n".join([f"{what} failed.", *lines])) from cause


@contextmanager
def raise_on_all_ranks(what: str, through: dist.ProcessGroup | StoreMessages | None = None) -> Iterator[None]:
    """Run a body that does not communicate, on every rank; an exception of one is raised on all.

    Raises:
        RuntimeError: As `raise_together`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 (raised again below, once the others know)
        error = caught
    raise_together(what, [] if error is None else [text_of(error)], error, through)


def format_errors_by_rank(problems: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each problem, with the ranks that have it; given the problems of each rank."""
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, found in enumerate(problems):
        for problem in found:
            ranks_by_problem.setdefault(problem, []).append(rank)
    return [
        f"{'every process' if len(ranks) == len(problems) > 1 else name_processes(ranks)}: {problem}"
        for problem, ranks in ranks_by_problem.items()
    ]


def run_on_rank_zero(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 while the others wait, and return its result on every rank.

    Without a process group this process is the only one.

    Raises:
        RuntimeError: On every rank, if it failed, naming ``what`` and the error.
    """
    is_alone = num_ranks() == 1
    outcome, error = _attempt(action) if is_alone or dist.get_rank() == 0 else ([None, None], None)
    if not is_alone:
        dist.broadcast_object_list(outcome, src=0, group=group)
    return _result_of(outcome, what, error)


def _attempt(action: Callable[[], T]) -> tuple[list[Any], Exception | None]:
    """Return the failure or the result of an action, for the other ranks, and its exception."""
    try:
        return [None, action()], None
    except Exception as error:  # noqa: BLE001 (raised by `_result_of`, after the others have the text)
        return [text_of(error), None], error


def _result_of(outcome: Sequence[Any], what: str, error: Exception | None = None) -> Any:
    failure, result = outcome
    if failure is not None:
        raise RuntimeError(f"{what} failed on rank 0: {failure}") from error
    return result


def text_of(error: BaseException) -> str:
    """Return an error's class and text."""
    return f"{type(error).__name__}: {error}"


def name_processes(ranks: Sequence[int]) -> str:
    """Return for example ``processes 0, 2``."""
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------------------------
# Messages to rank 0 and from it. A rank waits only for the answer that it needs.
#
# Collectives of Python objects send everything to every rank, in several steps, with NCCL through the device. Here each
# rank sends rank 0 its own object, and rank 0 answers with some bytes.
#
# [Note: ended processes] The store does not show that a process has ended. Where processes write for minutes, all begin
# to reduce one number over gloo after they have sent their message: the connection of a process that ends breaks at
# once, and the reduction with it.
#
# [Note: old messages] A rank that sends rank 0 a message has received all that rank 0 sent before. So when all messages
# are there, rank 0 removes them, and what it sent before.

_GRACE_S = 10.0  # rank 0 waits as well, and then reports for which rank


class StoreMessages(Channel):
    """Numbered messages between rank 0 and all others, the same ones in the same order on every rank."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        super().__init__(group, f"messages/{name}", f"the messages of {name}")
        self._sent: list[str] = []

    def broadcast_from_rank_zero(self, action: Callable[[], R], what: str, watch: Watch | None = None) -> R:
        """Run ``action`` on rank 0 and return its result, pickled for the others, which wait for it.

        Raises:
            RuntimeError: On every rank, if it failed, naming ``what`` and the error; or if rank 0 does not answer.
        """
        key = self._next()
        if self._rank != 0:
            return _result_of(pickle.loads(self._receive(key, what, watch)), what)
        outcome, error = _attempt(action)
        try:
            content = pickle.dumps(outcome)
        except Exception as unpicklable:  # noqa: BLE001 (raised by `_result_of`)
            outcome, error = [text_of(unpicklable), None], unpicklable
            content = pickle.dumps(outcome)
        if self._num_ranks > 1:
            self._sent += self.put(key, content)
        return _result_of(outcome, what, error)

    def gather_then_broadcast(
        self,
        content: T,
        action: Callable[[list[T]], R],
        what: str,
        watched_over: dist.ProcessGroup | None = None,
        watch: Watch | None = None,
    ) -> R:
        """Send ``content`` to rank 0, run ``action`` there on all contents in rank order, and return its result.

        Args:
            content: Of this rank; it is pickled.
            action: What rank 0 does.
            what: For errors.
            watched_over: A group of all ranks. If its CPU backend is gloo, the end of a process is noticed at once:
                see [Note: ended processes].
            watch: What notices it instead. An exception that it raises ends the wait.

        Raises:
            RuntimeError: On every rank, if it failed, naming ``what`` and the error; or if a rank did not send its
                content within the group's timeout, or has ended, naming the rank.
        """
        key = self._next() if self._rank == 0 else self.send_to_rank_zero(content)
        watching = _Watch(watched_over) if watch is None else watch
        return self.broadcast_from_rank_zero(lambda: action(self._collect(key, content, watching)), what, watching)

    def send_to_rank_zero(self, content: Any) -> str:
        """Send what `gather_then_broadcast` collects on rank 0, and return its key."""
        key = self._next()
        self.put(f"{key}/{self._rank}", pickle.dumps(content))
        self._store.add(key, 1)
        self.finish_use()
        return key

    def _collect(self, key: str, own: T, watch: Watch) -> list[T]:
        others, timeout_s = range(1, self._num_ranks), self.timeout_s()

        def all_are_there() -> bool:
            return not others or self._store.add(key, 0) == len(others)

        poll(lambda: all_are_there() or watch.is_broken() or None, timeout_s, self._pause_s)
        if not all_are_there():
            absent = name_processes([rank for rank in others if not self._store.check([f"{key}/{rank}"])])
            if watch.is_broken():
                raise RuntimeError(f"A process has ended: {absent} did not finish.")
            raise RuntimeError(f"{absent} did not finish in {timeout_s:g} s.")
        contents, read = [own], [key]
        for rank in others:
            content, keys = self.take(f"{key}/{rank}")
            contents.append(pickle.loads(content))
            read += keys
        self.delete([*self._sent, *read])  # see [Note: old messages]
        self._sent.clear()
        return contents

    def _receive(self, key: str, what: str, watch: Watch | None) -> bytes:
        def is_there_or_never() -> bool | None:
            return self._store.check([key]) or (watch is not None and watch.is_broken()) or None

        try:
            if poll(is_there_or_never, self.timeout_s() + _GRACE_S, self._pause_s) is None:
                raise RuntimeError(f"{what} failed: process 0 did not respond within {self.timeout_s():g} s.")
            if not self.wait_for(key, _GRACE_S):
                raise RuntimeError(f"{what} failed: a process has ended, but process 0 does not report which.")
            return self.take(key)[0]
        finally:
            self.finish_use()

    def _next(self) -> str:
        self.num_uses += 1
        return f"{self.num_uses}"


class Watch(Protocol):
    """Looks, while a rank waits for messages, whether they can still come."""

    def is_broken(self) -> bool:
        """Return whether a process has ended."""
        ...


class _Watch:
    """Notices the end of a process that has not reached the point at which this object was made."""

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


def store_messages(name: str = "the main thread") -> StoreMessages:
    """Return the messages of this name in the default process group, the same at each call.

    Args:
        name: Of the thread's work. Two threads must not share messages: their orders may differ between ranks.
    """
    return StoreMessages.of(require_group(f"A message of {name}"), name)


_numbers = itertools.count()


def shared_number(what: str, through: StoreMessages | None = None) -> int:
    """Return a number of rank 0's that it has not given before, the same on all ranks; every rank must call it.

    Counts of one rank's own do not stay equal: an error may have let another rank begin fewer runs.

    Args:
        what: Is numbered, for errors.
        through: Messages instead of a collective.
    """
    if through is not None:
        return through.broadcast_from_rank_zero(lambda: next(_numbers), f"Numbering {what}")
    return run_on_rank_zero(lambda: next(_numbers), f"Numbering {what}")


# ------------------------------------------------------------------------------------------------
# One process first, the others after it. They wait on the store, so that no collective's timeout runs meanwhile.
#
# [Note: blocks] A block's key is its path of counters: the third block is ``3``, the first one nested in it ``3.1``.
# All processes pass the same blocks, so they agree on the path without communicating. An exception that leaves a block
# before its inner ones keeps the counters of later blocks equal on all processes. The counters belong to the process
# group, as the store does, and not to the states: after a reset, old keys must not look new.

_LONGEST_WAIT_S = timedelta(days=7).total_seconds()


class _Blocks(Channel):
    """This process's position among the blocks of one group; a use is a block outside of all others."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        super().__init__(group, name, "main_process_first")
        self.levels = [0]
        """Finished or running blocks per open level."""
        self.num_waited_for = 0
        """Open blocks that other processes wait for this one to leave."""

    def enter(self) -> str:
        self.levels[-1] += 1
        self.num_uses = self.levels[0]
        path = ".".join(map(str, self.levels))
        self.levels.append(0)
        return path

    def leave(self) -> None:
        self.levels.pop()
        if len(self.levels) == 1:
            self.finish_use()

    def wait_for_first(self, key: str, limit_s: float, num_waiting: int) -> list[Any]:
        """Return the results that the first process leaves under ``key``; `num_waiting` processes read them."""
        try:
            if not self.wait_for(key, limit_s, promptly=False):
                scope, path = key.rsplit("/", 1)
                raise TimeoutError(
                    f"The first process of {scope!r} has not left block {path} after {limit_s:g} s. Increase "
                    "timeout=, or check what it is doing."
                )
            content, keys = self.take(key)
            if self._store.add(f"{key}/readers", 1) == num_waiting:
                self.delete([*keys, f"{key}/readers"])
        except DeadlockError:
            raise
        except RuntimeError as error:  # DistNetworkError, DistStoreError: the process that holds the store is gone
            raise RuntimeError(
                f"Lost the process group's store while waiting for the first process of {key.rsplit('/', 1)[0]!r}: the "
                f"process that holds it (usually process 0) has ended. ({error})"
            ) from error
        failure, results = pickle.loads(content)
        if failure is not None:
            raise RuntimeError(f"Cannot continue: {failure}")
        return list(results)


@contextmanager
def one_first(
    group: dist.ProcessGroup,
    *,
    first: bool,
    scope: str,
    num_waiting: int,
    process_index: int,
    timeout: timedelta | float | None,
) -> Iterator[list[Any]]:
    """Run the block on one process of ``scope`` first, then on the ``num_waiting`` others.

    Yields:
        A list: what the first process appends, pickled, the others find.

    Raises:
        RuntimeError: On the others, if the first one's block raised or its process is gone.
        TimeoutError: On the others, if the first one's block took longer than ``timeout``.
    """
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if limit_s is not None and limit_s <= 0:
        raise ValueError(f"timeout must be positive, got {timeout!r}. Omit it to wait without a limit.")
    blocks = _Blocks.of(group, "first")
    path = blocks.enter()
    try:
        if not first:
            yield blocks.wait_for_first(f"{scope}/{path}", limit_s or _LONGEST_WAIT_S, num_waiting)
            return
        results: list[Any] = []
        outcome: tuple[str | None, list[Any]] = None, results
        blocks.num_waited_for += bool(num_waiting)
        try:
            yield results
        except BaseException as error:
            outcome = (
                f"process {process_index} raised {type(error).__name__} in the block that it runs first: {error}",
                [],
            )
            raise
        finally:
            blocks.num_waited_for -= bool(num_waiting)
            if num_waiting:
                blocks.put(f"{scope}/{path}", _pickled(outcome, process_index))
    finally:
        blocks.leave()


def _pickled(outcome: tuple[str | None, list[Any]], process_index: int) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 (whatever a result's class raises: the others must not wait for ever)
        return pickle.dumps((f"process {process_index}'s result cannot be pickled: {text_of(error)}", []))


def refuse_while_waited_for(what: str, group: dist.ProcessGroup) -> None:
    """Refuse what needs all processes where the others wait for this one: each would wait for the other.

    Raises:
        RuntimeError: Inside a block that this process runs first.
    """
    if _Blocks.of(group, "first").num_waited_for:
        raise RuntimeError(
            f"{what} needs all processes, and the others wait for this one to leave its main_process_first() or "
            "local_main_process_first() block. Call it before or after the block."
        )


# ------------------------------------------------------------------------------------------------
# Barriers, and comparisons of the ranks' next actions: different ones would mix their values or end the processes.
#
# Ranks meet on the store and not in a collective: a rank that does not come may be in a collective of the user's, which
# would be answered with ours.

_PATIENCE_S = 30.0
_LIBRARIES = ("accelight.state.", "accelight.strategies.", "torch.", "contextlib")


class _Meeting(Channel):
    """A point that all ranks reach repeatedly, each with a text. The last rank to arrive writes the verdict."""

    def arrive(self, text: str = "") -> None:
        self.num_uses += 1
        store, number = self._store, self.num_uses
        store.set(f"said/{self._rank}", json.dumps([number, text]))
        if store.add("arrived", 1) == number * self._num_ranks:  # all have left the verdict before this one
            said = [self._last_arrival(rank)[1] for rank in range(self._num_ranks)] if text else []
            store.set(f"verdict/{number}", json.dumps(said if len(set(said)) > 1 else []))
            store.delete_key(f"verdict/{number - 1}")

    def wait(self, timeout_s: float) -> list[str] | None:
        """Return the text of each rank if they differ, else an empty list; None if some ranks do not arrive."""
        verdict = f"verdict/{self.num_uses}"
        return json.loads(self._store.get(verdict)) if self.wait_for(verdict, timeout_s) else None

    def present(self) -> list[int]:
        """Return the ranks that have arrived."""
        return [rank for rank in range(self._num_ranks) if self._last_arrival(rank)[0] >= self.num_uses]

    def withdraw(self) -> bool:
        """Take this rank's arrival back, and return True; False if the last rank has just arrived."""
        if self._store.add("arrived", -1) >= self.num_uses * self._num_ranks - 1:
            self._store.add("arrived", 1)
            return False
        self._store.delete_key(f"said/{self._rank}")
        self.num_uses -= 1
        return True

    def _last_arrival(self, rank: int) -> tuple[int, str]:
        """Return the number of a rank's last arrival and its text; 0 before the first one."""
        key = f"said/{rank}"
        number, text = json.loads(self._store.get(key)) if self._store.check([key]) else (0, "")
        return number, text


def store_barrier(what: str) -> None:
    """Wait until every process has come to ``what``, at most as long as the group's timeout.

    Args:
        what: Names the call in the error, such as ``"trainer.save_checkpoint"``.

    Raises:
        RuntimeError: If some processes do not come; it names those that did.
    """
    group = require_group(what)
    barrier = _Meeting.of(group, f"barrier/{what}")
    barrier.arrive()
    timeout_s = barrier.timeout_s()
    if barrier.wait(timeout_s) is not None:
        return
    present = barrier.present()
    if barrier.withdraw():  # else this process would be here already when all come the next time
        raise RuntimeError(
            f"{what} was called on {name_processes(present)} of {group.size()} only: the others did not reach it in "
            f"{timeout_s:g} s. Call it on every process; all must take part."
        )


class CollectiveOrderChecker:
    """Compares the actions of all ranks, in the order in which each reports them. Every rank makes it at the same time.

    Args:
        way_out: What to do about a difference: the end of each error.
        timeout: How long a rank waits for the others.
    """

    def __init__(self, way_out: str, timeout: timedelta) -> None:
        self._way_out, self._timeout_s = way_out, timeout.total_seconds()
        # Rank 0's number: an error before may have let another rank make fewer.
        self.number = shared_number("a comparison")
        self._known: set[tuple[CodeType, int]] = set()

    def compare(self, action: str) -> None:
        """Report what this rank is about to do, and return when all ranks have reported the same.

        Raises:
            RuntimeError: On every rank, if their actions differ; or on this one, if some do not report in time.
        """
        if is_planned():
            return
        meeting = _Meeting.of(require_group(action), f"compared/{self.number}")
        meeting.arrive(action)
        try:
            different = self._wait(meeting, action)
        except ProcessFailedError:
            raise
        except DeadlockError as error:
            raise RuntimeError(f"{error} {self._way_out}") from None
        if different:
            listed = "; ".join(f"process {rank} {action}" for rank, action in enumerate(different))
            raise RuntimeError(
                f"Processes use different parts of the model at the same time: {listed}. {self._way_out}"
            )

    def compare_at_line(self, action: str) -> None:
        """Compare an action at the line of users' code that has called the library or torch; each line once."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
            frame = frame.f_back
        if frame is None or (place := (frame.f_code, frame.f_lasti)) in self._known:
            return
        self.compare(f"{action} at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})")
        self._known.add(place)

    def _wait(self, meeting: _Meeting, action: str) -> list[str]:
        rank = dist.get_rank()
        for patience_s in (min(_PATIENCE_S, self._timeout_s), self._timeout_s):
            if (different := meeting.wait(patience_s)) is not None:
                return different
            present = meeting.present()
            absent = ", ".join(f"{each}" for each in range(num_ranks()) if each not in present)
            text = f"Process {rank} {action} now, but process {absent} does not"
            if patience_s == self._timeout_s:
                break
            if present[0] == rank:
                warnings.warn(f"{text}, so far. {self._way_out}", stacklevel=2)
        raise RuntimeError(f"{text}. {self._way_out}")


# ------------------------------------------------------------------------------------------------
# The ranks that are missing when a collective fails; gloo reports only that its connection broke or timed out.
#
# [Note: answers] A process that leaves training with such an error reports it on the store and waits some seconds for
# the others' reports. A process that failed with an error of its own reports that error: the others failed in
# consequence. A process does not answer if it was killed, is busy elsewhere, or is behind a link that is cut. From the
# far side of a cut nobody can be asked: there it is the store's host that does not answer.

ANSWERS_WITHIN_S = 10.0
"""Others fail at the same moment or, where their own timeout has begun later, not much after it."""
_SIGNS = ("gloo/transport", "gloo::", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_ASK_EVERY_S = 0.1
_NOTED_WITHIN_S = 2.0
_MOST_CHARACTERS = 2000


class _Failures(Channel):
    """Lets process 0, which may hold the store, stay until the others know what it has failed with."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        super().__init__(group, name, "the end of the failed run")


def report_missing_ranks(error: BaseException, run: str, failure: str = "") -> None:
    """Add to the text of ``error`` which processes are missing, if it comes from a collective that lost one.

    Any other error is noted on the store for the processes that fail in consequence, and ends the waits of those that
    are in a collective of this run.

    Args:
        error: Ends training on this process.
        run: Names this run of training: the same on all processes, and another one in each run.
        failure: Says where the error was raised and what it is, for the other processes; default: what it is.
    """
    group, watch = live_group(), watch_of_live_group()
    if not run or group is None or group.size() == 1 or is_planned():
        return
    has_cause = not is_cause(error)
    text = "" if has_cause else f"process {group.rank()} {failure or f'failed with {text_of(error)}'}"
    verdict = found_deadlock() if has_cause else None
    if watch is not None:
        watch.runs.discard(run)
    _in_time(_note_failure, text[:_MOST_CHARACTERS], run, watch, group)
    if has_cause and (verdict is None or verdict not in str(error)):  # a wait on the store ends with it
        where = f"Process {group.rank()} on {socket.gethostname()} could not communicate with the others,"
        sentence = verdict or f"{where} {missing_ranks(run)}"
        if verdict is not None and _has_sign(error):  # of a connection that was shut down for it
            error.args = (verdict,)
        elif len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]}\n{sentence}",)  # str(error), which loggers print, then ends with it
        else:
            add_note(error, sentence)
    _in_time(lambda: _Failures.of(group, "failures").finish_use())


def add_note(error: BaseException, sentence: str) -> None:
    """Show a sentence below the traceback of ``error``; in the log before Python 3.11."""
    if sys.version_info >= (3, 11):
        error.add_note(sentence)
    else:
        _log.error(sentence)


def missing_ranks(run: str) -> str:
    """Ask which other processes of a run have failed, and return a sentence about those that do not answer."""
    everyone, heard, reached = set(range(dist.get_world_size())), dict[int, str](), threading.Event()
    arguments = (f"{run}/failed", dist.get_rank(), everyone, heard, reached)
    asking = threading.Thread(target=_ask, args=arguments, daemon=True)  # a cut link may hold it forever
    asking.start()
    asking.join(ANSWERS_WITHIN_S + 1)
    if not reached.is_set():
        where = f"{os.environ.get('MASTER_ADDR', 'the host of process 0')}:{os.environ.get('MASTER_PORT', '')}"
        return (
            f"nor does the store at {where.rstrip(':')}, which process 0 or its torchrun agent holds: process 0 has "
            "ended, or its host is unreachable."
        )
    if failed := {rank: text for rank, text in sorted(heard.items()) if text}:
        return f"because {'; '.join(failed.values())}"
    missing = sorted(everyone - heard.keys())  # the group may be gone by now: Ray ends it from another thread
    if not missing:
        return "but all of them answer: they wait for each other, or the timeout is too short."
    return (
        f"and {name_processes(missing)} did not answer within {ANSWERS_WITHIN_S:g} s: they ended, are unreachable, or "
        "are busy."
    )


def is_cause(error: BaseException) -> bool:
    """Return whether ``error`` has not come from what another process did."""
    watch = watch_of_live_group()
    if watch is not None and watch.verdict is not None and watch.verdict in str(error):
        return False
    return not _is_of_connection(error)


def _is_of_connection(error: BaseException | None) -> bool:
    """Return whether ``error``, or its cause, says that another process did not take part in a collective."""
    while error is not None:
        if isinstance(error, (dist.DistError, DeadlockError)) or _has_sign(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_sign(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _ask(prefix: str, rank: int, everyone: set[int], heard: dict[int, str], reached: threading.Event) -> None:
    """Fill ``heard`` with the error of each process that has failed; empty where it is a consequence of another's."""
    try:
        store = group_store(prefix)
        store.set(f"{rank}", "")
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        while heard.keys() != everyone and not any(heard.values()) and time.monotonic() < deadline:
            for other in everyone - heard.keys():
                if store.check([f"{other}"]):
                    heard[other] = store.get(f"{other}").decode()
                reached.set()
            time.sleep(_ASK_EVERY_S)
    except (RuntimeError, ValueError):  # the store is gone, or the group
        return


def _note_failure(text: str, run: str, watch: DeadlockWatch | None, group: dist.ProcessGroup) -> None:
    _Failures.of(group, "failures").num_uses += bool(text) or group.rank() != 0  # process 0 waits for those it ends
    if text:
        group_store(f"{run}/failed").set(f"{group.rank()}", text)
    if watch is not None:
        watch.publish_failure(run, text and f"{text[0].upper()}{text[1:]}")


def _in_time(action: Callable[..., None], *args: Any) -> None:
    """Do what needs the store, without waiting for it longer than it takes: a cut link may hold it forever."""

    def act() -> None:
        with suppress(RuntimeError, ValueError):  # the store is gone, or the group
            action(*args)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(_NOTED_WITHIN_S)
