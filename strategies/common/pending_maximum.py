"""The maximum of small numbers over all ranks, on its way while each rank goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .agreed_outcome import num_ranks

BeginMax = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""Begins to reduce numbers to their maximum over all ranks, and returns what waits for them."""


class PendingMaximum:
    """Begins to reduce; all ranks must make one at the same place, and whoever wants the numbers waits.

    A rank that waits, waits for the slowest. Where most ranks need not know, most need not wait.

    Args:
        values: As many on each rank; int32.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self._own = values
        self._work: Any = None
        if num_ranks() == 1:
            return
        self._values = torch.tensor(values, dtype=torch.int32)
        if "cpu" not in dist.get_backend_config() and dist.get_backend() != "gloo":
            self._values = self._values.to(torch.accelerator.current_accelerator())
        self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, async_op=True)

    def wait(self) -> Sequence[int]:
        """Return the numbers, when all ranks have begun."""
        if self._work is None:
            return self._own
        self._work.wait()  # again at once
        return self._values.tolist()
