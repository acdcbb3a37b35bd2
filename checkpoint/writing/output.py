"""Checks of the output folder: what it may hold beside the files to be written."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import CheckpointError
from ..formats.index_file import read_weight_map
from .plan import Plan

RESULT_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What transformers' ``from_pretrained`` takes where several are there, first to last."""
_SHARD = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")


def check_destination(source: Path, output: Path, *, remove: bool) -> None:
    """Check an output folder against the checkpoint's.

    Raises:
        ValueError: If it is a file, is named like one, or would be removed together with the checkpoint.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_path is the folder to write into; {output} is a file.")
    if not output.exists() and output.suffix in (".safetensors", ".bin"):
        raise ValueError(
            f"output_path is the folder to write into, the file in it is called model.safetensors; got {output}. "
            f"Give its parent folder."
        )
    if remove and source.is_symlink():
        raise ValueError(f"remove_checkpoint_dir=True, but {source} is a link. Give the folder it points to.")
    if remove and output.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"remove_checkpoint_dir=True would remove the output with it: {output} is inside {source}. "
            f"Choose an output folder outside the checkpoint."
        )


def check_conflicts(output: Path, plan: Plan) -> None:
    """Check that nothing in the folder would be loaded instead of what is about to be written.

    Raises:
        ValueError: If so.
    """
    written = plan.index_name or plan.files[0].name
    for name in RESULT_NAMES[: RESULT_NAMES.index(written)]:
        if (output / name).exists():
            raise ValueError(
                f"{output} holds {name}, which loaders prefer to the {written} to be written. "
                f"Remove it, or choose another output folder."
            )


def stale_files(output: Path, plan: Plan) -> list[str]:
    """Return the shards of an earlier, differently split merge that the new index replaces."""
    if plan.index_name is None or not (output / plan.index_name).is_file():
        return []
    try:
        named = set(read_weight_map(output / plan.index_name).values())
    except CheckpointError:
        return []  # not an index: nothing can be said about its files
    new = {file.name for file in plan.files}
    return sorted(name for name in named if _SHARD.fullmatch(name) and name not in new)
