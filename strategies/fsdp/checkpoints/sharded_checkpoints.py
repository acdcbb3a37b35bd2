"""Saving weights and optimizer state of a sharded model: one path for both FSDP versions.

Everything goes through ``torch.distributed.checkpoint.state_dict``, whose names are the plain parameter names; that is
what lets a checkpoint move between FSDP1, FSDP2, any number of processes, and plain PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)

from ....checkpoint.disk_space import telling_full_disk
from ....checkpoint.formats.dcp.metadata import METADATA_NAME
from ..config.settings import FullState
from .state_dicts import put_where, state_dict_options, without_torch_noise

METADATA_FILE = "meta.pt"
"""Everything beside weights and optimizer state, in a sharded checkpoint; Lightning's name for it."""


@without_torch_noise()
def model_state(module: nn.Module, full: FullState | None, device: torch.device) -> dict[str, Any]:
    """Return the weights: DTensors (``full`` is None), or full tensors where it says, as a rule on rank 0 alone."""
    state = get_model_state_dict(module, options=state_dict_options(full, device))
    return state if full is None else put_where(state, full)


def write_metadata(folder: Path, metadata: bytes) -> None:
    """Write the file for everything beside weights and optimizer state."""
    path = folder / METADATA_FILE
    with telling_full_disk(path, len(metadata)):
        path.write_bytes(metadata)


@contextmanager
def naming_ranks(what: str) -> Iterator[None]:
    """Turn DCP's report of failed ranks, which is no ``Exception``, into an error that one can catch and read."""
    try:
        yield
    except CheckpointException as error:
        failures = [f"process {rank}: {type(one).__name__}: {one}" for rank, (one, _) in sorted(error.failures.items())]
        first = next((one for one, _ in error.failures.values() if isinstance(one, ValueError | OSError)), None)
        raise RuntimeError("\n".join([f"{what} failed.", *failures])) from (first or error)


def sharded_state(
    model_key: str, weights: dict[str, Any], optimizer_states: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Put together what DCP saves; Lightning's names."""
    return {model_key: weights, **{f"optimizer_{index}": state for index, state in enumerate(optimizer_states)}}


def is_sharded(path: Path) -> bool:
    """Return whether ``path`` is a folder that DCP wrote."""
    return os.path.lexists(path / METADATA_NAME)
