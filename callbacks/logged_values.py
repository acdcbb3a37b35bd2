"""Numbers that evaluation steps log: summed over the samples of all processes, each once."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from ..state import gather

Reduction = Literal["mean", "sum", "max", "min"]
_NEUTRAL: dict[Reduction, float] = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}


def reduction_named(reduce_fx: Any) -> Reduction | None:
    """Return which of the reductions ``self.log(reduce_fx=...)`` names, None if none of them."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = "mean" if name.lower() == "avg" else name.lower()
    return cast("Reduction", name) if name in _NEUTRAL else None


class LoggedValue(Metric):
    """A number logged at each step, and its reduction over the steps of all processes.

    Sums are kept in double precision, so that the order in which processes add up hardly shows.

    Args:
        name: Under which it is logged.
        reduction: How.
        dtype: Of the result.
    """

    full_state_update = False
    total: Tensor
    weight: Tensor
    _forward_cache: Any

    def __init__(self, name: str, reduction: Reduction, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(sync_on_compute=False)  # `compute` gathers by itself, and notices where processes differ
        self.name, self.reduction, self.result_dtype = name, reduction, dtype
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no double precision
        self.add_state("total", torch.tensor(_NEUTRAL[reduction], dtype=wide, device=device))
        self.add_state("weight", torch.tensor(0, dtype=torch.int64, device=device))

    def add(self, value: Tensor, weight: int) -> None:
        """Add a step's value and keep it as that of the step, which ``on_step=True`` shows."""
        self.update(value, weight)
        self._forward_cache = value

    @override
    def update(self, value: Tensor, weight: int) -> None:
        """Add a step's value, with its number of samples; 0 leaves the value out."""
        if weight == 0:
            return
        value = value.to(self.total)
        if self.reduction == "mean":
            self.total = self.total + value * weight
        elif self.reduction == "sum":
            self.total = self.total + value
        else:
            self.total = (torch.maximum if self.reduction == "max" else torch.minimum)(self.total, value)
        self.weight = self.weight + weight

    @override
    def compute(self) -> Tensor:
        """Return the reduction over all processes, the same on each."""
        parts = gather({f"self.log({self.name!r})": [self.total, self.weight]})
        totals, weights = next(iter(parts.values()))
        if self.reduction == "mean":
            result = totals.sum() / weights.sum()
        elif self.reduction == "sum":
            result = totals.sum()
        else:
            result = totals.amax() if self.reduction == "max" else totals.amin()
        return result.to(self.result_dtype)
