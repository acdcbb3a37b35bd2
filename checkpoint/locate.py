"""Finds the folder to merge from: the one given, or the one candidate inside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .formats import registry
from .formats.format import Format
from .formats.state_dict_keys import is_optimizer_key


@dataclass(frozen=True)
class FoundCheckpoint:
    """Where a checkpoint is, and what reads it."""

    folder: Path
    format: Format


def find_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> FoundCheckpoint:
    """Return the checkpoint that ``checkpoint_dir`` is or holds: a DCP folder, DeepSpeed's tag folder and so on.

    Raises:
        CheckpointError: If there is none, or more than one that may be meant.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        hint = _hint_at_merged(folder.parent, folder.name)
        raise CheckpointError(f"{folder} {found}; a folder with a .metadata file was looked for.{hint}")
    if (detected := registry.detect(folder)) is not None:
        return FoundCheckpoint(folder, detected)
    for one in registry.FORMATS:
        if (named := one.named_inside(folder)) is not None:
            return FoundCheckpoint(named, one)
    inside = _checkpoints_inside(folder)
    models = [one for one in inside if not is_optimizer_key(one.folder.name)]
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(one.folder.name for one in models)
        raise CheckpointError(f"{folder} holds several checkpoints: {names}. Give one of these folders.")
    if inside:
        names = ", ".join(one.folder.name for one in inside)
        raise CheckpointError(f"{folder} holds optimizer state alone ({names}). To merge that, give its folder.")
    raise CheckpointError(_why_none(folder))


def _checkpoints_inside(folder: Path) -> list[FoundCheckpoint]:
    found: list[FoundCheckpoint] = []
    for path in sorted(folder.iterdir()):
        try:
            detected = registry.detect(path) if path.is_dir() else None
        except OSError:  # not readable for us: not a checkpoint to merge
            continue
        if detected is not None:
            found.append(FoundCheckpoint(path, detected))
    return found


def _why_none(folder: Path) -> str:
    for one in registry.FORMATS:
        if (reason := one.why_unreadable(folder)) is not None:
            return f"{folder} {reason}"
    signs = ", nor ".join(sign for one in registry.FORMATS for sign in one.signs)
    hint = next((hint for name in _MERGED_NAMES if (hint := _hint_at_merged(folder, name))), "")
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:_NUM_LISTED]) + (f" and {len(names) - _NUM_LISTED} more" if names[_NUM_LISTED:] else "")
    hint = hint or f" It holds {shown or 'nothing'}."
    return f"No checkpoint in {folder}: neither {signs}.{hint}"


_MERGED_NAMES = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
"""The second is what DeepSpeed's ``save_16bit_model`` writes, too; the third is Accelerate's FULL_STATE_DICT."""
_NUM_LISTED = 5


def _hint_at_merged(folder: Path, name: str) -> str:
    """Return what to do with weights that are in one file already, or nothing."""
    path = folder / name
    if not path.is_file() or path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        return ""
    if path.suffix == ".safetensors":
        return f" {name} holds full weights in one file: there are no shards to merge or to inspect."
    return (
        f" {name} is one file: no shards to merge or to inspect. torch.load(..., weights_only=True) reads it, "
        f"and safetensors.torch.save_file saves its weights as safetensors."
    )
