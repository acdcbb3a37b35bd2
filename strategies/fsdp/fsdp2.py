"""FSDP2: `fully_shard`, which turns parameters into DTensors and hooks the units in place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from typing_extensions import override

from .engine import Engine
from .gradients import clip_to_norm, gradients_of
from .root import ShardedRoot
from .settings import FSDP2Settings


class FSDP2Engine(Engine[FSDP2Settings]):
    """Shards through ``torch.distributed.fsdp.fully_shard``."""

    version = 2
    model_key = "state_dict"

    @override
    def _shard(self, model: nn.Module, units: list[nn.Module], ignored: set[nn.Module]) -> nn.Module:
        root = model if isinstance(model, FSDPModule) else self._root_of(model)
        common: dict[str, Any] = {"mesh": self.mesh, "offload_policy": self._offload_policy()}
        ignored_params = {parameter for module in ignored for parameter in module.parameters()}
        if ignored_params:  # an argument of torch 2.7 and later
            common["ignored_params"] = ignored_params
        # What stays gathered through a window must not be freed by its forward passes either.
        reshard = self.settings.reshard_after_forward and self.settings.reshard_during_accumulation
        policy = self._mp_policy(is_root=False)
        for unit in units:
            if not isinstance(unit, FSDPModule):
                fully_shard(unit, reshard_after_forward=reshard, mp_policy=policy, **common)
        if not isinstance(root, FSDPModule):
            # No reshard_after_forward: torch keeps the root gathered, whose parameters backward needs first.
            fully_shard(root, mp_policy=self._mp_policy(is_root=True), **common)
        if self.settings.forward_prefetch:
            _prefetch_in_order([unit for unit in units if isinstance(unit, FSDPModule)])
        return root

    def _root_of(self, model: nn.Module) -> nn.Module:
        return ShardedRoot(model)

    def _mp_policy(self, *, is_root: bool) -> MixedPrecisionPolicy:
        precision = self.settings.precision
        return MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            output_dtype=precision.output_dtype,
            cast_forward_inputs=precision.cast_root_forward_inputs if is_root else precision.cast_forward_inputs,
        )

    def _offload_policy(self) -> OffloadPolicy:
        if not self.settings.cpu_offload:
            return OffloadPolicy()
        pin = self.settings.pin_memory
        # Pinning on a machine without an accelerator raises (torch 2.13).
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu" if pin is None else pin)

    @override
    def reshard(self, root: nn.Module) -> None:
        for module in root.modules():  # a forward without backward leaves at least the root's unit gathered
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    @contextmanager
    def no_sync(self, root: nn.Module) -> Iterator[None]:
        sharded = _as_fsdp(root)
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(self.settings.reshard_during_accumulation)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)
            sharded.set_reshard_after_backward(True)

    @override
    def clip_grad_norm(
        self, root: nn.Module, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        return clip_to_norm(gradients_of(parameters), max_norm, norm_type)

    @override
    def grad_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type)

    @override
    def state_dict_module(self, root: nn.Module) -> nn.Module:
        return root.module if isinstance(root, ShardedRoot) else root


def _as_fsdp(root: nn.Module) -> FSDPModule:
    if not isinstance(root, FSDPModule):
        raise TypeError(f"expected the FSDP2 root that prepare() returned, got {type(root).__name__}.")
    return root


def _prefetch_in_order(units: list[FSDPModule]) -> None:
    """Let each unit gather the next one's parameters: registration order is the order of a static graph."""
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
