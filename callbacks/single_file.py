"""``python -m accelight.callbacks.single_file FILE FOLDER``: a single-file checkpoint as a sharded one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..checkpoint.files import CheckpointError
from ..checkpoint.formats.base import AVERAGED_WEIGHTS
from ..checkpoint.manifest import write_manifest

_KEY = "state_dict"


def unpack(file: Path, folder: Path) -> None:
    """Write the weights of a Lightning checkpoint, and averages, as a folder of torch.distributed.checkpoint with ties.

    Raises:
        CheckpointError: If the file holds no weights, or objects that are not loaded from files.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read without running code from it ({type(error).__name__}: {error}). "
            "Do not store your own objects in it (hyperparameters, on_save_checkpoint)."
        ) from error
    weights = checkpoint.get(_KEY) if isinstance(checkpoint, dict) else None
    if not weights:
        raise CheckpointError(f"{file} holds no weights under {_KEY!r}: it is not a Lightning checkpoint.")
    parts = {key: _tensors_in(checkpoint[key]) for key in (_KEY, AVERAGED_WEIGHTS) if key in checkpoint}
    ties = ties_of(parts[_KEY])
    kept = {key: {name: one for name, one in part.items() if name not in ties} for key, part in parts.items()}
    save(kept, storage_writer=FileSystemWriter(folder), no_dist=True)
    heads = {name.split(".", 1)[0] for name in weights}
    write_manifest(folder, model_prefix=_KEY, ties=ties, module_attribute=heads.pop() if len(heads) == 1 else "")


def _tensors_in(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a state dict; modules may have extra states of any kind beside them."""
    import torch

    return {name: one for name, one in weights.items() if isinstance(one, torch.Tensor)}


def ties_of(weights: dict[str, Any]) -> dict[str, str]:
    """Return alias to kept name of tensors that are one and the same memory."""
    kept: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.data_ptr() and kept.setdefault(place, name) != name:
            ties[name] = kept[place]
    return ties


def main() -> int:
    """Run the command; 0, or 1 with a line on stderr."""
    file, folder = map(Path, sys.argv[1:])
    try:
        unpack(file, folder)
    except (CheckpointError, OSError) as error:
        print(f"accelight: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
