"""How gradients are accumulated: the plugin, and what it says of each micro-batch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .arguments import named_arguments

ShortWindows = Literal["full", "mean"]
_SHORT_WINDOWS_VARIABLE = "ACCELIGHT_SHORT_WINDOWS"


@named_arguments
@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """Settings of :class:`GradientState`.

    Source: accelerate 1.15 ``utils/dataclasses.py`` (``GradientAccumulationPlugin``).
    """

    num_steps: int | None = None
    """Micro-batches per optimizer step; None is 1 (or ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``)."""
    adjust_scheduler: bool = True
    """Kept for code that reads it from :class:`GradientState`. Learning rates follow optimizer steps whatever it says,
    under a Trainer as with Accelerate 1.15, whose wrapper reads False for both values."""
    sync_with_dataloader: bool = True
    """Whether the end of the dataloader ends a window of micro-batches early."""
    sync_each_batch: bool = False
    """Whether to reduce gradients at every micro-batch all the same: less memory with FSDP, more communication."""
    short_windows: ShortWindows | None = None
    """How a strategy divides the gradients of an epoch's last window where that has fewer than ``num_steps``
    micro-batches: ``"full"`` by ``num_steps`` all the same, as Lightning and Accelerate do, or ``"mean"`` by what the
    window has, as transformers' Trainer does. None is ``ACCELIGHT_SHORT_WINDOWS``, else ``"full"``."""

    def __post_init__(self) -> None:
        if self.short_windows is not None:
            _check_short_windows(self.short_windows, "short_windows")
        if self.num_steps is None:
            return
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int):
            raise TypeError(f"num_steps must be an int, got {self.num_steps!r}.")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}. Use 1 for no accumulation.")

    def resolve_short_windows(self, environment: Mapping[str, str] | None = None) -> ShortWindows:
        """Return ``short_windows``, what the environment says where it is None, and ``"full"`` where nobody says.

        Raises:
            ValueError: If the environment has another value.
        """
        told = self.short_windows
        if told is None:
            environment = os.environ if environment is None else environment
            told = _check_short_windows(environment.get(_SHORT_WINDOWS_VARIABLE, "full"), _SHORT_WINDOWS_VARIABLE)
        return told

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


def _check_short_windows(value: object, name: str) -> ShortWindows:
    for allowed in get_args(ShortWindows):
        if value == allowed:
            return allowed
    raise ValueError(f"{name}={value!r} must be 'full' (divide by num_steps) or 'mean' (by what the window has).")


def size_of_window(batch_idx: int, num_batches: float | None, num_steps: int) -> int:
    """Return how many micro-batches the window of ``batch_idx`` has, if windows begin anew with each epoch.

    Args:
        batch_idx: Index of a micro-batch in its epoch.
        num_batches: Micro-batches in the epoch; None or infinity where unknown.
        num_steps: Micro-batches in a full window.

    Raises:
        ValueError: If there is no such micro-batch.
    """
    if batch_idx < 0 or (num_batches is not None and batch_idx >= num_batches):
        raise ValueError(f"batch_idx={batch_idx} is out of range: the epoch has {num_batches} micro-batches.")
    if num_batches is None or math.isinf(num_batches):
        return num_steps
    begin = batch_idx - batch_idx % num_steps
    return min(num_steps, int(num_batches) - begin)
