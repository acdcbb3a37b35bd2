"""In a process group the main process works and the others wait; without one there is nothing to wait for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_on_main(fn: Callable[[], T]) -> T:
    """Run ``fn`` on the main process of the live process group, and hand its result to all.

    The others wait on the group's store, not on a collective: a collective would run into its timeout when ``fn`` takes
    long. Torch is not imported here: where nobody has imported it, there is no process group.

    Raises:
        CheckpointError: On the other processes, if ``fn`` failed on the main one; its own error there.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return fn()
    from .store import share_from_main  # torch

    return share_from_main(fn)
