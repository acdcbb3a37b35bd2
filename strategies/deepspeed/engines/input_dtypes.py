"""Inputs that the user's own code gives to a model in half precision, in hooks or after training: cast to its dtype.

The Trainer casts batches. What else is given to the module, or to a module that it holds directly, is cast here, as
FSDP's units do it. Inside of a forward nothing is: models compute in fp32 in some places on purpose.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

_HANDLES: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def cast_inputs(engine: Any) -> None:
    """Cast what an engine's module is given, if it computes in half precision; `let_go` ends that."""
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return
    caster, root = _Caster(), engine.module
    _HANDLES[engine] = [
        *(one.register_forward_hook(caster.leave, always_call=True) for one in (engine, root)),
        engine.register_forward_pre_hook(caster.enter),
        root.register_forward_pre_hook(caster.cast_and_enter, with_kwargs=True),
        *(child.register_forward_pre_hook(caster.cast, with_kwargs=True) for child in root.children()),
    ]


def let_go(engine: Any) -> None:
    """Take the hooks off the engine's module."""
    for handle in _HANDLES.pop(engine, []):
        handle.remove()


class _Caster:
    def __init__(self) -> None:
        self._depth = 0

    def enter(self, *_: Any) -> None:
        self._depth += 1

    def cast_and_enter(self, root: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        given = self.cast(root, args, kwargs)
        self.enter()
        return given

    def leave(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)  # with always_call, also where `enter` was not reached

    def cast(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
        if self._depth or dtype is None:
            return None

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if torch.is_floating_point(tensor) else tensor

        return apply_to_collection((args, kwargs), Tensor, convert)
