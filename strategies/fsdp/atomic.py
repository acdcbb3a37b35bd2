"""Giving a finished folder the name of an older one, with no moment at which the name means half a checkpoint."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux, renameat2
_RENAME_SWAP = 2  # macOS, renamex_np


def replace_folder(path: Path, finished: Path) -> None:
    """Rename ``finished`` to ``path`` and remove what stood there.

    Where the system can exchange two names in one step (Linux and macOS on their usual file systems), ``path`` is at
    every moment either the old folder or the new one. Elsewhere there is an instant between two renames in which the
    old one is called ``.NAME.old``.
    """
    _sync(finished)
    if path.is_symlink() or path.is_file():
        path.unlink()
    if not path.exists():
        finished.rename(path)
    elif _exchange(path, finished):
        shutil.rmtree(finished)  # the old one, by now
    else:
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        finished.rename(path)
        shutil.rmtree(old)
    _sync_entry(path.parent)


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            _sync_entry(file)
    _sync_entry(folder)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system cannot.

    Raises:
        OSError: If it can, and fails.
    """
    library = ctypes.CDLL(None, use_errno=True)
    a, b = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        failed = library.renamex_np(a, b, _RENAME_SWAP)
    elif hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, a, _AT_FDCWD, b, _RENAME_EXCHANGE)
    else:
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # an old kernel, or a file system without it
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
