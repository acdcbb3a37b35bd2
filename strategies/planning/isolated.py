"""Running in a process of its own: what torch and DeepSpeed remember of pretended processes ends with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


def in_a_fork(action: Callable[[], T], what: str) -> T:
    """Run ``action`` in a fork of this process, which has everything that this one has, and return its result.

    Args:
        action: Anything that can be called; its result is pickled.
        what: For errors.

    Raises:
        RuntimeError: If the fork ended without a result.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(action, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        told = ours.recv_bytes()
    except EOFError:
        process.join()
        raise RuntimeError(f"{what} ended with status {process.exitcode} and said nothing.") from None
    finally:
        ours.close()
    process.join()
    error, details, result = pickle.loads(told)
    if error is not None:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(details)
        raise error
    return result


def _run(action: Callable[[], T], connection: Connection) -> None:
    sys.stdout.flush()
    os.dup2(2, 1)  # what is printed meanwhile is no part of the result
    try:
        told = pickle.dumps((None, "", action()))
    except BaseException as error:  # noqa: BLE001 (raised again in the process that asked)
        details = traceback.format_exc()
        try:
            told = pickle.dumps((error, details, None))
            pickle.loads(told)
        except Exception:  # noqa: BLE001 (an exception that does not travel: its text does)
            told = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), details, None))
    connection.send_bytes(told)
    connection.close()
