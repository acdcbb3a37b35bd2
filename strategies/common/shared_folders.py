"""Whether all nodes see the folder into which each process writes its part of a checkpoint."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path

_PREFIX = ".accelight-shared-"
SEEN_WITHIN_S = 60.0
"""How long a node may go on without what another has made: NFS clients keep what they know of a folder for so long."""
_PAUSE_S = 0.2


def mark(folder: Path) -> str:
    """Leave a file in ``folder`` for the other processes to look for; return its name, which no file had before."""
    name = f"{_PREFIX}{uuid.uuid4().hex}-{socket.gethostname()}"
    (folder / name).touch()
    return name


def check_mark(folder: Path, name: str) -> None:
    """Return when this process sees what another one has left with `mark`.

    Args:
        folder: Of the same path on all nodes.
        name: Result of `mark`.

    Raises:
        RuntimeError: If it does not see it for a minute: ``folder`` lies on a disk of the other node's own.
    """
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            made_by = name.removeprefix(_PREFIX).partition("-")[2]
            raise RuntimeError(
                f"{folder}, made on {made_by}, is not there on {socket.gethostname()}: each process writes its part of "
                "a checkpoint, into one folder. Save to a file system that all nodes share (NFS, Lustre), under the "
                "same absolute path; or save in one file, with state_dict_type='full_state_dict'."
            )
        with contextlib.suppress(OSError):
            os.listdir(folder)  # lets an NFS client ask its server again
        time.sleep(_PAUSE_S)
