"""State of optimizers over a sharded model: saved by parameter name, restored with what a checkpoint has of it.

Saving reads, and steps no optimizer: one that has not stepped yet has no state in its checkpoint, as on one device.
Restoring takes what is there: parameters are frozen and unfrozen between two runs, options are added to optimizers
between two releases.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, zeros
from torch.optim import Optimizer

from ....checkpoint.names import clean_name
from ....state.rendezvous import store_messages
from ...sharded_tensors.shards import FlatLayout, FlatShard, part_of
from ...upstream.torch_core import all_gather_single
from ..flat_params import layouts_of, units_of
from ..settings import FullState

_log = logging.getLogger(__name__)
_STEP = "step"


def optimizer_state(
    module: nn.Module, optimizer: Optimizer, order: Mapping[str, int], full: FullState | None
) -> dict[str, Any]:
    """Return the optimizer's state; every rank calls it.

    Sharded, it is keyed by parameter name. Full, it is where ``full`` says and has the form of
    ``torch.optim.Optimizer.state_dict()`` over the plain module (numbered parameters), so that plain Lightning can load
    it; the names stand beside in each group's ``param_names``, as torch itself writes them.

    Args:
        module: What ``Engine.state_dict_module`` returns.
        optimizer: Over its parameters.
        order: Each parameter's place before sharding.
        full: Where the full one is, as a rule on rank 0 alone; None for the sharded one.
    """
    layout = Layout(module)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    names = _plain_names(layout, module, optimizer, order)
    if full is None:
        states = layout.collect(optimizer, lambda tensor: tensor, shards=True)
        return {
            "state": states,
            "param_groups": [{**group, "params": own} for group, own in zip(groups, names, strict=True)],
        }
    nowhere = full.rank0_only and dist.get_rank() != 0

    def keep(tensor: Tensor) -> Tensor | None:
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if nowhere:
            return None
        return tensor.cpu() if full.offload_to_cpu and tensor.device.type != "cpu" else tensor.clone()

    states = layout.collect(optimizer, keep, shards=False)
    return {} if nowhere else _numbered(states, groups, names)


def _plain_names(layout: Layout, module: nn.Module, optimizer: Optimizer, order: Mapping[str, int]) -> list[list[str]]:
    """Return the names in each group of ``optimizer`` as the plain module would have them."""
    places = {parameter: place for place, parameter in enumerate(module.parameters())}
    return [
        _in_plain_order(list(chain.from_iterable(layout.names_of(group["params"]))), group["params"], places, order)
        for group in optimizer.param_groups
    ]


def _in_plain_order(
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    places: Mapping[nn.Parameter, int],
    order: Mapping[str, int],
) -> list[str]:
    """Put one group's names, which follow each other as FSDP1's flat parameters do, in the order of the plain module.

    An optimizer over ``[*head.parameters(), *encoder.parameters()]`` keeps its order: what is put in order is each run
    of parameters that are in the sharded module's order.

    Raises:
        RuntimeError: If the names in a flat parameter cannot be determined.
    """
    counts = [len(parameter._fqns) if isinstance(parameter, FlatParameter) else 1 for parameter in parameters]
    if not any(isinstance(parameter, FlatParameter) for parameter in parameters):
        return list(names)
    if sum(counts) != len(names):
        raise RuntimeError(
            f"FSDP's flat parameters hold {sum(counts)} parameters, but the optimizer's state has {len(names)}."
        )
    runs: list[list[str]] = []
    last, rest = math.inf, iter(names)
    for parameter, count in zip(parameters, counts, strict=True):
        if places[parameter] < last:
            runs.append([])
        runs[-1] += islice(rest, count)
        last = places[parameter]
    return [name for run in runs for name in sorted(run, key=lambda name: order[clean_name(name)])]


def _numbered(states: States, groups: Sequence[dict[str, Any]], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the running numbers that ``Optimizer.state_dict()`` uses in the place of names.

    Args:
        states: By name.
        groups: Their options.
        names: Of each group, in the order in which they are to be numbered.
    """
    number = {name: index for index, name in enumerate(chain.from_iterable(names))}
    return {
        "state": {number[name]: states[name] for name in number if name in states},
        "param_groups": [
            {**group, "params": [number[name] for name in own], "param_names": list(own)}
            for group, own in zip(groups, names, strict=True)
        ],
    }


