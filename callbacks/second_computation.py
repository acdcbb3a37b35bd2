"""The layers of a micro-batch computed twice, for `ReplicaCheck`: wrong results that no copy shows.

A flipped bit in a weight stays, and copies show it. What a device computes wrong once is gone with the activation; all
ranks get it, averaged into a gradient. Only a second computation shows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..checkpoint.names import clean_name
from ..strategies.common.broadcast import version_of
from ..strategies.common.dataloader_state import random_state, set_random_state
from ..strategies.sharded_tensors.user_code import library_code
from ..strategies.upstream.torch_core import tree_leaves


class SecondComputation:
    """Computes each layer a second time, without gradient, right after the first, and compares bit for bit.

    A layer is a module without children that has parameters or is torch's own, or `nn.MultiheadAttention`. Compiled
    layers, those that change their input in place, and those whose results differ when they are first compared (kernels
    that add in any order) are left out.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._handles: list[RemovableHandle] = []
        self._left_out: set[str] = set()
        self._has_compared = False
        self._calls: list[tuple[Any, list[int]]] = []
        """Of the calls that run: the state of random numbers, and the versions of the inputs."""
        self._differing: list[tuple[str, Tensor]] = []

    def begin(self, module: nn.Module, device: torch.device) -> None:
        """Follow the layers of a module, which computes on ``device``, until `end`."""
        self._device = device
        for full_name, layer in module.named_modules():
            name = clean_name(full_name)
            if name not in self._left_out and _is_layer(layer):
                before = layer.register_forward_pre_hook(self._before, with_kwargs=True)
                # Before the engines' own hooks, which reshard the layer.
                after = layer.register_forward_hook(partial(self._after, name), prepend=True, with_kwargs=True)
                self._handles += [before, after]

    def end(self) -> list[str]:
        """Return the names of the layers whose results differed, each once; waits for the device."""
        if not self._handles:
            return []
        for handle in self._handles:
            handle.remove()
        found = list(dict.fromkeys(name for name, differs in self._differing if differs))
        self._handles, self._calls, self._differing = [], [], []
        if not self._has_compared:
            self._has_compared, self._left_out = True, set(found)
            return []
        return found

    def _before(self, layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            versions = [version_of(one) for one in _tensors((args, kwargs))]
            self._calls.append((random_state(self._device), versions))

    def _after(self, name: str, layer: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not self._calls:
            return
        before, versions = self._calls.pop()
        if [version_of(one) for one in _tensors((args, kwargs))] != versions:
            return
        now = random_state(self._device)
        buffers = [
            (each._buffers, name, buffer, buffer.clone())
            for each in layer.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None
        ]
        with library_code(), torch.no_grad():
            set_random_state(before, self._device)
            try:
                again = layer.forward(*args, **kwargs)
            finally:
                set_random_state(now, self._device)
            for owner, buffer_name, buffer, value in buffers:
                owner[buffer_name] = buffer  # a forward may have replaced it
                buffer.data.copy_(value)  # backward, which may have saved it, is to see no change
            for first, second in zip(_tensors(output), _tensors(again), strict=True):
                self._differing.append((name, (_words(first) != _words(second)).any()))


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    is_pure = bool(module._parameters) or type(module).__module__.startswith("torch.nn.")  # no metric, say
    return is_pure and next(module.children(), None) is None


def _tensors(value: Any) -> Iterator[Tensor]:
    return (one for one in tree_leaves(value) if isinstance(one, Tensor))


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes: numbers that are not equal to themselves are, too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
