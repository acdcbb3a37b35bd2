"""Paths of the files that a checkpoint names: they must be regular files inside its own folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError


def file_inside(folder: Path, relative: str, what: str) -> Path:
    """Return the real path of the file that a checkpoint in ``folder`` calls ``relative``.

    Raises:
        CheckpointError: If the name or a link leads out of the folder, or there is no regular file.
    """
    parts = PurePosixPath(relative).parts
    plain = relative == "/".join(parts)  # each file has one name, and is looked for once
    if not plain or not parts or parts[0] == "/" or ".." in parts or "\\" in relative or "\0" in relative:
        raise CheckpointError(f"{what} names the file {relative!r}, which is not a plain path inside {folder}.")
    try:
        os.fsencode(relative)
    except UnicodeEncodeError:
        raise CheckpointError(f"{what} names the file {relative!r}, a name that no file has here.") from None
    root = folder.resolve()
    try:
        path = root.joinpath(*parts).resolve()
    except RuntimeError:  # Python before 3.13 says so of links in a circle
        raise CheckpointError(f"{what} names the file {relative!r}, which is links in a circle.") from None
    if not path.is_relative_to(root):
        raise CheckpointError(f"{what} names the file {relative!r}, a link out of the checkpoint's folder to {path}.")
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise CheckpointError(
            f"{what} needs the file {relative!r}, not found in {folder} ({error.strerror}). "
            f"Were all processes' files copied here?"
        ) from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{what} names {relative!r}, which is not a regular file.")
    return path
