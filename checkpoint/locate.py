"""Finds the checkpoint folder to read: the registry of formats, the one candidate, the newest of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .files import CheckpointError, brief, listed
from .formats.base import AVERAGED_WEIGHTS, CheckpointInfo, Format, is_optimizer_key
from .formats.dcp import DCPAveragesFormat, DCPFormat, DCPSafetensorsFormat
from .formats.torch_save import read_torch_file
from .formats.zero import ZeROFormat
from .storage import source_path

# ------------------------------------------------------------------------------------------------
# All readable checkpoint formats. Finding, merging, comparing and describing use this list alone.
#
# A new format is a file in `formats`, with a subclass of `Format`, and a line in `FORMATS`.


FORMATS: tuple[Format, ...] = (
    DCPFormat(),
    DCPSafetensorsFormat(),
    ZeROFormat(),
)
"""In the order in which a folder is tried."""


def detect(folder: Path) -> Format | None:
    """Return the format of the checkpoint in ``folder``; None if there is none in it."""
    return next((one for one in FORMATS if one.detect(folder)), None)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint's place and its format."""

    folder: Path
    format: Format


Weights = Literal["model", "ema"]
"""The choice of a checkpoint's weights: the model's, or the averages that ``ShardedEMA`` has added."""


def find_checkpoint(checkpoint_dir: str | os.PathLike[str], weights: Weights = "model") -> FoundCheckpoint:
    """Return the checkpoint that ``checkpoint_dir`` is or holds: a DCP folder, DeepSpeed's tag folder and so on.

    Args:
        checkpoint_dir: The folder, or the one above it.
        weights: Which weights the format is to read.

    Raises:
        CheckpointError: If there is none, or more than one that may be meant, or it has no averages.
        ValueError: If there are no such weights.
    """
    if weights not in ("model", "ema"):
        raise ValueError(f"weights must be 'model' or 'ema', got {weights!r}.")
    found = _find(checkpoint_dir)
    if weights == "model":
        return found
    for folder in (found.folder, found.folder.parent):  # DeepSpeed's tag folder is inside
        if (own := detect(folder / AVERAGED_WEIGHTS)) is not None:
            return FoundCheckpoint(folder / AVERAGED_WEIGHTS, own)
    if type(found.format) is DCPFormat:
        return FoundCheckpoint(found.folder, DCPAveragesFormat())
    raise CheckpointError(
        f"{found.folder} holds no averages: it was saved without ShardedEMA, or before its first update."
    )


def _find(checkpoint_dir: str | os.PathLike[str]) -> FoundCheckpoint:
    folder = source_path(checkpoint_dir)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        hint = _hint_at_merged(folder.parent, folder.name)
        raise CheckpointError(f"{folder} {what}, expected a folder with a .metadata file.{hint}")
    if (found := _in(folder)) is not None:
        return found
    inside = _checkpoints_inside(folder)
    models = [one for one in inside if not is_optimizer_key(one.folder.name)]
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(one.folder.name for one in models)
        raise CheckpointError(f"{folder} holds several checkpoints: {names}. Pass one of these folders.")
    if inside:
        names = ", ".join(one.folder.name for one in inside)
        raise CheckpointError(f"{folder} holds only optimizer state ({names}). To merge it, pass its folder.")
    raise CheckpointError(_why_none(folder))


def _in(folder: Path) -> FoundCheckpoint | None:
    """Return the checkpoint that a folder is, by its own files; None where it is none."""
    if (detected := detect(folder)) is not None:
        return FoundCheckpoint(folder, detected)
    named = ((one.named_inside(folder), one) for one in FORMATS)
    return next((FoundCheckpoint(path, one) for path, one in named if path is not None), None)


def _checkpoints_inside(folder: Path) -> list[FoundCheckpoint]:
    found: list[FoundCheckpoint] = []
    for path in sorted(folder.iterdir()):
        try:
            detected = detect(path) if path.is_dir() else None
        except OSError:  # not readable for us: not a checkpoint to merge
            continue
        if detected is not None:
            found.append(FoundCheckpoint(path, detected))
    return found


