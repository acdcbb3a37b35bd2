"""Parameters without a dimension (a temperature, CLIP's ``logit_scale``), which DeepSpeed cannot handle.

DeepSpeed 0.19 views what it broadcasts as bytes, and a tensor without a dimension has no such view; it
multiplies gradients in place with a tensor of one dimension. These parameters have one dimension while it does so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ...common.user_code import as_library


@functools.cache
def allow_scalars() -> None:
    """Let DeepSpeed's engines, partitioning and ``GatheredParameters`` take parameters without a dimension."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    gathered_enter = GatheredParameters.__enter__
    broadcast, clip = DeepSpeedEngine._broadcast_model, DeepSpeedEngine.clip_fp32_gradients
    partition, gathered_exit = Init._zero_init_param, GatheredParameters.__exit__

    @functools.wraps(broadcast)
    def broadcast_model(self: Any) -> None:
        with _in_one_dimension(one for one in self.module.parameters() if not hasattr(one, "ds_id")):
            broadcast(self)

    @functools.wraps(clip)
    def clip_fp32_gradients(self: Any) -> None:
        with _in_one_dimension(one.grad for one in self.module.parameters() if one.grad is not None):
            clip(self)

    @functools.wraps(partition)
    def zero_init_param(self: Any, param: Any) -> None:
        if param.ndim:
            partition(self, param)
            return
        convert = self._convert_to_deepspeed_param

        def convert_scalar(scalar: Any) -> None:
            convert(scalar)
            scalar.data = scalar.data.view(1)  # until it is partitioned; it has noted its shape

        self._convert_to_deepspeed_param = convert_scalar
        try:
            partition(self, param)
        finally:
            del self._convert_to_deepspeed_param

    @functools.wraps(gathered_enter)
    def enter_gathered(self: Any) -> Any:
        result = gathered_enter(self)
        for one in getattr(self, "params", None) or ():
            one.accelight_gathered = getattr(one, "accelight_gathered", 0) + 1
        return result

    @functools.wraps(gathered_exit)
    def exit_gathered(self: Any, *args: Any) -> None:
        for one in getattr(self, "params", None) or ():
            if not one.ndim and self.src_rank is not None:
                one.data = one.data.view(1)  # until it is partitioned
        try:
            gathered_exit(self, *args)
        finally:
            for one in getattr(self, "params", None) or ():
                one.accelight_gathered -= 1

    DeepSpeedEngine._broadcast_model, DeepSpeedEngine.clip_fp32_gradients = broadcast_model, clip_fp32_gradients
    Init._zero_init_param = zero_init_param
    GatheredParameters.__enter__ = as_library(enter_gathered)
    GatheredParameters.__exit__ = as_library(exit_gathered)


def is_gathered_by_user(parameter: Any) -> bool:
    """Return whether a parameter is inside of ``GatheredParameters``."""
    return bool(getattr(parameter, "accelight_gathered", 0))


@contextmanager
def _in_one_dimension(tensors: Iterable[Any]) -> Iterator[None]:
    scalars = [one for one in tensors if not one.ndim]
    for one in scalars:
        one.data = one.data.view(1)
    try:
        yield
    finally:
        for one in scalars:
            one.data = one.data.view(())
