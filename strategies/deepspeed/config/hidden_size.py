"""The model's hidden size, from which DeepSpeed's bucket sizes follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def hidden_size_of(model: nn.Module) -> int | None:
    """Return the hidden size that a model tells, the largest of several; None where it tells none.

    Asked are the ``config`` (as transformers has it), the ``hparams`` (as Lightning has it) and the ``hidden_size`` of
    the model, and then the ``config`` of each module inside it.
    """
    for source in (getattr(model, "config", None), getattr(model, "hparams", None), model):
        if (size := _size_in(source)) is not None:
            return size
    inner = (_size_in(getattr(module, "config", None)) for module in model.modules())
    return max((size for size in inner if size is not None), default=None)


def _size_in(source: Any) -> int | None:
    for part in (source, _get(source, "text_config")):
        size = _get(part, "hidden_size")
        sizes = [size] if size is not None else _get(part, "hidden_sizes")
        if isinstance(sizes, list | tuple) and sizes and all(type(size) is int and size > 0 for size in sizes):
            return int(max(sizes))
    return None


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
