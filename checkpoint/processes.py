"""In a process group the main process works and all learn the outcome; without one there is nothing to wait for."""

from __future__ import annotations

import pickle
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import CheckpointError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

# All processes of a group make the same calls, so the number of a call names its key, and nothing need be sent.
_num_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def run_on_main(fn: Callable[[], T]) -> T:
    """Run ``fn`` on the main process of the default process group, and return its result on every process.

    The others wait on the group's store, not in a collective, which would time out while ``fn`` takes long. Torch is
    not imported here: where nobody has imported it, there is no process group.

    Raises:
        CheckpointError: On the other processes, if ``fn`` failed on the main one, or that went away. The main process
            gets its own error.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return fn()
    from ..state.process_group import require_group  # torch

    return _share(fn, require_group("merge_fsdp_weights"))


def _share(fn: Callable[[], T], group: dist.ProcessGroup) -> T:
    from ..state.ordering import one_first
    from ..state.process_group import group_store

    number = _num_calls[group] = _num_calls.get(group, 0) + 1
    store: Any = group_store(f"accelight/merge/{number}")  # Any: its stubs know str, it takes bytes
    rank, num_waiting = group.rank(), group.size() - 1
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
    result = pickle.loads(store.get("result"))  # written by the main process of our own job
    if store.add("readers", 1) == num_waiting:
        store.delete_key("result")
        store.delete_key("readers")
    return result