def restore_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    stored: Mapping[str, Any],
    fill: Callable[[dict[str, Any]], None],
    *,
    num_steps: int | None,
) -> None:
    """Restore an optimizer from a sharded checkpoint.

    A parameter without state in the checkpoint (frozen when it was saved, say) starts anew; one that is frozen now gets
    its state all the same. A missing ``step`` is that of the other parameters. All of this is logged.

    Args:
        module: What ``Engine.state_dict_module`` returns.
        optimizer: Over its parameters.
        stored: DCP's metadata by names in the checkpoint: ``state.NAME.exp_avg``, ``param_groups.0.lr`` and so on.
        fill: Loads what is stored into a state dict.
        num_steps: Number of optimizer steps so far, where every ``step`` is missing.

    Raises:
        ValueError: If the checkpoint is of another optimizer.
    """
    layout = Layout(module)
    template: dict[str, Any] = {"state": {}, "param_groups": _group_templates(stored)}
    keys = _keys_by_name(stored)
    for parameter, name in _named_parameters(layout, optimizer):
        for full_key in keys.get(name, ()):
            key, metadata = full_key.removeprefix(f"state.{name}."), stored[full_key]
            size = getattr(metadata, "size", None)  # of a tensor; else bytes
            place = 0 if size is None else layout.template(parameter, name, size, metadata.properties.dtype)
            template["state"].setdefault(name, {})[key] = place
    fill(template)
    groups = template["param_groups"]
    _restore(layout, optimizer, template["state"], groups, num_steps, has_states=bool(keys))


def _keys_by_name(stored: Collection[str]) -> dict[str, list[str]]:
    """Return the keys of states by whatever may be the parameter's name in them: up to any of their dots."""
    found: dict[str, list[str]] = defaultdict(list)
    for key in stored:
        if key.startswith("state."):
            parts = key.split(".")
            for end in range(2, len(parts)):
                found[".".join(parts[1:end])].append(key)
    return found


def _group_templates(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for name, metadata in stored.items():
        if name.startswith("param_groups."):
            _, index, key = name.split(".", 2)
            size = getattr(metadata, "size", None)  # of a tensor, such as a learning rate; else bytes
            place = 0 if size is None else torch.zeros(size, dtype=metadata.properties.dtype)
            groups.setdefault(int(index), {})[key] = place
    return [groups[index] for index in sorted(groups)]


def restore_full_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    order: Mapping[str, int],
    *,
    num_steps: int | None,
) -> None:
    """Restore an optimizer from the full state in memory, numbered or by name, as `restore_optimizer` does.

    Args:
        module: What ``Engine.state_dict_module`` returns.
        optimizer: Over its parameters.
        state: From the checkpoint.
        order: Each parameter's place before sharding.
        num_steps: Number of optimizer steps so far, where every ``step`` is missing.

    Raises:
        ValueError: If the checkpoint is of another optimizer.
    """
    layout = Layout(module)
    names = _stored_names(state, layout, module, optimizer, order)
    states = {names[key]: dict(value) for key, value in state["state"].items()}
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in state["param_groups"]]
    _restore(layout, optimizer, states, groups, num_steps, has_states=bool(states))


