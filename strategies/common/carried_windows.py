"""Accumulation windows that go on over the end of an epoch, which Lightning's loop does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from ...state import GradientState
from ..upstream.lightning import Trainer


@contextmanager
def carried_windows(trainer: Trainer, is_first: Callable[[], bool]) -> Iterator[None]:
    """Let the Trainer's loop step, and clear gradients, where `GradientState` says, instead of counting within epochs.

    Args:
        trainer: Changed inside this context.
        is_first: Whether the present micro-batch begins a window.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    make_zero_grad = loop.automatic_optimization._make_zero_grad_fn

    def should_accumulate() -> bool:
        return not GradientState().sync_gradients

    def make_zero_grad_fn(batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        # Lightning 2.6 clears gradients where this index is a multiple of the accumulation; 1 never is.
        return make_zero_grad(0 if is_first() else 1, optimizer)

    loop._should_accumulate = should_accumulate
    loop.automatic_optimization._make_zero_grad_fn = make_zero_grad_fn
    try:
        yield
    finally:
        del loop._should_accumulate
        del loop.automatic_optimization._make_zero_grad_fn
