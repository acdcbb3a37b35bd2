"""Building a model whose parameters take no memory, because the values come later."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..units.named_tensors import named_tensors

_state = threading.local()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters on the meta device as modules register them; buffers keep their values.

    Inside, ``from_pretrained`` of transformers reads no weights either: it builds the model that its config describes.
    It is told so by ``device_map="meta"``, so another ``device_map`` is replaced.
    """
    if getattr(_state, "active", False):  # entered twice, by nested contexts of the Trainer
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_replaced(nn.Module, "register_parameter", _register_on_meta))
        if importlib.util.find_spec("transformers") is not None:
            from transformers import PreTrainedModel

            build: Any = classmethod(_without_values(PreTrainedModel.__dict__["from_pretrained"].__func__))
            stack.enter_context(_replaced(PreTrainedModel, "from_pretrained", build))
        _state.active = True
        stack.callback(setattr, _state, "active", False)
        yield


@contextmanager
def _replaced(cls: type, name: str, replacement: Any) -> Iterator[None]:
    original = cls.__dict__[name]
    setattr(cls, name, replacement)
    try:
        yield
    finally:
        setattr(cls, name, original)


_register_parameter = nn.Module.register_parameter


def _register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _register_parameter(module, name, param)
    if param is not None and not param.is_meta:
        meta = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, meta)  # type: ignore[no-untyped-call] # the same object: ties stay


def _without_values(from_pretrained: Any) -> Any:
    def build(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = from_pretrained(cls, *args, **{**kwargs, "device_map": "meta"})
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
        _compute_buffers(model)
        return loaded

    return build


def _compute_buffers(model: Any) -> None:
    """Give the non-persistent buffers their values: no file holds them, only the constructor computes them."""
    wanted = [named for named in named_tensors(model) if not named.persistent and named.tensor.is_meta]
    if not wanted:
        return
    twin = type(model)(model.config)
    values = {name: named.tensor for named in named_tensors(twin) if not named.persistent for name in named.names}
    for named in wanted:
        value = values.get(named.name)
        if value is not None and value.shape == named.tensor.shape:
            torch.utils.swap_tensors(named.tensor, value.to(named.tensor.dtype))  # type: ignore[no-untyped-call]
