"""A real file system that is soon full."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PAGE = 4096


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system of that size in memory; skip the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "accelight", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no small file system can be mounted here: {error}")
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path, num_left: int = _PAGE) -> None:
    """Write a file that leaves no more than ``num_left`` bytes on its disk."""
    with file.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(_PAGE))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        stream.truncate(max(os.path.getsize(file) - num_left, 0))
