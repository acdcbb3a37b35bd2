"""Private names of torch's c10d (2.13): the default group's store, and the flight recorder."""

from __future__ import annotations

import json
from typing import Any

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

__all__ = [
    "_get_default_store",  # processes meet there without a collective
    "ranks_of",  # of a group that the flight recorder names
    "dump_flight_record",
    "flight_record",  # which collectives have not completed
]

ATTRIBUTES = {
    "_dump_fr_trace": ("torch._C._distributed_c10d", "the flight recorder's file, for torch's own tools"),
    "_dump_fr_trace_json": ("torch._C._distributed_c10d", "which collectives of gloo have not completed"),
    "_resolve_process_group": ("torch._C._distributed_c10d", "the ranks of a group that the flight recorder names"),
    "_get_backend": ("torch.distributed.ProcessGroup", "the timeout that a group was made with"),
}


_library: Any = _c10d  # whose stubs lack these


def flight_record() -> list[dict[str, Any]]:
    """Return this process's collectives from torch's flight recorder, oldest first.

    Empty where it does not record (``TORCH_FR_BUFFER_SIZE=0``).
    """
    record: list[dict[str, Any]] = json.loads(_library._dump_fr_trace_json(True, False)).get("entries", [])
    return record


def dump_flight_record() -> bytes | None:
    """Return torch's flight recorder as its tools read it (``torchfrtrace``); None where it does not record.

    That of NCCL where there is one.
    """
    if not flight_record() and not hasattr(_library, "_dump_nccl_trace"):
        return None
    dump = getattr(_library, "_dump_nccl_trace", _library._dump_fr_trace)
    return bytes(dump())


def ranks_of(name: str) -> tuple[int, ...]:
    """Return the ranks of the group with this name."""
    return tuple(dist.get_process_group_ranks(_library._resolve_process_group(name)))
