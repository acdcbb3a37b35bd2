"""What a step would have returned for a batch of no samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..state.nested import map_tensors


def without_samples(output: Any) -> Any:
    """Return the output of a step over one sample that must not count, with no samples in it.

    A tensor with one row has none then. A scalar becomes NaN, as a mean over nothing is; a whole number becomes 0.
    """
    return map_tensors(_emptied, output)


def _emptied(tensor: Tensor) -> Tensor:
    if tensor.ndim > 0 and len(tensor) == 1:
        return tensor[:0]
    if tensor.ndim > 0:
        return tensor  # not one row a sample
    return torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 0)
