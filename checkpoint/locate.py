"""Finds the folder to merge from: the one given, or the one candidate inside it."""

from __future__ import annotations

import os
from pathlib import Path

from .dcp import is_optimizer_key
from .dcp_metadata import METADATA_NAME
from .dcp_safetensors import SHARD_PATTERN, has_safetensors_shards
from .errors import CheckpointError


def find_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """Return the DCP folder that ``checkpoint_dir`` is or holds.

    Raises:
        CheckpointError: If there is none, or more than one that may be meant.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {found}; a folder with a {METADATA_NAME} file was looked for.")
    if (folder / METADATA_NAME).is_file() or has_safetensors_shards(folder):
        return folder
    found_inside = (*folder.glob(f"*/{METADATA_NAME}"), *folder.glob(f"*/{SHARD_PATTERN}"))
    inside = sorted({path.parent for path in found_inside if path.is_file()})
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
        f"pytorch_model_fsdp_0/{METADATA_NAME} (Accelerate)."
    )
