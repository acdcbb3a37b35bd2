"""Averages the loss over items (samples, tokens, pixels): every item of an accumulation window weighs the same.

A mean of micro-batch means is no mean over items where micro-batches have different numbers of them. Here each
micro-batch's gradient is weighted by its number of items on this rank, and the gradients of the window are divided once
by the number of items that all ranks had in it.

The ranks learn that number from a reduction that they make for each window anyway: it finds maxima, so each rank has an
entry of its own, which is zero on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...state.collectives import reduce
from ...state.process_group import is_planned
from ...state.rendezvous import num_ranks
from ..upstream.lightning import rank_zero_info

_LARGEST = 2**31 - 1  # the reduction is one of int32
_KEY = "num_items"
_HOW = 'Return {"loss": the mean over the items of this micro-batch, "num_items": their number}.'


class ItemAverage:
    """Counts the items of one accumulation window after the other, and weights gradients by them.

    Args:
        is_on: Whether items weigh the same; else micro-batches do, and this does nothing.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._in_batch = 0
        """Items of the present micro-batch, on this rank."""
        self._unsent = 0
        """Items of the window's micro-batches that no message has reported yet, on this rank."""
        self._messages: list[Callable[[], Sequence[int]]] = []
        self._has_said_ignored = self._has_said_empty = False

    def begin_window(self) -> None:
        """Begin to count anew; what was left of a window that was dropped is forgotten."""
        self._unsent, self._messages = 0, []

    # ------------------------------------------------------------------ a micro-batch
    def take_output(self, output: Any) -> None:
        """Take the number of items from what ``training_step`` returned.

        Raises:
            ValueError: If there is none, or it is not a number of items.
            RuntimeError: If there are several processes, and no loss.
        """
        given = output.get(_KEY) if isinstance(output, Mapping) else None
        if not self.is_on:
            if given is not None and not self._has_said_ignored:
                self._has_said_ignored = True
                rank_zero_info(
                    "training_step() returned num_items, which is not used: each micro-batch weighs the same. "
                    'GradientAccumulationPlugin(average_over="items") weights it by its items.'
                )
            return
        if output is None and num_ranks() > 1:
            raise RuntimeError(
                f"training_step() returned None on process {dist.get_rank()}: the others wait for its backward. A "
                'micro-batch without items has a loss, too: return {"loss": loss, "num_items": 0} for it.'
            )
        self._in_batch = 0 if output is None else 1 if is_planned() else _checked(given)
        self._unsent += self._in_batch
        if self._unsent > _LARGEST:
            raise ValueError(f"An accumulation window has {self._unsent} items on one process, at most {_LARGEST}.")

    @contextmanager
    def weighting(self, loss: Tensor, num_steps: int) -> Iterator[None]:
        """Weight the gradients of the backward that ``loss`` begins by the micro-batch's items.

        Args:
            loss: A scalar, divided by ``num_steps``. Its value does not change.
            num_steps: Micro-batches in a full window.
        """
        if not self.is_on or not loss.requires_grad:
            yield
            return
        if factor := self._in_batch * num_steps:
            hooks = [loss.register_hook(lambda gradient: gradient * factor)]  # type: ignore[no-untyped-call]
        else:
            hooks = _zero_gradients(loss)
        try:
            yield
        finally:
            for hook in hooks:  # the nodes of parameters live on
                hook.remove()

    # ------------------------------------------------------------------ messages
    def message(self) -> list[int]:
        """Return this rank's part of a reduction to maxima: no numbers where items do not count."""
        if not self.is_on:
            return []
        entries = [0] * num_ranks()
        entries[dist.get_rank() if len(entries) > 1 else 0] = self._unsent
        self._unsent = 0
        return entries

    def receive(self, wait: Callable[[], Sequence[int]]) -> None:
        """Take the maxima of what `message` returned on all ranks, or a function that waits for them."""
        if self.is_on:
            self._messages.append(wait)

    # ------------------------------------------------------------------ the end of a window
    def factor(self) -> float:
        """Return the factor of the window's gradients, averaged over ranks; 0 for a window without items."""
        # Unsent numbers are of one process alone, whose last micro-batch had no backward.
        num_items = self._unsent + sum(sum(wait()) for wait in self._messages)
        if num_items:
            return num_ranks() / num_items
        if not self._has_said_empty:
            self._has_said_empty = True
            rank_zero_info("An accumulation window had no items on any process: no optimizer step is taken.")
        return 0.0


def factor_for(num_items: int | Tensor) -> float:
    """Return the factor that turns gradients averaged over ranks into averages over all ranks' items.

    Args:
        num_items: This rank's; all ranks must call it.

    Raises:
        ValueError: On every rank, if no rank has an item.
    """
    total = int(reduce(torch.tensor(_checked(num_items)), "sum"))
    if not total:
        raise ValueError("divide_by_items() got 0 items on every process: leave this optimizer step out.")
    return num_ranks() / total


def _checked(given: Any) -> int:
    if given is None:
        raise ValueError(f'average_over="items" needs the number of items of each micro-batch. {_HOW}')
    number = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0 or number != int(number):
        raise ValueError(f"num_items must be a whole number of at least 0, or a tensor with one, got {given!r}. {_HOW}")
    return int(number)


def _zero_gradients(loss: Tensor) -> list[Any]:
    """Make the backward of ``loss`` give zeros, also where the mean over no items is 0/0 and has no gradient.

    Returns:
        The hooks that do so.
    """
    hooks: list[Any] = []
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        hooks.append(node.register_prehook(_zeros))
        if not getattr(node, "averages_over_ranks", False):  # else what follows has the gradient of all ranks
            waiting += [following for following, _ in node.next_functions]
    return hooks


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
