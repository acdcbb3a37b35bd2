"""Open files and complete reads and writes."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from pathlib import Path

from .errors import CheckpointError

BLOCK_BYTES = 512 * 1024
"""Measured best between 256 KB and 1 MB: larger buffers fall out of the processor's cache."""


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def is_regular(path: Path) -> bool:
    """Return whether there is a regular file; False where there is nothing.

    Raises:
        CheckpointError: If there is something else, or a link that leads to nothing.
    """
    if not os.path.lexists(path):
        return False
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is a link to nothing, where a file is wanted.") from None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"{path} is {kind}, where a file is wanted. Was the checkpoint copied as it was?")
    return True


def open_regular(path: Path) -> int:
    """Return a descriptor for reading a regular file.

    Raises:
        CheckpointError: If it is something else; a FIFO is not waited for.
        OSError: If it is not there, or may not be read.
    """
    is_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)  # it has become something else in between
    raise CheckpointError(f"{path} is no regular file, and a file is wanted.")


def open_limited(path: Path, max_bytes: int, wanted: str) -> int:
    """Return a descriptor for reading a regular file that is not too large.

    Args:
        path: The file.
        max_bytes: What it may have at most.
        wanted: What it should be, for the error.

    Raises:
        CheckpointError: If it is larger, or no regular file.
    """
    fd = open_regular(path)
    size = os.fstat(fd).st_size
    if size > max_bytes:
        os.close(fd)
        raise CheckpointError(f"{path} has {size} bytes, more than the {max_bytes} that {wanted} may have.")
    return fd


def read_regular(path: Path, max_bytes: int, wanted: str) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        max_bytes: What it may have at most.
        wanted: What it should be, for the error.

    Raises:
        CheckpointError: If it is larger, or no regular file.
    """
    with os.fdopen(open_limited(path, max_bytes, wanted), "rb") as stream:
        return stream.read()


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
            fd = self._open[path] = open_regular(path)
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
