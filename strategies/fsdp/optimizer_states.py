"""State of optimizers over a sharded model: saved by parameter name, restored with what a checkpoint has of it.

torch's own functions want a checkpoint to hold exactly the state that the optimizer has now. Parameters are frozen and
unfrozen between two runs, though, and options are added to optimizers between two releases.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FlatParameter
from torch.optim import Optimizer

from ...checkpoint.names import clean_name
from .settings import WholeState
from .state_dicts import put_where, state_dict_options, without_torch_noise

_log = logging.getLogger(__name__)
_STEP = "step"


@without_torch_noise()
def optimizer_state(
    module: nn.Module, optimizer: Optimizer, order: Mapping[str, int], whole: WholeState | None
) -> dict[str, Any]:
    """Return the optimizer's state.

    Sharded, it is keyed by parameter name. Full, it is where ``whole`` says and has the form of
    ``torch.optim.Optimizer.state_dict()`` over the plain module (numbered parameters), so that plain Lightning can load
    it; the names stand beside in each group's ``param_names``, as torch itself writes them.

    Args:
        module: What ``Engine.state_dict_module`` returns.
        optimizer: Over its parameters.
        order: Each parameter's place before sharding.
        whole: Where the full one is, as a rule on rank 0 alone; None for the sharded one.
    """
    options = state_dict_options(module, full=whole is not None, where=whole)
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=options)
    if whole is None:
        return state
    state = put_where(state, whole)
    return _numbered(state, _plain_names(state, module, optimizer, order)) if state else state


def _plain_names(
    state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer, order: Mapping[str, int]
) -> list[list[str]]:
    """Return the names in each group of ``state``, torch's of ``optimizer``, as the plain module would have them."""
    places = {parameter: place for place, parameter in enumerate(module.parameters())}
    return [
        _in_plain_order(named["params"], group["params"], places, order)
        for named, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
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


def _numbered(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Turn parameter names into the running numbers that ``Optimizer.state_dict()`` uses.

    Args:
        state: By name.
        names: Of each group, in the order in which they are to be numbered.
    """
    number = {name: index for index, name in enumerate(chain.from_iterable(names))}
    groups = [
        {**group, "params": [number[name] for name in own], "param_names": list(own)}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    return {"state": {number[name]: _own(value) for name, value in state["state"].items()}, "param_groups": groups}


def _own(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return one parameter's state with scalars of its own.

    FSDP1 hands the ``step`` of a flat parameter to all parameters in it, as one tensor; an optimizer over the original
    parameters would count it up once for each of them.
    """
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for name, value in state.items()
    }


def _named(
    state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer, order: Mapping[str, int]
) -> dict[str, Any]:
    """Turn running numbers back into parameter names, by ``param_names`` or else as the plain optimizer numbers them.

    Raises:
        ValueError: If the checkpoint numbers another number of parameters than the optimizer has.
    """
    groups = [dict(group) for group in state["param_groups"]]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return {**state, "state": {name: _own(value) for name, value in state["state"].items()}}
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    else:
        current = get_optimizer_state_dict(module, optimizer)
        names = list(chain.from_iterable(_plain_names(current, module, optimizer, order)))
    if len(names) != len(numbers):
        raise ValueError(
            f"The checkpoint's optimizer has {len(numbers)} parameters, this one {len(names)}. "
            "Build the optimizer over the same parameters as when the checkpoint was saved."
        )
    name_of = dict(zip(numbers, names, strict=True))
    for group in groups:
        group["params"] = [name_of[number] for number in group["params"]]
        group.pop("param_names", None)
    return {
        "state": {name_of[number]: _own(value) for number, value in state["state"].items()},
        "param_groups": groups,
    }


def restore_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    stored: Collection[str],
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
        stored: Names in the checkpoint: ``state.NAME.exp_avg``, ``param_groups.0.lr`` and so on.
        fill: Loads what is stored into a state dict; the rest keeps its values.
        num_steps: Number of optimizer steps so far, where every ``step`` is missing.
    """

    def has(name: str, key: str) -> bool:
        return f"state.{name}.{key}" in stored

    with _trainable(module, optimizer, {one.removeprefix("state.").rpartition(".")[0] for one in stored}):
        state = get_optimizer_state_dict(module, optimizer)
        held = cast("dict[str, dict[str, Any]]", state["state"])
        gaps = _find_gaps({name: list(values) for name, values in held.items()}, has)
        fill(state)
        for name in (*gaps.without_step, *gaps.anew):  # what starts anew may share one of FSDP1's flat parameters
            if _STEP in held[name]:
                held[name][_STEP] = _like(held[name][_STEP], _common_step(held, has, num_steps))
        set_optimizer_state_dict(module, optimizer, state)
    _start_anew(module, optimizer, gaps.anew)


def restore_full_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    order: Mapping[str, int],
    options: StateDictOptions,
    *,
    num_steps: int | None,
) -> None:
    """Restore an optimizer from the whole state in memory, numbered or by name, as `restore_optimizer` does.

    Args:
        module: What ``Engine.state_dict_module`` returns.
        optimizer: Over its parameters.
        state: From the checkpoint.
        order: Each parameter's place before sharding.
        options: How torch is to take a whole state.
        num_steps: Number of optimizer steps so far, where every ``step`` is missing.

    Raises:
        ValueError: If the checkpoint numbers another number of parameters than the optimizer has.
    """
    named = _named(state, module, optimizer, order)
    held: dict[str, dict[str, Any]] = named["state"]

    def has(name: str, key: str) -> bool:
        return key in held.get(name, ())

    with _trainable(module, optimizer, held):
        present = cast("dict[str, dict[str, Any]]", get_optimizer_state_dict(module, optimizer)["state"])
        gaps = _find_gaps({name: list(values) for name, values in present.items()}, has)
        for name in gaps.without_step:
            held[name][_STEP] = _like(present[name][_STEP], _common_step(held, has, num_steps))
        if not held:  # nothing to cut into shards, which torch insists on for a whole state
            options = StateDictOptions()
        set_optimizer_state_dict(module, optimizer, named, options=replace(options, strict=False))
    _start_anew(module, optimizer, gaps.anew)


@dataclass(frozen=True)
class _Gaps:
    """What an optimizer keeps now and a checkpoint does not have."""

    anew: list[str]
    """Parameters of which there is nothing."""
    without_step: list[str]
    """Parameters of which there is all but the step."""


def _find_gaps(present: Mapping[str, Collection[str]], has: Callable[[str, str], bool]) -> _Gaps:
    """Compare and log.

    Raises:
        ValueError: If a part of a parameter's state other than the step is missing.
    """
    anew, without_step = [], []
    for name, keys in present.items():
        missing = [key for key in keys if not has(name, key)]
        if missing and len(missing) == len(keys):
            anew.append(name)
        elif missing == [_STEP]:
            without_step.append(name)
        elif missing:
            raise ValueError(
                f"The checkpoint has no {', '.join(missing)} of the optimizer's state for {name!r}. Was another "
                "optimizer, or one with other options, used? Use the same, or load the weights alone."
            )
    if dist.get_rank() == 0:
        if anew:
            _log.warning("No optimizer state in the checkpoint for %s: it starts anew.", ", ".join(anew))
        if without_step:
            _log.warning("No step in the optimizer state of %s: that of the others is taken.", ", ".join(without_step))
    return _Gaps(anew, without_step)


def _common_step(
    held: Mapping[str, Mapping[str, Any]], has: Callable[[str, str], bool], num_steps: int | None
) -> float:
    """Return how often parameters have been stepped, for those that do not say.

    Raises:
        ValueError: If that cannot be told: with another step, Adam's corrections would be wrong.
    """
    known = [float(values[_STEP]) for name, values in held.items() if has(name, _STEP)]
    if not known and num_steps is None:
        raise ValueError("The checkpoint says for no parameter how often it was stepped, and has no global_step.")
    return max(known, default=float(num_steps or 0))


def _like(present: Any, step: float) -> Any:
    return torch.full_like(present, step) if isinstance(present, torch.Tensor) else type(present)(step)


@contextmanager
def _trainable(module: nn.Module, optimizer: Optimizer, names: Collection[str]) -> Iterator[None]:
    """Let frozen parameters whose state is stored be trainable for the while: torch passes over the others.

    FSDP1's flat parameters, which have other names, stay frozen and go without their state.
    """
    ours = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [
        parameter
        for name, parameter in module.named_parameters()
        if parameter in ours and not parameter.requires_grad and clean_name(name) in names
    ]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _start_anew(module: nn.Module, optimizer: Optimizer, names: Collection[str]) -> None:
    for name, parameter in module.named_parameters():
        if clean_name(name) in names:
            optimizer.state.pop(parameter, None)
