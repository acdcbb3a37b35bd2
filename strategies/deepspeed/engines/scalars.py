"""Parameters without a dimension (a temperature, CLIP's ``logit_scale``), which DeepSpeed cannot handle.

DeepSpeed 0.19 views what it broadcasts as bytes, and a tensor without a dimension has no such view; it
multiplies gradients in place with a tensor of one dimension. These parameters have one dimension while it does so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@functools.cache
def allow_scalars() -> None:
    """Let DeepSpeed's engines, partitioning and ``GatheredParameters`` take parameters without a dimension."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

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

    @functools.wraps(gathered_exit)
    def exit_gathered(self: Any, *args: Any) -> None:
        for one in getattr(self, "params", None) or ():
            if not one.ndim and self.src_rank is not None:
                one.data = one.data.view(1)  # until it is partitioned
        gathered_exit(self, *args)

    DeepSpeedEngine._broadcast_model, DeepSpeedEngine.clip_fp32_gradients = broadcast_model, clip_fp32_gradients
    Init._zero_init_param = zero_init_param
    GatheredParameters.__exit__ = exit_gathered


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
