"""What each storage of a strategy in training is for: asked where the most is held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..common.gradients import local_tensor
from ..fsdp.engines.fsdp1_units import units_of
from ..fsdp.engines.fsdp2_units import Units
from ..upstream.torch_fake import tree_leaves
from .storages import Part

_FLAT_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
_FLAT_GRADIENTS = ("grad", "_saved_grad_shard", "_cpu_grad")
_ZERO_GATHERED = ("_ipg", "ipg_", "param_gradients_buffer", "_ds_secondary")
_ZERO_GRADIENTS = ("averaged_gradients", "_accumulated_grad", "grad_partitions", "all_grad_tensors", "param_dict")
_ZERO_MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
_ZERO_PARAMETERS = ("bit16_groups", "fp16_groups", "fp16_partitioned_groups", "parallel_partitioned", "lp_param")


def parts_of(model: nn.Module, optimizers: list[Any]) -> dict[int, Part]:
    """Return of which part storages are, by their addresses; what is not among them is told by when it was made.

    Args:
        model: What the strategy trains: the sharded root, or DeepSpeed's engine.
        optimizers: The strategy's.
    """
    found: dict[int, Part] = {}

    def tell(part: Part, tensors: Iterator[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found[local_tensor(tensor).untyped_storage()._cdata] = part

    tell("gathered", _gathered(model))
    for optimizer in optimizers:
        tell("optimizer", _states(optimizer))
        tell("optimizer", _of_zero(optimizer, _ZERO_MASTERS))
        tell("gathered", _of_zero(optimizer, _ZERO_GATHERED))
        tell("gradients", _of_zero(optimizer, _ZERO_GRADIENTS))
        tell("parameters", _of_zero(optimizer, _ZERO_PARAMETERS))
    tell("gradients", _gradients(model))
    tell("parameters", _parameters(model))
    return found


def _parameters(model: nn.Module) -> Iterator[Any]:
    parameter: Any
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_tensor") or parameter.ds_persist:
            yield parameter.data
        yield getattr(parameter, "ds_tensor", None)
    yield from model.buffers()
    for unit in units_of(model):
        yield unit._handle.flat_param._local_shard


def _gradients(model: nn.Module) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter.grad
        yield getattr(parameter, "grad_accum", None)
    for unit in units_of(model):
        yield from (getattr(unit._handle.flat_param, name, None) for name in _FLAT_GRADIENTS)
    for param in Units(model).params:
        yield param.unsharded_accumulated_grad
        unsharded = getattr(param, "_unsharded_param", None)
        yield None if unsharded is None else unsharded.grad


def _gathered(model: nn.Module) -> Iterator[Any]:
    for parameter in model.parameters():
        if hasattr(parameter, "ds_tensor"):
            yield parameter.data
    for unit in units_of(model):
        yield from (getattr(unit._handle.flat_param, name, None) for name in _FLAT_GATHERED)
    for param in Units(model).params:
        yield from param.all_gather_outputs
        yield getattr(param, "_unsharded_param", None)


def _states(optimizer: Any) -> Iterator[Any]:
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in getattr(inner, "state", {}).values():
        yield from tree_leaves(state if not isinstance(state, Mapping) else dict(state))


def _of_zero(optimizer: Any, names: tuple[str, ...]) -> Iterator[Any]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    for name, value in vars(optimizer).items():
        if any(one in name for one in names):
            yield from tree_leaves(value)
