"""FSDP1: `FullyShardedDataParallel`, a wrapper module around each unit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from typing_extensions import override

from .engine import Engine
from .settings import FSDP1Settings

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_KEPT_AFTER_FORWARD = {
    ShardingStrategy.FULL_SHARD: ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class FSDP1Engine(Engine[FSDP1Settings]):
    """Shards through ``torch.distributed.fsdp.FullyShardedDataParallel``."""

    version = 1
    model_key = "model"

    @override
    def _shard(self, model: nn.Module, units: list[nn.Module], ignored: set[nn.Module]) -> nn.Module:
        chosen = set(units)

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return recurse or module in chosen

        settings = self.settings
        with warnings.catch_warnings():
            # One process, and NO_SHARD on request: the user knows, and torch says it for every unit.
            warnings.filterwarnings("ignore", ".*NO_SHARD.*")
            return FullyShardedDataParallel(
                model,
                device_mesh=self.mesh,
                sharding_strategy=self._sharding_strategy(),
                # Shards of a CPU model are in host memory already, and torch 2.13 fails to pin them without a GPU.
                cpu_offload=CPUOffload(offload_params=settings.cpu_offload and self.device.type != "cpu"),
                auto_wrap_policy=policy if units else None,
                backward_prefetch=settings.backward_prefetch,
                mixed_precision=self._mixed_precision(),
                ignored_modules=[module for module in ignored if module is not model],
                param_init_fn=settings.param_init_fn,
                device_id=self.device,
                sync_module_states=settings.sync_module_states,
                forward_prefetch=settings.forward_prefetch,
                limit_all_gathers=settings.limit_all_gathers,
                use_orig_params=settings.use_orig_params,
            )

    def _sharding_strategy(self) -> ShardingStrategy:
        """Return the strategy that fits the mesh.

        Raises:
            ValueError: If a hybrid strategy has no two-dimensional mesh, or the other way round.
        """
        strategy, hybrid_mesh = self.settings.sharding_strategy, self.mesh.ndim == 2
        if not self.settings.reshard_during_accumulation:  # these stay gathered through no_sync()
            strategy = _KEPT_AFTER_FORWARD.get(strategy, strategy)
        if (strategy in _HYBRID) != hybrid_mesh:
            raise ValueError(
                f"sharding_strategy={strategy.name} and a mesh of shape {tuple(self.mesh.shape)} do not fit. Hybrid "
                "strategies need device_mesh=(replicate, shard), and such a mesh needs HYBRID_SHARD(_ZERO2)."
            )
        return strategy

    def _mixed_precision(self) -> MixedPrecision | None:
        precision = self.settings.precision
        if precision.param_dtype is precision.reduce_dtype is precision.buffer_dtype is None:
            return None
        return MixedPrecision(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            buffer_dtype=precision.buffer_dtype,
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_root_forward_inputs,
        )

    @override
    def reshard(self, root: nn.Module) -> None:
        pass  # FSDP1 keeps the identity of its parameters, gathered or not

    @override
    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        return _as_fsdp(root).no_sync()

    @override
    def clip_grad_norm(
        self, root: nn.Module, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        with warnings.catch_warnings():
            # A rank whose shards happen to be all padding has no gradient: right, and not worth a warning.
            warnings.filterwarnings("ignore", "Called FSDP.clip_grad_norm_.*no gradients")
            return _as_fsdp(root).clip_grad_norm_(max_norm, norm_type)

    @override
    def grad_scaler(self) -> torch.amp.GradScaler:
        return ShardedGradScaler(device=self.device.type)

    @override
    def state_dict_module(self, root: nn.Module) -> nn.Module:
        return root  # only the FSDP root can switch all its units to another state-dict type


def _as_fsdp(root: nn.Module) -> FullyShardedDataParallel:
    if not isinstance(root, FullyShardedDataParallel):
        raise TypeError(f"expected the FSDP1 root that prepare() returned, got {type(root).__name__}.")
    return root
