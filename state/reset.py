"""Forgetting everything, between tests."""

from __future__ import annotations

from . import triggers
from .accelerator_state import AcceleratorState
from .gradient_state import GradientState


def reset_state() -> None:
    """Forget all states and triggers of this process, so that the next instances begin anew. For tests.

    A process group stays as it is, and is adopted by the next ``PartialState()``.
    """
    triggers.reset()
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
