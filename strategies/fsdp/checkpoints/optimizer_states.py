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
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ....checkpoint.names import clean_name
from ..config.settings import FullState
from .named_states import Layout, States

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
        RuntimeError: If it cannot be told which names a flat parameter has.
    """
    counts = [len(parameter._fqns) if isinstance(parameter, FlatParameter) else 1 for parameter in parameters]
    if not any(isinstance(parameter, FlatParameter) for parameter in parameters):
        return list(names)
    if sum(counts) != len(names):
        raise RuntimeError(f"FSDP's flat parameters hold {sum(counts)} parameters, the optimizer's state {len(names)}.")
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
    _restore(layout, optimizer, template["state"], template["param_groups"], num_steps)


def _keys_by_name(stored: Collection[str]) -> dict[str, list[str]]:
    """Return the keys of states by whatever may be the parameter's name in them: up to any of their dots."""
    found: dict[str, list[str]] = defaultdict(list)
    for key in stored:
        if key.startswith("state."):
            parts = key.split(".")
            for end in range(2, len(parts)):
                found[".".join(parts[1:end])].append(key)
    return found


def _group_templates(stored: Collection[str]) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for name in stored:
        if name.startswith("param_groups."):
            _, index, key = name.split(".", 2)
            groups.setdefault(int(index), {})[key] = 0
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
    _restore(layout, optimizer, states, groups, num_steps)


def _stored_names(
    state: Mapping[str, Any], layout: Layout, module: nn.Module, optimizer: Optimizer, order: Mapping[str, int]
) -> dict[Any, str]:
    """Return a parameter's name for each number, by ``param_names`` or else as the plain optimizer numbers them.

    Raises:
        ValueError: If the checkpoint numbers another number of parameters than the optimizer has.
    """
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return {number: number for number in numbers}
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    else:
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
) -> None:
    names = [name for _, name in _named_parameters(layout, optimizer)]
    _complete(optimizer, names, states, num_steps)
    layout.restore(optimizer, states)
    group_of = {name: group for group in groups for name in group["params"]}
    for group in optimizer.param_groups:
        for name in chain.from_iterable(layout.names_of(group["params"])):
            if name in group_of:
                options = group_of[name].items()
                group.update({key: value for key, value in options if key not in ("params", "param_names")})
                break


def _complete(
    optimizer: Optimizer, names: Sequence[str], states: dict[str, dict[str, Any]], num_steps: int | None
) -> None:
    """Fill in missing steps, and log what is missing else.

    Raises:
        ValueError: If a part of a parameter's state other than the step is missing.
    """
    wanted = _state_keys(optimizer)
    anew = [name for name in names if not states.get(name)]
    without_step = []
    for name in names:
        missing = sorted(wanted - set(states[name])) if states.get(name) else []
        if missing == [_STEP]:
            without_step.append(name)
        elif missing:
            raise ValueError(
                f"The checkpoint has no {', '.join(missing)} of the optimizer's state for {name!r}. Was another "
                "optimizer, or one with other options, used? Use the same, or load the weights alone."
            )
    if without_step:
        step = _common_step(states, num_steps)
        for name in without_step:
            states[name][_STEP] = torch.tensor(step)
    if dist.get_rank() == 0:
        if wanted and anew and len(anew) < len(names):
            _log.warning("No optimizer state in the checkpoint for %s: it starts anew.", ", ".join(anew))
        if without_step:
            _log.warning("No step in the optimizer state of %s: that of the others is taken.", ", ".join(without_step))


def _state_keys(optimizer: Optimizer) -> set[str]:
    """Return what the optimizer keeps of a parameter, found by a step on one of its own; nothing if that fails."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros_like(parameter)
    twin = copy.copy(optimizer)
    twin.param_groups = [{**optimizer.param_groups[0], "params": [parameter], "capturable": False, "fused": False}]
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
        ValueError: If that cannot be told: with another step, Adam's corrections would be wrong.
    """
    known = [float(values[_STEP]) for values in states.values() if _STEP in values]
    if not known and num_steps is None:
        raise ValueError("The checkpoint says for no parameter how often it was stepped, and has no global_step.")
    return max(known, default=float(num_steps or 0))
