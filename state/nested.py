"""Tensors inside lists, tuples, named tuples and dicts: taken out, and put back as something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Return ``data`` with ``function`` applied to each tensor, in the order of :func:`tensors_of`."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        mapped = {key: map_tensors(function, value) for key, value in data.items()}
        return mapped if type(data) is dict else type(data)(mapped)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(function, value) for value in data)
    return data


def tensors_of(data: Any, path: str = "data") -> dict[str, torch.Tensor]:
    """Return the tensors by their place, like ``data['logits'][0]``.

    Raises:
        TypeError: If there is anything else in ``data``, or a tensor that cannot be sent.
    """
    if isinstance(data, torch.Tensor):
        _check_sendable(data, path)
        return {path: data}
    items: list[tuple[Any, Any]]
    if isinstance(data, Mapping):
        items = list(data.items())
    elif isinstance(data, (list, tuple)):
        items = list(enumerate(data))
    else:
        raise TypeError(
            f"{path} is {type(data).__name__}, but only tensors can be sent this way, in lists, tuples and dicts. "
            "Use gather_object for other things."
        )
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        found.update(tensors_of(value, f"{path}[{key!r}]"))
    return found


def holds_only_tensors(data: Any) -> bool:
    """Whether ``data`` is a tensor, or a structure of at least one and nothing else."""
    if isinstance(data, torch.Tensor):
        return True
    if isinstance(data, Mapping):
        data = list(data.values())
    return isinstance(data, (list, tuple)) and len(data) > 0 and all(map(holds_only_tensors, data))


def _check_sendable(tensor: torch.Tensor, path: str) -> None:
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{path} is a DTensor: call .full_tensor() (or .to_local()) on it first, to say which is meant."
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise TypeError(
            f"{path} is a {tensor.layout} tensor on {tensor.device}: only dense tensors with values can be sent. "
            "Call .to_dense() or load its values first."
        )
