"""The newest checkpoint of a folder that training can go on from, told by what the checkpoints themselves say."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from .errors import CheckpointError, brief
from .formats.torch_save.torch_file import read_torch_file
from .inspect import inspect_checkpoint

_FILE_SUFFIX = ".ckpt"


@dataclass(frozen=True)
class NewestCheckpoint:
    """Result of `find_newest`."""

    path: Path | None
    """None where the folder has none, or is not there."""
    global_step: int | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    """Name of what looks like a checkpoint and cannot be gone on from, with the reason."""


def find_newest(folder: str | os.PathLike[str]) -> NewestCheckpoint:
    """Return the whole checkpoint with the most steps directly inside ``folder``.

    Looked at are folders, and files called ``*.ckpt``; not what begins with a dot, as unfinished saves do. A checkpoint
    is whole if its description can be read and all files that this names are as long as it says; the tensors' bytes are
    not read. It must hold optimizer state. Of two with the same step, the one of the later epoch or, if that is the
    same, of the later modification counts.

    Args:
        folder: Such as ``ModelCheckpoint(dirpath)``.
    """
    place = Path(folder)
    found: list[tuple[int, int, float, Path]] = []
    passed_over: dict[str, str] = {}
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        if path.name.startswith(".") or not (path.is_dir() or path.suffix == _FILE_SUFFIX):
            continue
        try:
            step, epoch = _progress(path)
            found.append((step, epoch, path.stat().st_mtime, path))
        except (CheckpointError, OSError) as error:
            passed_over[path.name] = str(error)
    if not found:
        return NewestCheckpoint(None, None, passed_over)
    step, _, _, path = max(found)
    return NewestCheckpoint(path, step, passed_over)


def _progress(path: Path) -> tuple[int, int]:
    """Return global step and epoch.

    Raises:
        CheckpointError: If the checkpoint is not whole, or not one to go on from.
    """
    if path.is_dir():
        info = inspect_checkpoint(path)
        has_optimizer, step, epoch = info.has_optimizer, info.global_step, info.epoch
    else:
        content = read_torch_file(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: should hold a dict, found {brief(type(content).__name__)}.")
        step, epoch = content.get("global_step"), content.get("epoch")
        has_optimizer = "optimizer_states" in content
    if type(step) is not int or type(epoch) is not int:
        raise CheckpointError(f"{path}: does not say how many steps it is of; the Trainer's checkpoints do.")
    if not has_optimizer:
        raise CheckpointError(f"{path}: holds weights alone, without optimizer state.")
    return step, epoch
