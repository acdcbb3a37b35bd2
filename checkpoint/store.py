"""One process works, the others wait on the process group's key-value store and get its result."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..state.ordering import one_first
from ..state.process_group import group_store, require_group
from .errors import CheckpointError

T = TypeVar("T")

# All processes of a group make the same calls, so that the number of a call names its key without a word.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def share_from_main(fn: Callable[[], T]) -> T:
    """Run ``fn`` on rank 0 and return its result on every rank of the default group.

    Raises:
        CheckpointError: On the other ranks, if ``fn`` failed on rank 0 or rank 0 went away; its own error on rank 0.
    """
    group = require_group("merge_fsdp_weights")
    _numbers[group] = _numbers.get(group, 0) + 1
    store: Any = group_store(f"accelight/merge/{_numbers[group]}")  # Any: its stubs know str, it takes bytes
    rank, num_waiting = dist.get_rank(), dist.get_world_size() - 1
    ordered = one_first(
        group, first=rank == 0, scope="merge", num_waiting=num_waiting, process_index=rank, timeout=None
    )
    if rank == 0:
        with ordered:
            result = fn()
            store.set("result", pickle.dumps(result))
        return result
    try:
        with ordered:
            pass
    except RuntimeError as error:
        raise CheckpointError(f"The merge failed on the main process. {error}") from error
    result = pickle.loads(store.get("result"))  # written by rank 0 of our own job
    if store.add("readers", 1) == num_waiting:
        store.delete_key("result")
        store.delete_key("readers")
    return result
