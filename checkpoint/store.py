"""One process works, the others wait on the process group's key-value store."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .errors import CheckpointError

T = TypeVar("T")

_FIRST_WAIT_S = 0.002
_LONGEST_WAIT_S = 0.5
_calls = 0  # every process of the group makes the same calls: the number names the keys


def share_from_main(fn: Callable[[], T]) -> T:
    """Run ``fn`` on rank 0 and return its result on every rank of the default group.

    Raises:
        CheckpointError: On the other ranks, if ``fn`` failed on rank 0 or rank 0 went away.
    """
    global _calls
    _calls += 1
    store = dist.distributed_c10d._get_default_store()
    key = f"accelight/checkpoint/{_calls}"
    if dist.get_rank() == 0:
        return _run(fn, store, key)
    _wait(store, key)
    outcome, value = pickle.loads(store.get(key))  # written by rank 0 of our own job
    if outcome == "error":
        raise CheckpointError(f"The merge failed on process 0 (the main process): {value}")
    return value


def _run(fn: Callable[[], T], store: Any, key: str) -> T:
    try:
        result = fn()
    except BaseException as error:
        store.set(key, pickle.dumps(("error", f"{type(error).__name__}: {error}")))
        raise
    store.set(key, pickle.dumps(("result", result)))
    return result


def _wait(store: Any, key: str) -> None:
    """Return when the key is there; looking for it again and again has no timeout that a long merge could run into."""
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            if store.check([key]):
                return
        except RuntimeError as error:  # the store lives on the main process
            raise CheckpointError(
                f"Process 0 (the main process) went away while process {dist.get_rank()} waited for its merge: {error}"
            ) from error
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
