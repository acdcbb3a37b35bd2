"""Optimizers that were made before sharding: moved over to the sharded parameters, or refused."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from ....checkpoint.names import clean_name


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter of ``model`` under every name it has, free of traces of wrappers.

    Call it before sharding, keep the result until afterwards (it keeps the parameters alive, whose identity matters),
    and hand both to `map_parameters`.
    """
    return {clean_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def map_parameters(before: Mapping[str, nn.Parameter], model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return original to present parameter, by name, for `fsdp2_switch_optimizer_parameters`.

    Args:
        before: Result of `parameters_by_name` before sharding.
        model: The same module, sharded since.
    """
    after = parameters_by_name(model)
    return {parameter: after[name] for name, parameter in before.items() if name in after}


class EarlyParameters:
    """The parameters of a model before sharding, for optimizers that may hold them.

    It keeps none of them alive: without such an optimizer they are freed.

    Args:
        model: Not sharded yet.
        kept: Those that sharding leaves alone.
    """

    def __init__(self, model: nn.Module, kept: Container[nn.Parameter]) -> None:
        named = parameters_by_name(model).items()
        self._parameters = {name: TensorWeakRef(parameter) for name, parameter in named if parameter not in kept}

    def switch(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Let ``optimizer`` hold the parameters of ``model``, sharded by now, as `fsdp2_switch_optimizer_parameters`.

        Raises:
            KeyError: If one of its parameters is no parameter of the model, or now part of a flat one.
        """
        before = {name: parameter for name, weak in self._parameters.items() if (parameter := weak()) is not None}
        mapping = map_parameters(before, model)
        mapping.update({parameter: parameter for parameter in model.parameters()})
        fsdp2_switch_optimizer_parameters(optimizer, mapping)


def fsdp2_switch_optimizer_parameters(
    optimizer: Optimizer, mapping: Mapping[int, nn.Parameter] | Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Let ``optimizer`` hold the sharded parameters instead of the original ones, in place.

    Groups, their options and their order stay. State that exists already (Adagrad makes it at once) is cut into the
    same shards; no process communicates. A parameter that is sharded already stays as it is.

    Args:
        optimizer: Made over the original parameters.
        mapping: Original to sharded parameter. Keys are the original parameters themselves (see `map_parameters`) or
            their ``data_ptr()``. Prefer the parameters: all meta and all empty tensors have the address 0, and the
            address of memory that was freed is given out again.

    Raises:
        KeyError: If a parameter has no sharded one, or address and shape do not tell which; nothing is changed then.
            Training on would leave the model's weights as they are.
        RuntimeError: If a parameter has state that cannot be cut into shards; nothing is changed then.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``; different here: keys may be parameters, and state is carried along.
    """
    table: dict[Any, nn.Parameter] = dict(mapping)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    taken: set[nn.Parameter] = set()
    problems: list[str] = []
    for described, parameter in _parameters_of(optimizer):
        sharded = _look_up(parameter, table)
        if sharded is None:
            problems.append(f"{described} has no sharded parameter")
        elif sharded.shape != parameter.shape:
            problems.append(f"{described} is mapped to a parameter of shape {tuple(sharded.shape)}")
        elif sharded in taken:
            problems.append(f"{described} is mapped to the same sharded parameter as another one")
        else:
            replaced[parameter] = sharded
            taken.add(sharded)
    if problems:
        raise KeyError(
            f"{type(optimizer).__name__} cannot be switched to the sharded parameters: {'; '.join(problems)}. "
            "Make the optimizer over parameters of the model that is sharded, or make it after sharding (under the "
            "Trainer: in configure_optimizers()). FSDP1 keeps parameters with use_orig_params=True only."
        )
    carried = {
        sharded: _carry(optimizer.state[parameter], parameter, sharded)
        for parameter, sharded in replaced.items()
        if parameter is not sharded and parameter in optimizer.state
    }
    for group in optimizer.param_groups:
        group["params"][:] = [replaced[parameter] for parameter in group["params"]]  # LBFGS keeps the list itself
    for parameter, sharded in replaced.items():
        if sharded in carried:
            del optimizer.state[parameter]
            optimizer.state[sharded] = carried[sharded]


def _parameters_of(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with the words that an error needs."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for index, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            called = f" {name!r}" if name is not None else ""
            yield f"parameter{called} (group {group_index}, index {index}, shape {tuple(parameter.shape)})", parameter


def _look_up(parameter: nn.Parameter, table: Mapping[Any, nn.Parameter]) -> nn.Parameter | None:
    if parameter in table:
        return table[parameter]
    if any(parameter is sharded for sharded in table.values()):
        return parameter
    if isinstance(parameter, DTensor):  # one of another model: it has no address of its own
        return None
    address = parameter.data_ptr()
    return table.get(address) if address else None


def _carry(state: Mapping[str, Any], parameter: nn.Parameter, sharded: nn.Parameter) -> dict[str, Any]:
    """Return ``state`` of ``parameter`` as state of ``sharded``."""
    carried: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:  # such as the step
            carried[key] = value
        elif value.is_meta or value.shape != parameter.shape or isinstance(value, DTensor):
            raise RuntimeError(
                f"The optimizer's state {key!r} (shape {tuple(value.shape)}, on {value.device}) of a parameter of "
                f"shape {tuple(parameter.shape)} cannot be cut into shards. Make the optimizer after sharding."
            )
        elif isinstance(sharded, DTensor):
            mesh, placements = sharded.device_mesh, sharded.placements
            part = distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
            # Offloaded shards live elsewhere than the mesh.
            carried[key] = part.to(sharded.to_local().device) if sharded.to_local().device != part.device else part
        else:
            carried[key] = value.to(sharded.device)
    return carried
