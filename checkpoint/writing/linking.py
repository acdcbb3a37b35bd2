"""Links instead of copies: the file system is asked to let two files share the same blocks (``FICLONERANGE``).

XFS and btrfs can, and some network file systems. Nothing is written but the output's list of blocks. Each file keeps
its content whatever becomes of the other: a block that is written to is copied first, and one is freed when no file has
it any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
from pathlib import Path

with contextlib.suppress(ImportError):  # Windows
    import fcntl

_RANGE = struct.Struct("=qQQQ")  # struct file_clone_range: source descriptor, source offset, length, target offset
_FICLONERANGE = 0x4020940D  # linux/fs.h; MIPS, POWER, SPARC and Alpha number it otherwise, and refuse this one
_REFUSED = {
    errno.EOPNOTSUPP,  # this file system cannot, as ext4 and tmpfs
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EXDEV,  # two file systems
    errno.EINVAL,  # larger blocks, or files of different kinds (btrfs without checksums)
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,  # a swap file
    errno.EAGAIN,  # ZFS, before the source is on the disk
    errno.ENOSPC,  # no room for the list of blocks: the copy tells it better
    errno.EDQUOT,
}


class Linker:
    """Links ranges of files, from any thread; a pair of files that was refused once is not asked about again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: set[tuple[Path, int]] = set()
        self.num_bytes = 0
        """Bytes that were linked."""

    def link(self, path: Path, source_fd: int, source: int, fd: int, target: int, num_bytes: int) -> bool:
        """Let a file share a range with another; False if the range must be copied.

        Args:
            path: Of the source.
            source_fd: Of the source, too.
            source: Where the range is there: whole blocks, as the others.
            fd: Of the target.
            target: Where the range will be there.
            num_bytes: Of the range.

        Raises:
            OSError: If the disk fails.
        """
        if sys.platform != "linux" or (path, fd) in self._refused:
            return False
        try:
            fcntl.ioctl(fd, _FICLONERANGE, _RANGE.pack(source_fd, source, num_bytes, target))
        except OSError as error:
            if error.errno not in _REFUSED:
                raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
            with self._lock:
                self._refused.add((path, fd))
            return False
        with self._lock:
            self.num_bytes += num_bytes
        return True