def _stored_names(
    state: Mapping[str, Any], layout: Layout, module: nn.Module, optimizer: Optimizer, order: Mapping[str, int]
) -> dict[Any, str]:
    """Return a parameter's name for each number, by ``param_names`` or else as the plain optimizer numbers them.

    The names may be those in a part of the module, over which the optimizer was built: then the numbers count.

    Raises:
        ValueError: If the checkpoint numbers another number of parameters than the optimizer has.
    """
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return {number: number for number in numbers}
    names = [name for group in groups for name in group.get("param_names", ())]
    if {name for _, name in _named_parameters(layout, optimizer)}.isdisjoint(names):
        names = list(chain.from_iterable(_plain_names(layout, module, optimizer, order)))
    if len(names) != len(numbers):
        raise ValueError(
            f"The checkpoint's optimizer has {len(numbers)} parameters, this one {len(names)}. "
            "Build the optimizer over the same parameters as when the checkpoint was saved."
        )
    return dict(zip(numbers, names, strict=True))


def _named_parameters(layout: Layout, optimizer: Optimizer) -> list[tuple[nn.Parameter, str]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = zip(parameters, layout.names_of(parameters), strict=True)
    return [(parameter, name) for parameter, names in named for name in names]


def _restore(
    layout: Layout,
    optimizer: Optimizer,
    states: dict[str, dict[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    num_steps: int | None,
    *,
    has_states: bool,
) -> None:
    named = {name: parameter for parameter, name in _named_parameters(layout, optimizer)}
    _complete(optimizer, named, states, num_steps, has_states=has_states)
    group_of = {name: group for group in groups for name in group["params"]}
    for group in optimizer.param_groups:
        for name in chain.from_iterable(layout.names_of(group["params"])):
            if name in group_of:
                options = group_of[name].items()
                group.update({key: value for key, value in options if key not in ("params", "param_names")})
                break
    layout.restore(optimizer, states)  # where a step lies depends on the options


def _complete(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    states: dict[str, dict[str, Any]],
    num_steps: int | None,
    *,
    has_states: bool,
) -> None:
    """Fill in missing steps, and log what is missing else.

    Args:
        optimizer: Over the parameters.
        parameters: By name.
        states: Of the parameters that have any.
        num_steps: See `restore_optimizer`.
        has_states: Whether the checkpoint has any states, of these parameters or of others.

    Raises:
        ValueError: If a part of a parameter's state other than the step is missing.
    """
    group_of = {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    keys_of = cache(partial(_state_keys, optimizer))
    expected = {name: keys_of(group_of[id(one)], one.ndim) for name, one in parameters.items()}
    anew = [name for name in parameters if not states.get(name)]
    without_step = []
    for name in parameters:
        missing = sorted(expected[name] - set(states[name])) if states.get(name) else []
        if missing == [_STEP]:
            without_step.append(name)
        elif missing:
            raise ValueError(
                f"The checkpoint has no {', '.join(missing)} of the optimizer's state for {name!r}. Did the saving "
                "run use another optimizer, or other options? Use the same ones, or load only the weights."
            )
    if without_step:
        step = _common_step(states, num_steps)
        for name in without_step:
            states[name][_STEP] = torch.tensor(step)
    if dist.get_rank() == 0:
        if has_states and (anew := [name for name in anew if expected[name]]):
            _log.warning("The checkpoint has no optimizer state for %s: it starts from scratch.", ", ".join(anew))
        if without_step:
            _log.warning(
                "The optimizer state of %s has no step: the step of the other parameters is used.",
                ", ".join(without_step),
            )


def _state_keys(optimizer: Optimizer, number: int, ndim: int) -> set[str]:
    """Return the names of the states of a group's parameter, found by a step on one of its own; none if that fails."""
    parameter = nn.Parameter(torch.zeros([2] * ndim))
    parameter.grad = torch.zeros_like(parameter)
    twin = copy.copy(optimizer)
    twin.param_groups = [{**optimizer.param_groups[number], "params": [parameter], "capturable": False, "fused": False}]
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, {})
    try:
        type(optimizer).step(twin)
    except Exception:  # noqa: BLE001 (an optimizer of one's own may want more than that: then nothing is checked)
        return set()
    return {key for key, value in twin.state[parameter].items() if value is not None}


def _common_step(states: Mapping[str, Mapping[str, Any]], num_steps: int | None) -> float:
    """Return how often parameters have been stepped, for those that do not say.

    Raises:
        ValueError: If that cannot be determined: with another step, Adam's corrections would be wrong.
    """
    known = [float(values[_STEP]) for values in states.values() if _STEP in values]
    if not known and num_steps is None:
        raise ValueError("The checkpoint has neither a step count for any parameter nor a global_step.")
    return max(known, default=float(num_steps or 0))


# ------------------------------------------------------------------------------------------------
# An optimizer's state by the model's parameter names, for every kind of sharding, without stepping the optimizer.
#
# An optimizer over FSDP2's parameters, or over ignored ones, keeps state in their own form. Over FSDP1's it keeps state
# of pieces of flat parameters: shards of a state are those pieces, a full one is put together here, a unit and a kind
# of state at a time.


States = dict[str, dict[str, Any]]
"""By parameter name, what the optimizer keeps of it."""
Descriptions = list[dict[str, Any]]
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
    """The places of a sharded model's parameters.

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
        descriptions = [_describe(unit, optimizer) for unit, _ in self.units]
        if any(unit._handle.uses_sharded_strategy for unit, _ in self.units):
            descriptions = store_messages().gather_then_broadcast(descriptions, _merged, "collecting optimizer states")
        for (unit, names), known in zip(self.units, descriptions, strict=True):
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
                    f"The optimizer's parameter {index} (shape {tuple(parameter.shape)}) is not a parameter of the "
                    "trained model: its state cannot be saved or restored."
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
                mesh = parameter.device_mesh
                return zeros(*shape, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
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
        value = part_of(value, parameter)
    moved = value.to(local.device, dtype)
    return moved.clone() if moved is value else moved


# ---------------------------------------------------------------------- FSDP1's units
def _pieces(unit: Any) -> list[Any]:
    return list(unit._handle.flat_param._shard_param_infos)


def _local_shard(unit: Any) -> Tensor:
    shard: Tensor = unit._handle.flat_param._local_shard
    return shard


def _held(unit: Any, optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """Return the optimizer's state of each parameter in ``unit``, or of the flat one that they lie in."""
    flat_param = unit._handle.flat_param
    if flat_param._params is None:
        return [optimizer.state.get(flat_param, {})] * len(flat_param._fqns)
    return [optimizer.state.get(parameter, {}) for parameter in flat_param._params]


def _describe(unit: Any, optimizer: Optimizer) -> Descriptions:
    """Return this rank's part of the state of each parameter in a sharded ``unit``."""
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
    """Return the message about one part of a state for the others."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return _Scalar(value.dtype, value.item()) if type(value) is Tensor else value.cpu()
    return value.dtype if value.numel() == numel else _Misfit(tuple(value.shape))


def _received(value: Any) -> Any:
    """Return the value or the tensor without dimensions that `_kind` has recorded, as the caller's own."""
    if isinstance(value, _Scalar):
        return value.tensor()
    return value.clone() if isinstance(value, Tensor) else value


def _merged(ranks: Sequence[Sequence[Descriptions]]) -> list[Descriptions]:
    """Return the states of all units once all ranks have reported; the first report of a value counts."""
    merged: list[Descriptions] = []
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
        f"The optimizer's state of {name!r} has a part with the shape {tuple(shape)}: FSDP1 supports only state with "
        "the shape of its parameter. Use fsdp_version=2 for this optimizer."
    )


def _collect_unit(
    unit: Any, names: Sequence[str], optimizer: Optimizer, descriptions: Descriptions, keep: Keep, shards: bool
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
    for index, (name, known) in enumerate(zip(names, descriptions, strict=True)):
        for key, value in known.items():
            if isinstance(value, _Misfit):
                raise ValueError(_misfit(name, value.shape))
            if isinstance(value, torch.dtype):
                by_key.setdefault((key, value), []).append(index)
            else:
                states.setdefault(name, {})[key] = _received(value)
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
        if name not in states or parameter not in group_of:
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
    """Return this rank's part of a state's entry: a range, or all of it (``whole``).

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
