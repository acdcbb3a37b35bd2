"""The batch that a plan trains on: by a specification of shapes, or from the module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from ..upstream.torch_fake import tree_leaves

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_SPEC = re.compile(r"(?:(?P<name>[A-Za-z_]\w*):)?(?P<shape>\d+(?:x\d+)*):(?P<dtype>\w+)")


def batch_of(specs: Sequence[str]) -> Any:
    """Return a batch of zeros.

    Args:
        specs: Such as ``"input_ids:8x2048:int64"``: all with names make a dict. Without names, one makes a tensor,
            several a tuple.

    Raises:
        ValueError: If one cannot be read, or some have names and others not.
    """
    found = [_parsed(spec) for spec in specs]
    names = [name for name, _ in found]
    if all(name is not None for name in names):
        return dict(found)
    if any(name is not None for name in names):
        raise ValueError(f"Give all tensors of the batch names, or none; got {', '.join(specs)}.")
    tensors = tuple(tensor for _, tensor in found)
    return tensors[0] if len(tensors) == 1 else tensors


def _parsed(spec: str) -> tuple[str | None, torch.Tensor]:
    match = _SPEC.fullmatch(spec)
    if match is None or match["dtype"] not in _DTYPES:
        raise ValueError(
            f"{spec!r} is no tensor of a batch: it is NAME:SHAPE:DTYPE or SHAPE:DTYPE, such as input_ids:8x2048:int64, "
            f"and DTYPE one of {', '.join(_DTYPES)}."
        )
    shape = [int(length) for length in match["shape"].split("x")]
    return match["name"], torch.zeros(shape, dtype=_DTYPES[match["dtype"]])


def batch_size_of(batch: Any) -> int:
    """Return the length of the first tensor that has one.

    Raises:
        ValueError: If there is no tensor.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise ValueError(f"The batch holds no tensor with a length: {type(batch).__name__}. Give one as training has it.")
