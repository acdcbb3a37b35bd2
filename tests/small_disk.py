"""A real file system that is soon full."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_PAGE = 4096


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system of that size in memory; skip the test where that is not allowed."""
    with mounted_by(["-t", "tmpfs", "-o", f"size={num_bytes}", "accelight"], folder, "small file system"):
        yield folder


@contextmanager
def mounted_by(arguments: Sequence[str], folder: Path, what: str) -> Iterator[None]:
    """Mount at a new folder with these arguments; skip the test where that is not allowed."""
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no {what} can be mounted here: {error}")
    if mounted.returncode:
        pytest.skip(f"no {what} can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
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
