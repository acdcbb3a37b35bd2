"""An optimizer's state by the names of the model's parameters, whichever way sharding cut them; nobody is stepped.

An optimizer over FSDP2's parameters, or over ignored ones, keeps state in their own form. Over FSDP1's it keeps state
of pieces of flat parameters: shards of a state are those pieces, a full one is put together here, a unit and a kind of
state at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from ....checkpoint.names import clean_name
from ...common.flat_shards import FlatLayout, FlatShard
from ...common.store_messages import store_messages
from ...upstream.torch_core import all_gather_single
from ..engines.flat_layouts import layouts_of
from ..engines.fsdp1_units import units_of

States = dict[str, dict[str, Any]]
"""By parameter name, what the optimizer keeps of it."""
Told = list[dict[str, Any]]
"""Of each parameter of a unit, what the optimizer keeps of it: dtypes of tensors, and values of all else."""
Keep = Callable[[Tensor], Any]
"""Takes a full tensor, or a shard, and returns what the checkpoint is to hold."""


@dataclass(frozen=True)
class _Misfit:
    """Stands for the dtype of a state that has not the parameter's shape, which a flat parameter has no place for."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Scalar:
    """Stands for a tensor without dimensions (a ``step``), which takes eighty times as long to pickle."""

    dtype: torch.dtype
    value: complex
    """As Python's number of its kind: exact."""

    def tensor(self) -> Tensor:
        """Return it, on the CPU, whatever the default device is."""
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")


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
        self._places: dict[str, FlatLayout | None] = {}
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
            shards: Whether ``keep`` gets shards of what FSDP1 has cut, and not the full ones.

        Raises:
            ValueError: On every rank, if FSDP1 has cut a state that is not of its parameter's shape.
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

    def template(self, parameter: nn.Parameter, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor to load a stored state into, sharded where its parameter is.

        Args:
            parameter: An optimizer's.
            name: One of its names.
            shape: Of the state.
            dtype: Of the state.

        Raises:
            ValueError: If FSDP1 has cut the parameter, and the state has another shape.
        """
        shape = torch.Size(shape)
        if isinstance(parameter, DTensor):
            if shape == parameter.shape:
                return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if shape:
                return _zeros(shape, dtype, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
        unit = self._in_units.get(parameter)
        if unit is None or not shape or not unit._handle.uses_sharded_strategy:
            return torch.zeros(shape, dtype=dtype)
        place = self._place(unit, name)
        if place is None:
            return torch.zeros(shape, dtype=dtype)
        if shape != place.shape:
            raise ValueError(_misfit(name, shape))
        return FlatShard(torch.zeros(place.count, dtype=dtype, device=_local_shard(unit).device), place)

    def _place(self, unit: Any, name: str) -> FlatLayout | None:
        if name not in self._places:
            [names] = [names for one, names in self.units if one is unit]
            self._places.update(zip(names, layouts_of(unit), strict=True))
        return self._places[name]

    def restore(self, optimizer: Optimizer, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the optimizer the state that `collect` returned; every rank calls it.

        Args:
            optimizer: What it keeps of its parameters is replaced.
            states: Full tensors, or shards.
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


# ---------------------------------------------------------------------- FSDP1's units
def _pieces(unit: Any) -> list[Any]:
    return list(unit._handle.flat_param._shard_param_infos)


def _local_shard(unit: Any) -> Tensor:
    shard: Tensor = unit._handle.flat_param._local_shard
    return shard


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
    is_flat, whole = unit._handle.flat_param._params is None, _local_shard(unit).numel()
    return [
        {key: _kind(value, whole if is_flat else info.numel_in_shard) for key, value in own.items()}
        if info.in_shard
        else {}
        for own, info in zip(_held(unit, optimizer), _pieces(unit), strict=True)
    ]


def _kind(value: Any, numel: int) -> Any:
    """Return what the others are told of one part of a state."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return _Scalar(value.dtype, value.item()) if type(value) is Tensor else value.cpu()
    return value.dtype if value.numel() == numel else _Misfit(tuple(value.shape))


def _untold(value: Any) -> Any:
    """Return what `_kind` has told of a value or a tensor without dimensions, the caller's own."""
    if isinstance(value, _Scalar):
        return value.tensor()
    return value.clone() if isinstance(value, Tensor) else value


def _merged(ranks: Sequence[Sequence[Told]]) -> list[Told]:
    """Return what is known of all units when all ranks have told theirs; the first to know something is believed."""
    merged: list[Told] = []
    for of_unit in zip(*ranks, strict=True):
        merged.append([])
        for of_parameter in zip(*of_unit, strict=True):
            known: dict[str, Any] = {}
            for one in reversed(of_parameter):
                known.update(one)
            for one in of_parameter:
                known.update({key: value for key, value in one.items() if isinstance(value, _Misfit)})
            merged[-1].append(known)
    return merged


def _misfit(name: str, shape: Sequence[int]) -> str:
    return (
        f"The optimizer's state of {name!r} has a part with the shape {tuple(shape)}: FSDP1 keeps state of a "
        "parameter's own shape alone. Use fsdp_version=2 for this optimizer."
    )


def _collect_unit(
    unit: Any, names: Sequence[str], optimizer: Optimizer, told: Told, keep: Keep, shards: bool
) -> States:
    handle = unit._handle
    flat_param, held = handle.flat_param, _held(unit, optimizer)
    states: States = {}
    if not handle.uses_sharded_strategy:
        for index, (name, own) in enumerate(zip(names, held, strict=True)):
            for key, value in own.items():
                if flat_param._params is None and isinstance(value, Tensor) and value.dim():
                    value = list(handle._get_unflat_views(value.flatten()))[index]
                states.setdefault(name, {})[key] = _own(value, keep)
        return states
    by_key: dict[tuple[str, torch.dtype], list[int]] = {}
    for index, (name, known) in enumerate(zip(names, told, strict=True)):
        for key, value in known.items():
            if isinstance(value, _Misfit):
                raise ValueError(_misfit(name, value.shape))
            if isinstance(value, torch.dtype):
                by_key.setdefault((key, value), []).append(index)
            else:
                states.setdefault(name, {})[key] = _untold(value)
    layouts = layouts_of(unit) if shards else []
    for (key, dtype), indices in sorted(by_key.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        pieces = {index: _piece(unit, index, held[index].get(key), dtype) for index in indices}
        if shards:
            for index, piece in pieces.items():
                place = layouts[index]
                shard = piece.reshape(flat_param._shapes[index]) if place is None else FlatShard(piece, place)
                states.setdefault(names[index], {})[key] = keep(shard)
        else:
            views = _gather_views(unit, pieces, dtype)
            for index in indices:
                states.setdefault(names[index], {})[key] = keep(views[index])
    return states


def _piece(unit: Any, index: int, value: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return this rank's elements of one part of a parameter's state; zeros if it keeps none, and others do."""
    flat_param, info = unit._handle.flat_param, _pieces(unit)[index]
    count = info.numel_in_shard if info.in_shard else 0
    if value is None or not count:
        return torch.zeros(count, dtype=dtype, device=_local_shard(unit).device)
    return value.flatten().narrow(0, info.offset_in_shard if flat_param._params is None else 0, count)


def _gather_views(unit: Any, pieces: Mapping[int, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the full tensors of which the ranks have pieces, on every rank, for each parameter in a unit."""
    handle, infos = unit._handle, _pieces(unit)
    group, shard = handle.process_group, torch.zeros_like(_local_shard(unit), dtype=dtype, device=unit.compute_device)
    for index, piece in pieces.items():
        if piece.numel():
            shard.narrow(0, infos[index].offset_in_shard, piece.numel()).copy_(piece)
    full = torch.empty(group.size() * shard.numel(), dtype=dtype, device=shard.device)
    all_gather_single(full, shard, group=group)
    return list(handle._get_unflat_views(full[: handle.flat_param._unpadded_unsharded_size.numel()]))


def _restore_unit(
    unit: Any,
    names: Sequence[str],
    optimizer: Optimizer,
    group_of: Mapping[nn.Parameter, Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> None:
    handle = unit._handle
    flat_param: Any = handle.flat_param
    is_flat, flat = flat_param._params is None, dict[str, Any]()
    whole = not is_flat and not handle.uses_sharded_strategy
    for index, (name, info, layout) in enumerate(zip(names, _pieces(unit), layouts_of(unit), strict=True)):
        parameter = flat_param if is_flat else flat_param._params[index]
        if name not in states or parameter not in group_of or not (is_flat or info.in_shard):
            continue
        own = {key: _own_part(value, name, layout, whole=whole) for key, value in states[name].items()}
        if not is_flat:
            group = group_of[parameter]
            optimizer.state[parameter] = {key: _like(value, key, parameter, group) for key, value in own.items()}
            continue
        for key, value in own.items():
            if not _has_dims(value):
                flat[key] = max(flat[key], value) if key in flat and key == "step" else value
            elif info.in_shard:
                buffer = flat.setdefault(key, torch.zeros_like(flat_param._local_shard))
                buffer.narrow(0, info.offset_in_shard, value.numel()).copy_(value)
    if flat:
        group = group_of[flat_param]
        for key in {key for name in names for key in states.get(name, {})}:
            flat.setdefault(key, torch.zeros_like(flat_param._local_shard))
        optimizer.state[flat_param] = {key: _like(value, key, flat_param, group) for key, value in flat.items()}


def _has_dims(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _own_part(value: Any, name: str, layout: FlatLayout | None, *, whole: bool) -> Any:
    """Return what this rank keeps of one part of a state: a range, or all of it (``whole``).

    Raises:
        ValueError: If it has not the shape of its parameter.
    """
    if isinstance(value, FlatShard):
        return value.held
    if not _has_dims(value):
        return value
    if value.numel() != (0 if layout is None else layout.shape.numel()):
        raise ValueError(_misfit(name, value.shape))
    if layout is None:
        return value
    return value.reshape(layout.shape) if whole else layout.own_range(value)
