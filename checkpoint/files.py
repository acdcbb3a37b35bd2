"""Open files and complete reads and writes."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from .errors import CheckpointError

BLOCK_BYTES = 512 * 1024
"""Measured best between 256 KB and 1 MB: larger buffers fall out of the processor's cache."""


class FilePool:
    """Files open for reading, at most ``limit`` at a time; the least recently used is closed first. Not thread-safe."""

    def __init__(self, limit: int = 32):
        self._limit = limit
        self._open: OrderedDict[Path, int] = OrderedDict()

    def fd(self, path: Path) -> int:
        """Return a descriptor, valid until ``limit`` other files were asked for."""
        fd = self._open.get(path)
        if fd is None:
            if len(self._open) >= self._limit:
                os.close(self._open.popitem(last=False)[1])
            fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self._open.move_to_end(path)
        return fd

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])


def read_exactly(fd: int, path: Path, vectors: list[memoryview], position: int, num_bytes: int) -> None:
    """Read ``num_bytes`` into ``vectors``; an end of file in between is an error, not a short result."""
    got = os.preadv(fd, vectors, position)
    if got == num_bytes:
        return
    for vector in vectors:  # rare (a signal, a network file system): vector by vector, until all is there
        filled = 0
        while filled < len(vector):
            step = os.preadv(fd, [vector[filled:]], position)
            if not step:
                raise CheckpointError(f"{path} became shorter while it was read: nothing is left at byte {position}.")
            filled += step
            position += step


def write_exactly(fd: int, view: memoryview, position: int) -> None:
    """Write all of ``view``."""
    while len(view):
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written
