"""Saving weights and optimizer state of a sharded model: one path for both FSDP versions.

Names are the plain parameter names, as in ``torch.distributed.checkpoint.state_dict``, and shards are boxes of full
tensors; that is what lets a checkpoint move between FSDP1, FSDP2, any number of processes, and plain PyTorch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from ....checkpoint.formats.dcp_metadata import METADATA_NAME
from ....checkpoint.names import clean_name
from ...common import modules
from ...sharded_tensors.shards import FlatShard, memory_order
from ...upstream.torch_core import tree_map_only
from ..flat_params import layouts_of, owners_of, units_of
from ..settings import FullState
from ..sharded_model import model_state_dict, named_tensors, roots_of

# ------------------------------------------------------------------------------------------------
# Full and sharded state dicts from torch.


@contextmanager
def without_torch_noise() -> Iterator[None]:
    """Hide torch 2.13's warnings about its own calls; a user can do nothing about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*_get_pg_default_device.*")
        warnings.filterwarnings("ignore", ".*Multiple backends are registered with this ProcessGroup.*")
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", ".*FSDP.state_dict_type.*", FutureWarning)
        warnings.filterwarnings("ignore", ".*NO_SHARD.*")
        yield


def state_dict_options(where: FullState | None, device: torch.device) -> StateDictOptions:
    """Return torch's options for a state dict.

    Args:
        where: A full one is to be; None for a sharded one.
        device: Where the model computes: a full tensor is gathered there, also where ``cpu_offload=True`` keeps shards
            in host memory.
    """
    # With cpu_offload, torch makes a full one on rank 0 alone.
    offload = where is not None and where.rank0_only and where.offload_to_cpu
    # FSDP1's full state dict with cpu_offload=True kills the process when its tensors are on the CPU (torch 2.13).
    return StateDictOptions(full_state_dict=where is not None, cpu_offload=offload and device.type != "cpu")


def place_full_state(state: dict[str, Any], where: FullState) -> dict[str, Any]:
    """Return a full ``state``, or nothing where rank 0 alone is to have it."""
    if where.rank0_only:
        return {} if dist.get_rank() != 0 else state
    moved = tree_map_only(torch.Tensor, torch.Tensor.cpu, state) if where.offload_to_cpu else state
    return cast("dict[str, Any]", moved)


@without_torch_noise()
def model_state(module: nn.Module, full: FullState | None, device: torch.device) -> dict[str, Any]:
    """Return the weights: shards (``full`` is None), or full tensors where it says, as a rule on rank 0 alone."""
    if full is None and has_flat_state(module):
        return flat_model_state(module)
    state = model_state_dict(module, state_dict_options(full, device), with_constants=True)
    return state if full is None else place_full_state(state, full)


def sharded_state(
    model_key: str, weights: dict[str, Any], optimizer_states: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Put together what DCP saves; Lightning's names."""
    return {model_key: weights, **{f"optimizer_{index}": state for index, state in enumerate(optimizer_states)}}


def is_sharded(path: Path) -> bool:
    """Return whether ``path`` is a folder that DCP wrote."""
    return os.path.lexists(path / METADATA_NAME)


# ------------------------------------------------------------------------------------------------
# The state dict of an FSDP1 model without any communication: each rank has ranges of parameters as they lie.


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
    roots = roots_of(module, FullyShardedDataParallel)
    original = {name: dtype for root in roots for name, dtype in _original_dtypes(module, root)}
    return {
        clean_name(name): _as_before(value, original.get(clean_name(name))) for name, value in _entries(module, "", cut)
    }


def parameter_shards(module: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Return this rank's part of each parameter, and whether it trains; nothing is communicated or copied.

    Args:
        module: Idle, of FSDP1 or FSDP2. Tied parameters are there once. Those that FSDP1 has not flattened are
            returned as they are: ``detach()`` of a DTensor takes longer than what is done with it.
    """
    cut: _Cut = {owner: {} for owner in owners_of(module)}
    prefixes = {one: f"{prefix}." if prefix else "" for prefix, one in module.named_modules()}
    found: dict[str, tuple[Tensor, bool]] = {}
    in_units: set[Tensor] = set()
    for unit in units_of(module):
        _cut_unit(unit, cut)
        flat_param = unit._handle.flat_param
        parameters = flat_param._params or [flat_param] * len(flat_param._param_infos)
        in_units.update((flat_param, *parameters))
        for (name, owner, _), parameter in zip(flat_param._param_infos, parameters, strict=True):
            found[clean_name(f"{prefixes[owner]}{name}")] = cut[owner][name], parameter.requires_grad
    for named in named_tensors(module):
        if isinstance(named.tensor, nn.Parameter) and named.tensor not in in_units:
            found[named.name] = named.tensor, named.tensor.requires_grad
    return found


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
        elif not handle.uses_sharded_strategy:
            cut[owner][name] = layout.view(shard.narrow(0, begin, layout.count), layout.boxes[0])
        else:
            cut[owner][name] = FlatShard(shard.narrow(0, begin, layout.count), layout)
    for name, owner, _, first_name, first_owner, _ in flat_param._shared_param_infos:
        cut[owner][name] = cut[first_owner][first_name]


def _entries(module: nn.Module, prefix: str, cut: _Cut) -> Iterator[tuple[str, Any]]:
    """Yield the entries of ``module.state_dict(prefix=prefix)``. Source: torch 2.13 ``nn.Module.state_dict``."""
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
    if modules.has_extra_state(module):
        own[modules.NAME] = module.get_extra_state()
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
