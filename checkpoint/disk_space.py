"""A full disk, told as one: the path, how much was to be written, and how much room there was."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .report import human_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMBER = re.compile(r"\(os error (\d+)\)")  # safetensors has the system's errors as text


@contextmanager
def telling_full_disk(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Let the body write a file or folder; if the disk is full, the error says so.

    torch 2.13 reports such a write as an unexpected position in its zip, with the system's own error behind it.

    Args:
        path: What is written.
        num_bytes: How much is to be written in all, where that is known.

    Raises:
        OSError: With the path, in the place of whatever the full disk made the body raise. One that names a path
            already stays as it is.
    """
    try:
        yield
    except Exception as error:
        number = _number_behind(error)
        if number is None or (isinstance(error, OSError) and error.filename is not None):
            raise
        raise OSError(number, _described(number, path, num_bytes), str(path)) from error


def _number_behind(error: BaseException) -> int | None:
    """Return the number of the system's error that an exception stands for, if it is that of a full disk."""
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return None
        number = link.errno if isinstance(link, OSError) else None
        if number is None and (found := _NUMBER.search(str(link))):
            number = int(found[1])
        if number in _FULL:
            return number
        link = link.__cause__ or link.__context__
    return None


def _described(number: int, path: Path, num_bytes: int | None) -> str:
    wanted = "" if num_bytes is None else f" about {human_bytes(num_bytes)} were to be written, and"
    if number != errno.ENOSPC:
        return f"{os.strerror(number)}:{wanted} a quota or a limit of this process allows less"
    return f"{os.strerror(number)}:{wanted} there was room for {human_bytes(_room(path))}"


def _room(path: Path) -> int:
    """Return how many bytes the disk had before what is there of ``path`` was written."""
    place = path
    while not place.exists():
        place = place.parent
    files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path] if place == path else []
    return shutil.disk_usage(place).free + sum(one.stat().st_blocks * 512 for one in files)
