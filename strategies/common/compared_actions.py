"""Ranks say what each is about to do, where doing different things would mix their values or end the processes.

They meet on the process group's store and not in a collective: a rank that does not come may be in a collective of the
user's meanwhile, which would be answered with ours.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ...state.ordering import DeadlockError, poll, shortest_pause
from ...state.process_group import group_store
from ..upstream.torch_fake import is_planned
from .agreed_outcome import run_on_rank_zero

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from ...state.upstream import Store

_PATIENCE = timedelta(seconds=30)
_LIBRARIES = ("accelight.state.", "accelight.strategies.", "torch.", "contextlib")
_COUNT = itertools.count()


class ComparedActions:
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
        way_out: As for `ComparedActions`.
        timeout: As there.
    """

    def __init__(self, way_out: str, timeout: timedelta) -> None:
        self._compared = ComparedActions(way_out, timeout)
        self._known: set[tuple[CodeType, int]] = set()

    def come(self, action: str) -> None:
        """Come to the line that has called the library or torch.

        Args:
            action: What this rank is about to do there.

        Raises:
            RuntimeError: If the others do something else, as `ComparedActions.compare`.
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
    told = "; ".join(f"process {rank} {action}" for rank, action in enumerate(actions))
    return f"Processes use different parts of the model at one time: {told}."


def _said(store: Store, rank: int) -> tuple[int, str]:
    """Return the number of a rank's last comparison, and what it said; 0 if it has said nothing."""
    key = f"said/{rank}"
    if not store.check([key]):
        return 0, ""
    count, action = json.loads(store.get(key))
    return count, action
