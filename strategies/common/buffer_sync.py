"""Buffers are rank 0's at each forward, where and when ``DistributedDataParallel`` makes them so by default.

[Note: when buffers are broadcast] torch broadcasts before a forward, unless the forward before it ran without gradient
or in ``no_sync``: before each first micro-batch of a window, and before the first batch of a validation; in manual
optimization before the first step of a fit alone. Here those broadcasts are left out whose result is known: each rank
looks at version and identity of its buffers, and says whether they have changed in a message that the ranks exchange
for each step anyway (`Termination`). From the first change on all broadcast, as torch does. Changes that leave no trace
(``buffer.data``) are found where rank 0's values arrive all the same: in the first forwards of a fit, in the first one
of each epoch and of each evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .agreed_outcome import num_ranks
from .one_start import send_from_rank_zero

_NUM_FIRST = 3
"""Forwards of a fit that broadcast whether buffers have changed or not."""


class BufferSync:
    """Follows the buffers of one model through its fits.

    Args:
        is_on: Whether buffers are rank 0's at each forward; else each rank keeps its own.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._root: nn.Module | None = None
        self._device = torch.device("cpu")
        self._holders: list[dict[str, Tensor | None]] = []
        self._seen: list[tuple[Tensor, int]] = []
        self._is_due = self._accumulates = False
        self._is_changing = False
        """Whether buffers have changed on any rank: the same on all ranks."""
        self._differ = False
        """Whether this rank has found that they have, and that no version shows it."""
        self._num_certain = 0

    def follow(self, root: nn.Module, device: torch.device) -> None:
        """Begin a fit: its first forward has rank 0's buffers."""
        self.detach()
        if self.is_on and num_ranks() > 1:
            self._root, self._device = root, device
            self._is_due, self._num_certain = True, _NUM_FIRST
            self._find()

    def detach(self) -> None:
        """End a fit."""
        self._root, self._holders, self._seen = None, [], []
        self._is_due = self._is_changing = self._differ = self._accumulates = False

    # ------------------------------------------------------------------ what the ranks agree on
    def message(self) -> int:
        """Return whether this rank's buffers have changed since the last broadcast, for the maximum over all ranks."""
        return int(self._is_changing or self._differ or (bool(self._holders) and self._have_changed()))

    def receive(self, of_all: int) -> None:
        """Take note of the maximum of all ranks' messages."""
        self._is_changing = self._is_changing or (bool(of_all) and self._root is not None)

    def expect_changes(self) -> None:
        """Let the next forward broadcast if it is one that may: at the beginning of an epoch, on all ranks."""
        self._num_certain = max(self._num_certain, 1)

    # ------------------------------------------------------------------ around forwards
    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Run a micro-batch whose gradients are not reduced."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @contextmanager
    def forward(self, *, is_trained: bool) -> Iterator[None]:
        """Run a step of the module, with rank 0's buffers if torch would broadcast them before it.

        Args:
            is_trained: Whether a backward follows that the strategy runs: not in evaluation and manual optimization.
        """
        if self._root is not None and self._is_due:
            is_certain = self._num_certain > 0 or not torch.is_grad_enabled()
            if is_certain:
                self._find()
            if self._holders and (is_certain or self._is_changing):
                self._broadcast(looks=is_certain and not self._is_changing)
            self._num_certain = max(self._num_certain - 1, 0)
        yield
        self._is_due = is_trained and torch.is_grad_enabled() and not self._accumulates

    def _find(self) -> None:
        """Find the buffers, which code may have registered since."""
        if self._root is not None:
            self._holders = [each._buffers for each in self._root.modules() if each._buffers]
        if not self._seen:
            self._seen = [(buffer, _version(buffer)) for buffer in self._buffers()]

    def _buffers(self) -> list[Tensor]:
        found = [buffer for holder in self._holders for buffer in holder.values() if buffer is not None]
        return list({id(buffer): buffer for buffer in found}.values())

    def _have_changed(self) -> bool:
        buffers = self._buffers()
        return len(buffers) != len(self._seen) or any(
            buffer is not seen or _version(buffer) != version
            for buffer, (seen, version) in zip(buffers, self._seen, strict=True)
        )

    def _broadcast(self, *, looks: bool) -> None:
        buffers = self._buffers()
        before = [buffer.clone() for buffer in buffers] if looks and dist.get_rank() else []
        writable: Any = tuple(buffer for buffer in buffers if not buffer.is_inference())
        # As torch does: a graph that has not run backward may have saved them.
        with torch.autograd._unsafe_preserve_version_counter(writable):  # type: ignore[attr-defined]
            send_from_rank_zero(buffers, self._device)
        if any(not torch.equal(*pair) for pair in zip(buffers, before, strict=False)):
            self._differ = True
        if not self._is_changing:
            self._seen = [(buffer, _version(buffer)) for buffer in buffers]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
