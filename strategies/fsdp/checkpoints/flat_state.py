"""The state dict of an FSDP1 model without any communication: each rank has ranges of parameters as they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from ....checkpoint.names import clean_name
from ...common import extra_states
from ...common.flat_shards import FlatShard, memory_order
from ..engines.flat_layouts import layouts_of
from ..engines.fsdp1_units import owners_of, roots_of, units_of

_Cut = dict[nn.Module, dict[str, Tensor]]
"""By the module that has them, weights in units."""
_OWN_HOOKS = ("torch.distributed.", "accelight.")
"""Modules of hooks that bring the state dicts of FSDP and of its wrappers into form."""


def has_flat_state(module: nn.Module) -> bool:
    """Return whether `flat_model_state` has the same for ``module`` as torch's state dict, which gathers each unit.

    It has not where a unit is not sharded, nor where somebody has a say in a state dict with sharded weights in it (a
    hook, a method that is overridden): to them, torch shows full weights.
    """
    units = units_of(module)
    if not units or any(not _is_cut(unit) for unit in units):
        return False
    owners = owners_of(module)
    return all(_is_plain(one) for one in module.modules() if not owners.isdisjoint(one.modules()))


def _is_cut(unit: Any) -> bool:
    handle = unit._handle
    flat_param = handle.flat_param
    strides = zip(flat_param._shapes, flat_param._strides, strict=True)
    return (
        handle.uses_sharded_strategy
        and all(one is None for one in flat_param._param_extensions)
        and all(memory_order(*one) is not None for one in strides)
    )


def _is_plain(module: nn.Module) -> bool:
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return (
        type(module).state_dict is nn.Module.state_dict
        and type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        and "state_dict" not in vars(module)
        and all((getattr(hook, "__module__", None) or "").startswith(_OWN_HOOKS) for hook in hooks)
    )


def flat_model_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of an idle model for which `has_flat_state`; nothing is communicated or copied.

    Weights in units are `FlatShard`; all else is as in torch's.
    """
    cut: _Cut = {owner: {} for owner in owners_of(module)}
    for unit in units_of(module):
        _cut_unit(unit, cut)
    original = {name: dtype for root in roots_of(module) for name, dtype in _original_dtypes(module, root)}
    return {
        clean_name(name): _as_before(value, original.get(clean_name(name))) for name, value in _entries(module, "", cut)
    }


def _cut_unit(unit: Any, cut: _Cut) -> None:
    handle = unit._handle
    if handle._use_orig_params and not handle._skip_writeback_check:
        handle._writeback_orig_params()  # `parameter.data = other`: torch looks at it before it gathers
    flat_param = handle.flat_param
    shard = getattr(flat_param, "_local_shard", flat_param.data).detach()
    infos = flat_param._shard_param_infos
    for (name, owner, _), layout, info, shape in zip(
        flat_param._param_infos, layouts_of(unit), infos, flat_param._shapes, strict=True
    ):
        begin = info.offset_in_shard if info.in_shard else 0
        if layout is None:
            cut[owner][name] = shard.new_empty(shape)
        else:
            cut[owner][name] = FlatShard(shard.narrow(0, begin, layout.count), layout)
    for name, owner, _, first_name, first_owner, _ in flat_param._shared_param_infos:
        cut[owner][name] = cut[first_owner][first_name]


def _entries(module: nn.Module, prefix: str, cut: _Cut) -> Iterator[tuple[str, Any]]:
    """Yield what ``module.state_dict(prefix=prefix)`` has. Source: torch 2.13 ``nn.Module.state_dict``."""
    if cut.keys().isdisjoint(module.modules()):
        yield from module.state_dict(prefix=prefix).items()
        return
    own: dict[str, Any] = {
        name: parameter.detach()
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, FlatParameter)
    }
    own.update(cut.get(module, {}))
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            own[name] = buffer.detach()
    if extra_states.has_extra_state(module):
        own[extra_states.NAME] = module.get_extra_state()
    for name, value in own.items():
        yield f"{prefix}{name}", value
    for name, child in module._modules.items():
        if child is not None:
            yield from _entries(child, f"{prefix}{name}.", cut)


def _original_dtypes(module: nn.Module, root: FullyShardedDataParallel) -> Iterator[tuple[str, torch.dtype]]:
    """Yield the names of buffers that FSDP1 keeps in another dtype, each with the dtype that it had."""
    if not root._mixed_precision_enabled_for_buffers():
        return
    prefix = next(name for name, one in module.named_modules() if one is root)
    known: dict[str, torch.dtype] = root._buffer_name_to_orig_dtype
    for name in root._buffer_names:
        if name in known and name not in root._ignored_buffer_names:
            yield clean_name(f"{prefix}.{name}" if prefix else name), known[name]


def _as_before(value: Any, dtype: torch.dtype | None) -> Any:
    return value if dtype is None or not isinstance(value, Tensor) else value.to(dtype)
