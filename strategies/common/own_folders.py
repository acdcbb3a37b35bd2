"""Checkpoints for nodes that share no disk: each process writes its part into a folder of its own.

Whoever asks for that puts the folders together, into one that a run is gone on from: no two hold a file of one name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_asked_for: ContextVar[bool] = ContextVar("accelight_own_folders", default=False)


@contextmanager
def in_own_folders() -> Iterator[None]:
    """Let checkpoints that are begun inside be written so; all processes must enter it, each saves to its own path.

    A checkpoint of one file is written to the path of process 0 alone, as always.
    """
    before = _is_asked_for.set(True)
    try:
        yield
    finally:
        _is_asked_for.reset(before)


def writes_own_folders() -> bool:
    """Return whether this thread is inside of `in_own_folders`."""
    return _is_asked_for.get()
