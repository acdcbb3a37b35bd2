"""Files of ``torch.save``: written so that a full disk is told as one, read without a copy, each byte compared once."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...checkpoint.disk_space import telling_full_disk
from ...checkpoint.files import is_regular
from ...checkpoint.formats.torch_save.torch_file import check_bytes
from ..upstream.torch_core import tree_leaves
from .agreed_outcome import failing_together
from .checked_bytes import bytes_are_checked


def save_torch(content: Any, path: Path) -> None:
    """Write what ``torch.save`` makes of ``content``.

    Raises:
        OSError: If it cannot be written, with the path.
    """
    # To a stream: where torch opens the file itself, the system's error is lost.
    with telling_full_disk(path, num_bytes_of(content)), path.open("wb") as stream:
        torch.save(content, stream)


def read_torch(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return what a single-file checkpoint holds, mapped into memory and not read; every rank must call it.

    Args:
        path: The file.
        weights_only: As in ``torch.load``.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is a folder, no regular file, or not what torch writes.
        RuntimeError: On every rank, if it is damaged.
    """
    if not path.exists():
        # As Lightning begins it: scripts look for these words.
        raise FileNotFoundError(f"Checkpoint file not found: {path}. Give what trainer.save_checkpoint() wrote.")
    if path.is_dir():
        raise ValueError(
            f"{path}: a folder without `.metadata` is no sharded checkpoint, and no file either. "
            "Give ckpt_path what trainer.save_checkpoint() wrote."
        )
    is_regular(path)  # else an error
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is no checkpoint: what torch.save() writes is a zip file. Give ckpt_path what "
            "trainer.save_checkpoint() wrote; a file of torch before 1.6 becomes one by torch.save(torch.load(file))."
        )
    with failing_together(f"loading {path}"):
        if bytes_are_checked():
            check_bytes(path, (dist.get_rank(), dist.get_world_size()))
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)


def check_full(checkpoint: Mapping[str, Any], path: Path | str) -> None:
    """Check that a single-file checkpoint is one of Lightning's.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        held = sorted(checkpoint) if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        raise ValueError(
            f"{path}: no 'state_dict' in it, only {held}. Is it a Lightning checkpoint? Weights alone belong into the "
            "module before fit()."
        )


_RECORD_BYTES = 300  # what torch writes beside a tensor, about


def num_bytes_of(content: Any) -> int:
    """Return the size of a file with these nested containers, about; tensors that share memory count once."""
    storages: dict[object, int] = {}
    for leaf in tree_leaves(content):
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided:
            storages[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
        elif isinstance(leaf, torch.Tensor):
            storages[id(leaf)] = leaf.numel() * leaf.element_size()
    return sum(storages.values()) + _RECORD_BYTES * len(storages)
