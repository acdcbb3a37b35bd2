"""Steps of element-wise optimizers on this rank's shards, as plain tensors.

Each operation on a DTensor goes through DTensor's dispatch, which takes longer than the operation itself on a shard of
usual size. An optimizer that treats each element alone needs nothing of what the dispatch does. So the class's ``step``
sees local tensors, and its ``foreach`` or ``fused`` way is open to it on any device. Before and after the step, in
hooks, closures and checkpoints, parameters, gradients and states are DTensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from ..sharded_tensors.shards import dtensor_of
from .steps import Step, unhooked_step

_FUSED_ON_CPU = (Adam, AdamW)
"""Not SGD: torch 2.13's is wrong in half precision, and fails where some parameters have no momentum yet."""
_FUSED_DTYPES = (torch.float32, torch.float64)
_NOTHING = object()
_WITH_PARAMETERS = frozenset({"param_groups", "state", "step"})
"""Attributes of an optimizer whose parameters `LocalShardStep` replaces."""


def can_step_locally(optimizer: Optimizer) -> bool:
    """Return whether the class's own ``step`` is what steps, and finds tensors in its groups and states alone."""
    step: Any = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    if step is not None and step is not type(optimizer).step:  # a compiled one, or the user's
        return False
    return not any(_holds_tensors(value) for name, value in vars(optimizer).items() if name not in _WITH_PARAMETERS)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values())) or any(map(_holds_tensors, value))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor | Optimizer | nn.Module)


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two lists have the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


