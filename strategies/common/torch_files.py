"""Files of ``torch.save``, written so that a full disk is told as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...checkpoint.disk_space import telling_full_disk
from ..upstream.torch_core import tree_leaves


def save_torch(content: Any, path: Path) -> None:
    """Write what ``torch.save`` makes of ``content``.

    Raises:
        OSError: If it cannot be written, with the path.
    """
    # To a stream: where torch opens the file itself, the system's error is lost.
    with telling_full_disk(path, num_bytes_of(content)), path.open("wb") as stream:
        torch.save(content, stream)


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
