"""Real file systems of a wanted kind, each in a file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.small_disk import mounted_by

_NUM_BYTES = 400 * 2**20  # mkfs.xfs takes no less than 300 MB; of the file only what is written takes room


@contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """Mount a new file system (``xfs``, ``btrfs``) at a folder; skip the test where that is not possible."""
    make = shutil.which(f"mkfs.{kind}", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if make is None or os.getuid() != 0:
        pytest.skip(f"no {kind} can be mounted here: " + ("no mkfs" if make is None else "only root may"))
    image = folder.with_name(f"{folder.name}.image")
    with image.open("wb") as stream:
        stream.truncate(_NUM_BYTES)
    try:
        done = subprocess.run([make, "-q", str(image)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no {kind} can be made here: {done.stderr.strip()}")
        with mounted_by(["-o", "loop", str(image)], folder, kind):
            yield folder
    finally:
        image.unlink()


def used_bytes(folder: Path) -> int:
    """Return how much of a file system is taken."""
    os.sync()
    state = os.statvfs(folder)
    return (state.f_blocks - state.f_bfree) * state.f_frsize
