"""Finds the folder to merge from: the one given, or the one candidate inside it."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import CheckpointError
from .formats.dcp.metadata import METADATA_NAME
from .formats.dcp.reader import is_optimizer_key
from .formats.dcp.safetensors_format import SHARD_PATTERN, has_safetensors_shards
from .formats.zero.files import has_zero_files, latest_tag


def find_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """Return the DCP folder, or DeepSpeed's tag folder, that ``checkpoint_dir`` is or holds.

    Raises:
        CheckpointError: If there is none, or more than one that may be meant.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        hint = _whole(folder.parent, folder.name)
        raise CheckpointError(f"{folder} {found}; a folder with a {METADATA_NAME} file was looked for.{hint}")
    if (folder / METADATA_NAME).is_file() or has_safetensors_shards(folder):
        return folder
    if has_zero_files(folder):
        return folder
    if (tag := latest_tag(folder)) is not None:
        return tag
    found_inside = (*folder.glob(f"*/{METADATA_NAME}"), *folder.glob(f"*/{SHARD_PATTERN}"))
    inside = sorted(
        {path.parent for path in found_inside if path.is_file()}
        | {path for path in folder.iterdir() if path.is_dir() and has_zero_files(path)}
    )
    models = [path for path in inside if not is_optimizer_key(path.name)]
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(path.name for path in models)
        raise CheckpointError(f"{folder} holds several checkpoints: {names}. Give one of these folders.")
    if inside:
        names = ", ".join(path.name for path in inside)
        raise CheckpointError(f"{folder} holds optimizer state alone ({names}). To merge that, give its folder.")
    if any(folder.glob(f"__*{METADATA_NAME}")):
        raise CheckpointError(
            f"{folder} was saved without coordination (__0_{METADATA_NAME} and so on, one a process). "
            f"Save it with use_collectives=True to merge it."
        )
    raise CheckpointError(
        f"No checkpoint in {folder}: neither {METADATA_NAME} (torch.distributed.checkpoint; Lightning's and "
        f"accelight's folders), nor {SHARD_PATTERN} (its safetensors format), nor a folder such as "
        f"pytorch_model_fsdp_0/{METADATA_NAME} (Accelerate), nor DeepSpeed's *_states.pt files, nor its file 'latest'."
        f"{next((hint for name in _WHOLE if (hint := _whole(folder, name))), '')}"
    )


_WHOLE = ("model.safetensors", "pytorch_model.bin")  # the second is what DeepSpeed's save_16bit_model writes, too


def _whole(folder: Path, name: str) -> str:
    """Return what to do with weights that are in one file already, or nothing."""
    path = folder / name
    if not path.is_file() or path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        return ""
    if path.suffix == ".safetensors":
        return f" {name} holds whole weights: nothing is left to merge."
    return (
        f" {name} is one file, not shards: nothing is left to merge. To have its weights as safetensors, load it with "
        f"torch.load(..., weights_only=True) and save them with safetensors.torch.save_file."
    )
