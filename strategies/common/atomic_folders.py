"""Giving a finished checkpoint the name of an older one, with no moment at which the name means half of one."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from .own_files import files_of_others, is_checkpoint, remove_own

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux, renameat2
_RENAME_SWAP = 2  # macOS, renamex_np
_LEFT = re.compile(r"(unfinished|removed)(-[0-9a-f]+)?")


def replace(path: Path, finished: Path) -> None:
    """Rename ``finished``, a folder or a file, to ``path`` and remove what stood there.

    Where the system can exchange two names in one step (Linux and macOS on their usual file systems), ``path`` is at
    every moment either the old one or the new one. Elsewhere there is an instant between two renames in which an old
    folder is called ``.NAME.old``; a file replaces a file in one step everywhere.
    """
    _sync(finished)
    if not os.path.lexists(path):
        finished.rename(path)
    elif finished.is_file() and (path.is_symlink() or not path.is_dir()):
        os.replace(finished, path)
    elif _exchange(path, finished):
        _remove(finished)  # the old one, by now
    else:
        old = path.with_name(f".{path.name}.old")
        _remove(old)
        path.rename(old)
        try:
            finished.rename(path)
        except BaseException:
            old.rename(path)
            raise
        _remove(old)
    _sync_entry(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a checkpoint's folder so that its name never means a part of it; what others put into it stays."""
    if is_checkpoint(path) and files_of_others(path):
        remove_own(path)
        return
    hidden = path.with_name(f".{path.name}.removed")
    _remove(hidden)  # left by a killed run
    path.rename(hidden)
    shutil.rmtree(hidden)


def unfinished_name(path: Path, number: str = "") -> Path:
    """Return where a checkpoint is written until it is complete.

    Args:
        path: The name that it gets.
        number: Hexadecimal digits that tell it from others of this name.
    """
    return path.with_name(f".{path.name}.unfinished{number and f'-{number}'}")


def remove_unfinished(path: Path) -> None:
    """Remove whatever is there of checkpoints that were to get this name, by whichever run.

    Other processes may be writing there: each folder gets another name first, in one step. Whoever knows it by its old
    one can create nothing in it any more, and cannot give it the checkpoint's name.
    """
    if not path.parent.is_dir():
        return
    prefix = f".{path.name}."
    for entry in os.listdir(path.parent):
        if entry.startswith(prefix) and _LEFT.fullmatch(entry.removeprefix(prefix)):
            _remove_at_once(path.with_name(entry), path)


def drop_written_folder(left: Path, path: Path) -> None:
    """Remove what a failed save of ``path`` has written into ``left``, as `drop_unfinished`; others may still write."""
    with suppress(OSError):
        _remove_at_once(left, path)


def _remove_at_once(left: Path, path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed-{secrets.token_hex(8)}")
    try:
        left.rename(hidden)
    except FileNotFoundError:  # somebody else was faster, or it is finished
        return
    with suppress(OSError):  # NFS keeps what is open somewhere; the next save tries again
        _remove(hidden)


def drop_unfinished(path: Path) -> None:
    """Remove what a failed save has written, as far as possible: the error that it failed with is told, not another."""
    with suppress(OSError):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