def _why_none(folder: Path) -> str:
    for one in FORMATS:
        if (reason := one.why_unreadable(folder)) is not None:
            return f"{folder} {reason}"
    signs = ", nor ".join(sign for one in FORMATS for sign in one.signs)
    hint = next((hint for name in _MERGED_NAMES if (hint := _hint_at_merged(folder, name))), "")
    names = sorted(path.name for path in folder.iterdir())
    hint = hint or f" It holds {listed(names, 5) or 'nothing'}."
    return f"No checkpoint in {folder}: neither {signs}.{hint}"


_MERGED_NAMES = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
"""The second is what DeepSpeed's ``save_16bit_model`` writes, too; the third is Accelerate's FULL_STATE_DICT."""


def _hint_at_merged(folder: Path, name: str) -> str:
    """Return advice for weights that are in one file already, or nothing."""
    path = folder / name
    if not path.is_file() or path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        return ""
    if path.suffix == ".safetensors":
        return f" {name} holds full weights in one file: there are no shards to merge or inspect."
    return (
        f" {name} is one file: there are no shards to merge or inspect. torch.load(..., weights_only=True) reads it, "
        f"and safetensors.torch.save_file saves its weights as safetensors."
    )


# ------------------------------------------------------------------------------------------------
# Describes a sharded checkpoint from its metadata alone: reads no tensor, imports no torch.


def inspect_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> CheckpointInfo:
    """Describe a sharded checkpoint.

    Args:
        checkpoint_dir: As for `merge_fsdp_weights`: the folder, or the one above it.
        storage_options: Of the file system behind URLs (``endpoint_url``), see fsspec; by default from the environment.

    Raises:
        CheckpointError: If the description is damaged, no model can be identified in it, or a file that it names is
            missing or too short. Whether the bytes in the files make sense is left to the merge.
    """
    found = find_checkpoint(source_path(checkpoint_dir, storage_options))
    return found.format.describe(found.folder)


# ------------------------------------------------------------------------------------------------
# Finds the newest checkpoint in a folder that training can resume from, by the checkpoints' contents.


_FILE_SUFFIX = ".ckpt"


@dataclass(frozen=True)
class NewestCheckpoint:
    """Result of `find_newest`."""

    path: Path | None
    """None where the folder has none, or is not there."""
    global_step: int | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    """Name of what looks like a checkpoint and cannot be resumed from, with the reason."""


def find_newest(folder: str | os.PathLike[str]) -> NewestCheckpoint:
    """Return the whole checkpoint with the most steps directly inside ``folder``.

    Looked at are folders, and files called ``*.ckpt``; not what begins with a dot, as unfinished saves do. A checkpoint
    is whole if its description can be read and all files that this names are as long as it says; the tensors' bytes are
    not read. It must hold optimizer state. Of two with the same step, the one of the later epoch or, if that is the
    same, of the later modification (in an object store, of the later name) counts.

    Args:
        folder: Such as ``ModelCheckpoint(dirpath)``.
    """
    place = source_path(folder)
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
        CheckpointError: If the checkpoint is not whole, or not one to continue from.
    """
    if path.is_dir():
        if (found := _in(path)) is None:
            raise CheckpointError(_why_none(path))
        info = found.format.describe(found.folder)
        has_optimizer, step, epoch = info.has_optimizer, info.global_step, info.epoch
    else:
        content = read_torch_file(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: expected a dict, found {brief(type(content).__name__)}.")
        step, epoch = content.get("global_step"), content.get("epoch")
        has_optimizer = "optimizer_states" in content
    if type(step) is not int or type(epoch) is not int:
        raise CheckpointError(f"{path}: does not record its step; the Trainer's checkpoints do.")
    if not has_optimizer:
        raise CheckpointError(f"{path}: holds only weights, without optimizer state.")
    return step, epoch
