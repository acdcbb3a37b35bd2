"""Saving weights and optimizer state of a sharded model: one path for both FSDP versions.

Names are the plain parameter names, as in ``torch.distributed.checkpoint.state_dict``, and shards are boxes of full
tensors; that is what lets a checkpoint move between FSDP1, FSDP2, any number of processes, and plain PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....checkpoint.disk_space import telling_full_disk
from ....checkpoint.formats.dcp.metadata import METADATA_NAME
from ..config.settings import FullState
from ..units.model_state_dicts import model_state_dict
from .flat_state import flat_model_state, has_flat_state
from .state_dicts import put_where, state_dict_options, without_torch_noise

METADATA_FILE = "meta.pt"
"""Everything beside weights and optimizer state, in a sharded checkpoint; Lightning's name for it."""


@without_torch_noise()
def model_state(module: nn.Module, full: FullState | None, device: torch.device) -> dict[str, Any]:
    """Return the weights: shards (``full`` is None), or full tensors where it says, as a rule on rank 0 alone."""
    if full is None and has_flat_state(module):
        return flat_model_state(module)
    state = model_state_dict(module, state_dict_options(full, device))
    return state if full is None else put_where(state, full)


def write_metadata(folder: Path, metadata: bytes) -> None:
    """Write the file for everything beside weights and optimizer state."""
    path = folder / METADATA_FILE
    with telling_full_disk(path, len(metadata)):
        path.write_bytes(metadata)


def sharded_state(
    model_key: str, weights: dict[str, Any], optimizer_states: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Put together what DCP saves; Lightning's names."""
    return {model_key: weights, **{f"optimizer_{index}": state for index, state in enumerate(optimizer_states)}}


def is_sharded(path: Path) -> bool:
    """Return whether ``path`` is a folder that DCP wrote."""
    return os.path.lexists(path / METADATA_NAME)
