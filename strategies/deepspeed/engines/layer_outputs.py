"""What layers return that stage 3 cannot look into: objects without ``__dict__``, such as dataclasses with slots.

DeepSpeed 0.19 takes any output that is no tensor, list, tuple or dict for an object with ``__dict__`` and ends in
``vars()`` otherwise. A hook before its own hands it the tensors inside, as a list; a hook after it puts back into the
object what became of them, and returns the object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

_HANDLES: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


class OpaqueOutputs:
    """Lets stage 3 see into what the layers of a module return.

    Args:
        module: Before its engine is made, so that the hooks come before DeepSpeed's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._passages = {layer: _Passage() for layer in module.modules()}
        self._handles = [layer.register_forward_hook(passage.open) for layer, passage in self._passages.items()]

    def follow(self, engine: Any) -> None:
        """Put the hooks that come after DeepSpeed's; they go with the engine."""
        closing = [layer.register_forward_hook(passage.close) for layer, passage in self._passages.items()]
        _HANDLES[engine] = [*self._handles, *closing]


def let_go(engine: Any) -> None:
    """Take the hooks off the engine's module."""
    for handle in _HANDLES.pop(engine, []):
        handle.remove()


class _Passage:
    """One layer's output on its way through DeepSpeed's hooks."""

    def __init__(self) -> None:
        self._whole: Any = None
        self._names: list[str] = []

    def open(self, layer: nn.Module, args: Any, output: Any) -> list[torch.Tensor] | None:
        self._whole = None
        if output is None or isinstance(output, torch.Tensor | list | tuple | dict) or hasattr(output, "__dict__"):
            return None
        self._whole = output
        self._names = [name for name, value in _slots(output) if _has_graph(value)]
        return [getattr(output, name) for name in self._names]

    def close(self, layer: nn.Module, args: Any, output: Any) -> Any:
        whole, self._whole = self._whole, None
        if whole is None:
            return None
        for name, tensor in zip(self._names, output, strict=True):
            object.__setattr__(whole, name, tensor)  # frozen dataclasses, too
        return whole


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _slots(output: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(output).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(output, name):
                yield name, getattr(output, name)
