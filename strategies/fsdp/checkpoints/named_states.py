"""An optimizer's state by the names of the model's parameters, whichever way sharding cut them; nobody is stepped.

An optimizer over FSDP2's parameters, or over ignored ones, keeps state in their own form. Over FSDP1's it keeps state
of pieces of flat parameters, which are put together here, a unit and a kind of state at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from ....checkpoint.names import clean_name
from ...common.store_messages import store_messages
from ...upstream.torch_core import all_gather_single
from ..engines.fsdp1_units import units_of

States = dict[str, dict[str, Any]]
"""By parameter name, what the optimizer keeps of it."""
Told = list[dict[str, Any]]
"""Of each parameter of a unit, what the optimizer keeps of it: dtypes of tensors, and values of all else."""
Keep = Callable[[Tensor], Any]
"""Takes a full tensor (FSDP1's) or a DTensor, and returns what the checkpoint is to hold."""


class Layout:
    """Where the parameters of a sharded model lie.

    Args:
        module: What ``Engine.state_dict_module`` returns.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[nn.Parameter, list[str]] = {}
        """The names that each parameter an optimizer may hold stands for: several for a flat one."""
        self.units: list[tuple[Any, list[str]]] = []
        """FSDP1's units with the names of what is in them."""
        units = set(units_of(module))
        self._in_units: dict[nn.Parameter, Any] = {}
        for prefix, unit in module.named_modules():
            if isinstance(unit, FullyShardedDataParallel) and unit in units:
                names = [clean_name(f"{prefix}.{fqn}" if prefix else fqn) for fqn in unit._handle.flat_param._fqns]  # type: ignore[union-attr]
                self.units.append((unit, names))
                flat_param: Any = unit._handle.flat_param  # type: ignore[union-attr]
                if flat_param._params is None:
                    own = {flat_param: names}
                else:
                    own = {one: [name] for one, name in zip(flat_param._params, names, strict=True)}
                self.names.update(own)
                self._in_units.update(dict.fromkeys(own, unit))
        for name, parameter in module.named_parameters():
            if parameter not in self.names and not isinstance(parameter, FlatParameter):
                self.names[parameter] = [clean_name(name)]

    def collect(self, optimizer: Optimizer, keep: Keep, *, shards: bool) -> States:
        """Return the optimizer's state by name; every rank calls it.

        A parameter of which the optimizer keeps nothing yet is left out. Values that are no tensors, and tensors
        without dimensions (a ``step``), are the parameter's own copies.

        Args:
            optimizer: Over parameters of the model.
            keep: What becomes of each tensor.
            shards: Whether ``keep`` gets shards (DTensors) of what FSDP1 has cut, and not the full ones.
        """
        states: States = {}
        for parameter, (name, *_) in self.names.items():
            held = optimizer.state.get(parameter) if parameter not in self._in_units else None
            if held:
                states[name] = {key: _own(value, keep) for key, value in held.items()}
        told = [_told(unit, optimizer) for unit, _ in self.units]
        if any(unit._handle.uses_sharded_strategy for unit, _ in self.units):
            told = store_messages().through_rank_zero(told, _merged, "collecting optimizer states")
        for (unit, names), known in zip(self.units, told, strict=True):
            states.update(_collect_unit(unit, names, optimizer, known, keep, shards))
        return states

    def names_of(self, parameters: Sequence[nn.Parameter]) -> list[list[str]]:
        """Return the names of each of an optimizer's parameters.

        Raises:
            KeyError: If one is no parameter of the model.
        """
        for index, parameter in enumerate(parameters):
            if parameter not in self.names:
                raise KeyError(
                    f"The optimizer's parameter {index} (shape {tuple(parameter.shape)}) is no parameter of the model "
                    "that is trained: nothing can be saved or restored of it."
                )
        return [self.names[parameter] for parameter in parameters]

    def template(self, parameter: nn.Parameter, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of ``shape`` to load a stored state of ``parameter`` into, sharded where that is."""
        shape = torch.Size(shape)
        if isinstance(parameter, DTensor):
            if shape == parameter.shape:
                return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if shape:
                return _zeros(shape, dtype, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
        unit = self._in_units.get(parameter)
        if unit is not None and shape and unit._handle.uses_sharded_strategy:
            return _zeros(shape, dtype, *_sharding(unit))
        return torch.zeros(shape, dtype=dtype)

    def restore(self, optimizer: Optimizer, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the optimizer the state that `collect` returned; every rank calls it.

        Args:
            optimizer: What it keeps of its parameters is replaced.
            states: Full tensors, or DTensors.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
                [name, *_] = self.names[parameter]
                if parameter not in self._in_units and name in states:
                    optimizer.state[parameter] = {
                        key: _like(value, key, parameter, group) for key, value in states[name].items()
                    }
        group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        for unit, names in self.units:
            _restore_unit(unit, names, optimizer, group_of, states)


def _own(value: Any, keep: Keep) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.dim() == 0 and not isinstance(value, DTensor) else keep(value)


def _like(value: Any, key: str, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """Return ``value`` in the form that ``parameter`` has, as ``Optimizer.load_state_dict`` does.

    Source: torch 2.13 ``Optimizer._process_value_according_to_param_policy``.
    """
    if not isinstance(value, Tensor):
        return value
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if key == "step":
        on_device = group.get("capturable") or group.get("fused")
        return value.to(local.device, torch.float32) if on_device else value.clone()
    both_float = parameter.is_floating_point() and value.is_floating_point()
    dtype = parameter.dtype if both_float else value.dtype
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
        mesh = parameter.device_mesh
        value = distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    moved = value.to(local.device, dtype)
    return moved.clone() if moved is value else moved


def _zeros(shape: torch.Size, dtype: torch.dtype, mesh: Any, placements: Any) -> DTensor:
    from torch.distributed.tensor import zeros

    return zeros(*shape, dtype=dtype, device_mesh=mesh, placements=placements)


def _sharding(unit: Any) -> tuple[Any, list[Any]]:
    mesh = unit._device_mesh
    return mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)]


# ---------------------------------------------------------------------- FSDP1's units
def _pieces(unit: Any) -> list[Any]:
    return list(unit._handle.flat_param._shard_param_infos)


def _held(unit: Any, optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """Return what the optimizer keeps of each parameter in ``unit``, or of the flat one that they lie in."""
    flat_param = unit._handle.flat_param
    if flat_param._params is None:
        return [optimizer.state.get(flat_param, {})] * len(flat_param._fqns)
    return [optimizer.state.get(parameter, {}) for parameter in flat_param._params]


def _told(unit: Any, optimizer: Optimizer) -> Told:
    """Return what this rank knows of the state of each parameter in a sharded ``unit``."""
    if not unit._handle.uses_sharded_strategy:
        return []
    return [
        {
            key: value if not isinstance(value, Tensor) else value.dtype if value.dim() else value.cpu()
            for key, value in own.items()
        }
        if info.in_shard
        else {}
        for own, info in zip(_held(unit, optimizer), _pieces(unit), strict=True)
    ]


def _merged(ranks: Sequence[Sequence[Told]]) -> list[Told]:
    """Return what is known of all units when all ranks have told theirs; the first to know something is believed."""
    merged: list[Told] = []
    for of_unit in zip(*ranks, strict=True):
        merged.append([])
        for of_parameter in zip(*of_unit, strict=True):
            known: dict[str, Any] = {}
            for one in reversed(of_parameter):
                known.update(one)
            merged[-1].append(known)
    return merged


def _collect_unit(
    unit: Any, names: Sequence[str], optimizer: Optimizer, told: Told, keep: Keep, shards: bool
) -> States:
    handle = unit._handle
    flat_param, held = handle.flat_param, _held(unit, optimizer)
    is_flat = flat_param._params is None
    states: States = {}
    if not handle.uses_sharded_strategy:
        for index, (name, own) in enumerate(zip(names, held, strict=True)):
            for key, value in own.items():
                if is_flat and isinstance(value, Tensor) and value.dim():
                    value = list(handle._get_unflat_views(value.flatten()))[index]
                states.setdefault(name, {})[key] = _own(value, keep)
        return states
    infos = _pieces(unit)
    by_key: dict[tuple[str, torch.dtype], list[int]] = {}
    for index, (name, known) in enumerate(zip(names, told, strict=True)):
        for key, value in known.items():
            if isinstance(value, torch.dtype):
                by_key.setdefault((key, value), []).append(index)
            else:
                states.setdefault(name, {})[key] = value.clone() if isinstance(value, Tensor) else value
    for (key, dtype), indices in sorted(by_key.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        shard = torch.zeros(flat_param._local_shard.numel(), dtype=dtype, device=unit.compute_device)
        for index in indices:
            info, value = infos[index], held[index].get(key)
            if info.in_shard and value is not None:
                place = shard.narrow(0, info.offset_in_shard, info.numel_in_shard)
                begin = info.offset_in_shard if is_flat else 0
                place.copy_(value.flatten().narrow(0, begin, info.numel_in_shard))
        views = _gather_views(unit, shard)
        for index in indices:
            states.setdefault(names[index], {})[key] = keep(_cut(unit, views[index]) if shards else views[index])
    return states


def _gather_views(unit: Any, shard: Tensor) -> list[Tensor]:
    """Return the parameters' parts of something laid out as the unit's flat parameter, in full on every rank."""
    handle = unit._handle
    group = handle.process_group
    full = torch.empty(group.size() * shard.numel(), dtype=shard.dtype, device=shard.device)
    all_gather_single(full, shard, group=group)
    return list(handle._get_unflat_views(full[: handle.flat_param._unpadded_unsharded_size.numel()]))


def _cut(unit: Any, full: Tensor) -> Tensor:
    """Return this rank's rows of ``full``, for a sharded checkpoint."""
    mesh, placements = _sharding(unit)
    part = distribute_tensor(full.contiguous(), mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        part.to_local().clone(), mesh, placements, shape=part.shape, stride=part.stride(), run_check=False
    )


def _restore_unit(
    unit: Any,
    names: Sequence[str],
    optimizer: Optimizer,
    group_of: Mapping[nn.Parameter, Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> None:
    handle = unit._handle
    flat_param: Any = handle.flat_param
    sharded = handle.uses_sharded_strategy
    flat: dict[str, Any] = {}
    for index, (name, info) in enumerate(zip(names, _pieces(unit), strict=True)):
        parameter = flat_param if flat_param._params is None else flat_param._params[index]
        if name not in states or parameter not in group_of:
            continue
        own: dict[str, Any] = {}
        for key, value in states[name].items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if not (isinstance(full, Tensor) and full.dim()):
                own[key] = full
            elif full.numel() != flat_param._numels[index]:
                raise ValueError(
                    f"The optimizer's state {key!r} of {name!r} has the shape {tuple(full.shape)}: FSDP1 keeps state "
                    "of a parameter's own shape alone. Use fsdp_version=2 for this optimizer."
                )
            elif not sharded:
                own[key] = full.reshape(flat_param._shapes[index])
            elif info.in_shard:
                begin, end = info.intra_param_start_idx, info.intra_param_end_idx
                own[key] = full.flatten()[begin : end + 1]
        if flat_param._params is not None:
            if info.in_shard or not sharded:
                group = group_of[parameter]
                optimizer.state[parameter] = {key: _like(value, key, parameter, group) for key, value in own.items()}
            continue
        for key, value in own.items():
            if not (isinstance(value, Tensor) and value.dim()):
                flat[key] = max(flat[key], value) if key in flat and key == "step" else value
                continue
            buffer = flat.setdefault(key, torch.zeros_like(flat_param._local_shard))
            offset = info.offset_in_shard if sharded else sum(flat_param._numels[:index])
            buffer.narrow(0, offset, value.numel()).copy_(value.flatten())
    if flat:
        group = group_of[flat_param]
        for key in {key for name in names for key in states.get(name, {})}:
            flat.setdefault(key, torch.zeros_like(flat_param._local_shard))
        optimizer.state[flat_param] = {key: _like(value, key, flat_param, group) for key, value in flat.items()}
