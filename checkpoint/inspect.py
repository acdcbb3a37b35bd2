"""What a sharded checkpoint holds, told from its description alone: no tensor is read, torch is not imported."""

from __future__ import annotations

import os

from .formats.description import CheckpointInfo
from .locate import find_checkpoint


def inspect_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> CheckpointInfo:
    """Describe a sharded checkpoint.

    Args:
        checkpoint_dir: As for `merge_fsdp_weights`: the folder, or the one above it.

    Raises:
        CheckpointError: If the description is damaged, no model can be told in it, or a file that it names is missing
            or too short. Whether the bytes in the files make sense is left to the merge.
    """
    found = find_checkpoint(checkpoint_dir)
    return found.format.describe(found.folder)
