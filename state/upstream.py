"""Private names of torch's c10d (2.13): stores, which it has no public names for, and the default group's own."""

from __future__ import annotations

import json
from typing import Any

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

__all__ = [
    "HashStore",  # a group of one process needs no network
    "PrefixStore",  # keys of our own in the group's store
    "Store",  # what all stores are
    "TCPStore",  # who holds it has to stay until the others are through
    "_get_default_store",  # processes meet there without a collective
    "ranks_of",  # of a group that the flight recorder names
    "flight_record",  # which collectives have not completed
]

ATTRIBUTES = {
    "_dump_fr_trace_json": ("torch._C._distributed_c10d", "which collectives of gloo have not completed"),
    "_resolve_process_group": ("torch._C._distributed_c10d", "the ranks of a group that the flight recorder names"),
    "_get_backend": ("torch.distributed.ProcessGroup", "the timeout that a group was made with"),
}


_library: Any = _c10d  # whose stubs lack these


def flight_record() -> list[dict[str, Any]]:
    """Return what torch's flight recorder knows of this process's collectives, oldest first.

    Empty where it does not record (``TORCH_FR_BUFFER_SIZE=0``).
    """
    record: list[dict[str, Any]] = json.loads(_library._dump_fr_trace_json(True, False)).get("entries", [])
    return record


def ranks_of(name: str) -> tuple[int, ...]:
    """Return the ranks of the group with this name."""
    return tuple(dist.get_process_group_ranks(_library._resolve_process_group(name)))