class LocalShardStep(Step):
    """Lets an element-wise optimizer step on the local tensors of DTensors.

    Args:
        optimizer: Over sharded parameters, and maybe others.
        other_shapes: Keys of states that are no shards even where they have a shard's shape.
    """

    def __init__(self, optimizer: Optimizer, other_shapes: frozenset[Any] = frozenset()) -> None:
        super().__init__(optimizer)
        self._other_shapes = other_shapes
        self._parameters: list[Any] = []
        """All of the optimizer's."""
        self._shards: list[Tensor] = []
        self._locals: list[Tensor] = []
        """The step's own tensors, in the memory of the shards; parameters that are not sharded."""
        self._local_of: dict[int, Tensor] = {}
        self._parameter_of: dict[int, Any] = {}
        """Each by the other's ``id``: a tensor's hash takes a call of Python."""
        self._is_fusible = False
        self._states: Any = None
        """The optimizer's own ``state``, while ``_plain`` replaces it."""
        self._plain: defaultdict[Any, Any] = defaultdict(dict)
        """The states that the step sees instead; empty outside of steps, so that users can free the states' memory."""
        self._emptied: dict[int, dict[Any, Any]] = {}
        """Its values, by the ``id`` of their keys: a thousand made anew in each step bring on a garbage collection."""
        self._options: list[dict[str, Any]] = []
        """Of each group, while others replace them."""

    @override
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        losses: list[Any] = []

        def evaluate() -> Any:
            if losses:
                return losses.pop()
            self._leave()
            try:
                return closure()  # type: ignore[misc] # there is one
            finally:
                self._enter()

        if closure is not None:
            with torch.enable_grad():
                losses.append(closure())
        try:
            self._enter()
            return unhooked_step(self._optimizer, None if closure is None else evaluate)
        finally:
            self._leave()

    # ------------------------------------------------------------------ before the class's step
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _enter(self) -> None:
        """Replace the optimizer's DTensors by plain tensors."""
        optimizer = self._optimizer
        self._find_parameters()
        gradients = [_local_gradient(one, one.grad) for one in self._parameters]
        for local, gradient in zip(self._locals, gradients, strict=True):
            local.grad = gradient
        local_of = self._local_of
        plain: defaultdict[Any, Any] = defaultdict(dict)
        for key, state in optimizer.state.items():
            local = local_of.get(id(key), key)
            if isinstance(key, DTensor):
                own = self._emptied.setdefault(id(local), {})
                for name, value in state.items():
                    own[name] = value._local_tensor if type(value) is DTensor else value
                state = own
            plain[local] = state
        self._states, self._plain, optimizer.state = optimizer.state, plain, plain
        is_fusible = self._is_fusible and all(one is None or one.is_contiguous() for one in gradients)
        self._options, locals_left = [], iter(self._locals)
        for group in optimizer.param_groups:
            faster = {"fused": True} if is_fusible and _may_fuse(group) else {}
            self._options.append({name: group[name] for name in ("params", *faster)})
            group.update(faster, params=list(islice(locals_left, len(group["params"]))))

    def _find_parameters(self) -> None:
        parameters: list[Any] = [one for group in self._optimizer.param_groups for one in group["params"]]
        shards: list[Tensor] = [one._local_tensor if isinstance(one, DTensor) else one for one in parameters]
        if _are_same(parameters, self._parameters) and _are_same(shards, self._shards):
            return
        self._parameters, self._shards = parameters, shards
        self._locals = [_local_parameter(*each) for each in zip(parameters, shards, strict=True)]
        self._local_of = {id(one): local for one, local in zip(parameters, self._locals, strict=True)}
        self._parameter_of = {id(local): one for one, local in zip(parameters, self._locals, strict=True)}
        self._emptied = {}
        self._is_fusible = type(self._optimizer) in _FUSED_ON_CPU and all(
            one.device.type == "cpu" and one.dtype in _FUSED_DTYPES and one.is_contiguous() for one in shards
        )

    # ------------------------------------------------------------------ after it
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _leave(self) -> None:
        """Undo `_enter`, and keep what the step has changed."""
        if self._states is None:
            return
        optimizer, states = self._optimizer, self._states
        for group, options in zip(optimizer.param_groups, self._options, strict=False):
            group.update(options)
        optimizer.state, self._states = states, None
        for local, parameter in zip(self._locals, self._parameters, strict=True):
            if local is not parameter:
                local.grad = None
        self._restore_states(states)
        self._plain = defaultdict(dict)

    def _restore_states(self, states: dict[Any, Any]) -> None:
        """Write the states that the step has left back to the optimizer."""
        parameter_of = self._parameter_of
        for local, plain in self._plain.items():
            parameter = parameter_of.get(id(local), local)
            if not isinstance(parameter, DTensor):
                states[parameter] = plain
                continue
            state = states.setdefault(parameter, {})
            for name, value in plain.items():
                before = state.get(name, _NOTHING)
                if before is not value and getattr(before, "_local_tensor", _NOTHING) is not value:
                    state[name] = self._as_sharded(name, value, parameter)
            if len(state) > len(plain):
                for name in [name for name in state if name not in plain]:
                    del state[name]
            self._emptied[id(local)] = plain
            plain.clear()
        if len(states) > len(self._plain):
            left = {parameter_of.get(id(local), local) for local in self._plain}
            for key in [key for key in states if key not in left]:
                del states[key]

    def _as_sharded(self, name: Any, value: Any, parameter: DTensor) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or name in self._other_shapes:
            return value
        if value.shape != parameter.to_local().shape:
            return value
        return dtensor_of(value, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def _local_parameter(parameter: Any, shard: Tensor) -> Tensor:
    if parameter is shard:
        return shard
    local = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    vars(local).update(vars(parameter))  # such as a mark of one without weight decay
    return local


def _local_gradient(parameter: Any, gradient: Tensor | None) -> Tensor | None:
    if not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def _may_fuse(group: Mapping[str, Any]) -> bool:
    """Return whether a group's user has left it to torch how to step; it takes a loop over tensors on CPUs."""
    is_chosen = any(group.get(name) is not None for name in ("foreach", "fused")) or group.get("differentiable")
    return not is_chosen and not any(isinstance(value, Tensor) for value in group.values())
