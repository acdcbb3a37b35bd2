"""How this package asks torch for state dicts, full or sharded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ...upstream.torch_core import tree_map_only
from ..config.settings import FullState


@contextmanager
def without_torch_noise() -> Iterator[None]:
    """Hide torch 2.13's warnings about its own calls; a user can do nothing about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*_get_pg_default_device.*")
        warnings.filterwarnings("ignore", ".*Multiple backends are registered with this ProcessGroup.*")
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", ".*FSDP.state_dict_type.*", FutureWarning)
        warnings.filterwarnings("ignore", ".*NO_SHARD.*")
        yield


def state_dict_options(where: FullState | None, device: torch.device) -> StateDictOptions:
    """Return how torch is to make a state dict.

    Args:
        where: A full one is to be; None for a sharded one.
        device: Where the model computes: a full tensor is gathered there, also where ``cpu_offload=True`` keeps shards
            in host memory.
    """
    # With cpu_offload, torch makes a full one on rank 0 alone.
    offload = where is not None and where.rank0_only and where.offload_to_cpu
    # FSDP1's full state dict with cpu_offload=True kills the process when its tensors are on the CPU (torch 2.13).
    return StateDictOptions(full_state_dict=where is not None, cpu_offload=offload and device.type != "cpu")


def put_where(state: dict[str, Any], where: FullState) -> dict[str, Any]:
    """Return a full ``state``, or nothing where rank 0 alone is to have it."""
    if where.rank0_only:
        return {} if dist.get_rank() != 0 else state
    moved = tree_map_only(torch.Tensor, torch.Tensor.cpu, state) if where.offload_to_cpu else state
    return cast("dict[str, Any]", moved)
