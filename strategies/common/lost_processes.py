"""Which process it was when a collective fails because one does not take part: gloo says only that it has waited.

[Note: who answers] A process that leaves training with such an error says so on the store, and looks for some seconds
whether the others do. One that failed with an error of its own says which: the others failed in consequence. One that
was killed does not answer, nor one behind a link that is cut, or that is busy elsewhere. On the store's far side of a
cut nobody can be asked: then it is the store's host that does not answer.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field

import torch.distributed as dist

from ...state.deadlocks import found_deadlock
from ...state.process_group import group_store
from ..upstream.torch_fake import is_planned

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
