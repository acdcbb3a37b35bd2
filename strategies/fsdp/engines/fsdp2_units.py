"""The units of an FSDP2 model as torch keeps them: their states, their groups, and what a backward leaves in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from ...common.global_tensors import NoAccess
from ...common.gradients import refuse_second_derivatives
from ...common.pending_maximum import BeginMax
from ...upstream.torch_fsdp2 import (
    add_zeros,
    disable_dynamo_once,
    disabled_once,
    drop_partly_reduced,
    drop_unreduced_gradient,
    groups_of_state,
    label_quickly,
    settle_dtypes,
)
from ..steps.changed_weights import GroupChanges
from ..steps.outside_calls import other_parameters
from ..steps.same_path import SamePath
from ..units.parameter_hooks import run_hooks_on


class Units:
    """The units of a sharded root, looked up once: on each step that costs more than what is done with them.

    Args:
        root: Sharded; no unit may come or go afterwards.
    """

    def __init__(self, root: nn.Module) -> None:
        states = [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]
        self.states: list[Any] = list(dict.fromkeys(states))
        """Torch's state of each unit, parents before children."""
        self.groups: list[Any] = [group for state in self.states for group in groups_of_state(state)]
        """Torch's parameter groups, the same order on every rank."""
        self.params: list[Any] = [param for group in self.groups for param in group.fsdp_params]
        """Torch's records of the parameters in them."""
        self._root = root
        self.root_groups: list[Any] = [
            group for unit in roots_of(root) for group in groups_of_state(unit._get_fsdp_state())
        ]
        """Groups of the outermost units."""

    def places(self) -> dict[Any, tuple[nn.Module, str]]:
        """Return in which module, and under which name, each parameter is registered; all of them are sharded now."""
        own = {id(each): (module, name) for module in self._root.modules() for name, each in module._parameters.items()}
        return {param: own[id(param.sharded_param)] for param in self.params}

    def reshard(self) -> None:
        """Leave none gathered."""
        for group in self.groups:
            if not group.is_sharded:
                group.reshard()

    def let_hooks_run(self) -> None:
        """Let users' hooks on parameters run in the backward that comes."""
        for param in self.params:
            if param.sharded_param._backward_hooks and (leaf := getattr(param, "_unsharded_param", None)) is not None:
                run_hooks_on(leaf, param)

    def forget_forwards(self) -> None:
        """Forget forwards without a backward (validation): they are no part of the next step's order."""
        for state in self.states:
            state._comm_ctx.post_forward_order.clear()
        for group in self.groups:
            group._post_forward_indices.clear()

    def drop_unreduced(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget the gradients that no backward has reduced yet.

        Args:
            parameters: Sharded parameters whose gradients to forget; None for all.
        """
        if parameters is None:
            for group in self.groups:
                drop_partly_reduced(group)
        held = [
            param
            for param in self.params
            if (leaf := getattr(param, "_unsharded_param", None)) is not None
            and (leaf.grad is not None or param.unsharded_accumulated_grad is not None)
        ]
        if not held:
            return
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        for param in held:
            if chosen is None or id(param.sharded_param) in chosen:
                drop_unreduced_gradient(param)


class UnitAccess(NoAccess):
    """The `ShardAccess` of FSDP2, whose parameters are DTensors.

    Args:
        units: Of the sharded root.
    """

    def __init__(self, units: Units) -> None:
        self._params = {id(param.sharded_param): param for param in units.params}

    def is_unreduced(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter has a gradient that the ranks have not reduced yet."""
        param = self._params.get(id(tensor))
        leaf = getattr(param, "_unsharded_param", None)
        return leaf is not None and (
            leaf.grad is not None or getattr(param, "unsharded_accumulated_grad", None) is not None
        )


def roots_of(root: nn.Module) -> list[FSDPModule]:
    """Return the outermost units: the root itself, or the parts that stand in its place."""
    if isinstance(root, FSDPModule):
        return [root]
    return [unit for child in root.children() for unit in roots_of(child)]


def units_by_module(root: nn.Module) -> MutableMapping[nn.Module, FSDPModule]:
    """Return the unit that gathers each module's own parameters; modules outside of all units are left out.

    By identity: the hash of a metric is another one after each update.
    """
    found: MutableMapping[nn.Module, Any] = WeakIdKeyDictionary()

    def visit(module: nn.Module, unit: FSDPModule | None) -> None:
        unit = module if isinstance(module, FSDPModule) else unit
        if unit is not None:
            found.setdefault(module, unit)
        for child in module.children():
            visit(child, unit)

    visit(root, None)
    return found


class BackwardWatch:
    """Sees which parameters a backward reached on this rank, and lets the ranks agree.

    torch reduces those parameters of a unit that have a gradient. Ranks that use different ones would add up gradients
    of different parameters, so whoever lacks a gradient contributes zeros. What none of them used is without a gradient
    afterwards, as in one process.
    """

    def __init__(self, units: Units, path: SamePath, is_in_step: Callable[[], bool]) -> None:
        self._units, self._path, self._is_in_step = units, path, is_in_step
        self._used: set[Any] = set()
        self._filled: set[Any] = set()
        self.probing = False
        """Whether this is the first training step of a fit."""
        label_quickly()
        for state in units.states:
            disable_dynamo_once(state)
        places = units.places()
        for number, group in enumerate(units.groups):
            GroupChanges(group, lambda: self.probing)
            registered = [(param, *places[param]) for param in group.fsdp_params]
            group.unshard = self._before_unshard(number, group, registered, type(group).unshard)
            group.post_backward = self._around(number, group, disabled_once(type(group).post_backward))
            group.pre_backward = partial(_first_derivatives_only, group, disabled_once(type(group).pre_backward))

    def _before_unshard(
        self, number: int, group: Any, registered: list[tuple[Any, nn.Module, str]], unshard: Callable[..., Any]
    ) -> Callable[..., Any]:
        path = self._path

        def run(async_op: bool = False) -> None:
            if group.is_sharded:
                for param, module, name in registered:
                    if module._parameters[name] is not param.sharded_param:
                        raise other_parameters(module)
            if path.at is not None and group._all_gather_result is None and not group.is_unsharded:
                path.gather(number)
            unshard(group, async_op)

        return run

    def _around(self, number: int, group: Any, post_backward: Callable[..., Any]) -> Callable[..., Any]:
        is_of_root = group in self._units.root_groups

        def run(*unused: Any) -> None:
            if self._is_in_step():  # for the gradient of an input; the backward of the step itself follows
                if not is_of_root:
                    with _not_reducing(group):
                        post_backward(group, *unused)
                return
            if group.reduce_grads:
                self._fill(number, group)
            post_backward(group, *unused)

        return run

    def _fill(self, number: int, group: Any) -> None:
        used, unused = [], []
        for param in group.fsdp_params:
            leaf = getattr(param, "_unsharded_param", None)
            if leaf is None:
                continue
            if leaf.grad is not None or param.unsharded_accumulated_grad is not None:
                used.append(param)
            elif leaf.requires_grad:
                unused.append(param)
        if not used and group._training_state.name != "PRE_BACKWARD":
            return  # no rank has come through this unit
        if used or unused:
            self._path.reduce(number)
        self._used.update(used)
        if unused:
            self._filled |= {param for param in unused if param.sharded_param.grad is None}
            add_zeros(unused)
            used += unused
        settle_dtypes(used)

    def settle(self, begin_max: BeginMax) -> None:
        """Let the ranks agree, after a backward that reduced; every rank calls it.

        Args:
            begin_max: Lets the ranks tell each other.
        """
        params, used, filled = self._units.params, self._used, self._filled
        self._used, self._filled = set(), set()
        of_all = begin_max([int(param in used) for param in params])
        if not filled:  # nothing to learn from the others
            return
        for param, anywhere in zip(params, of_all(), strict=True):
            if param in filled and not anywhere:
                param.sharded_param.grad = None


@contextmanager
def _not_reducing(group: Any) -> Iterator[None]:
    reduces, group.reduce_grads = group.reduce_grads, False
    try:
        yield
    finally:
        group.reduce_grads = reduces


def _first_derivatives_only(group: Any, pre_backward: Callable[..., None], *args: Any) -> None:
    refuse_second_derivatives(group._module_fqn)
    pre_backward(group, *args)


def can_be_unit(module: nn.Module) -> bool:
    """Return whether torch can put FSDP2's class before the module's own, as `fully_shard` does.

    A class of several bases whose objects Python lays out in another way cannot take it; `fully_shard` finds that out
    when the module is half sharded.
    """
    own: Any = type(module)
    if isinstance(module, FSDPModule):
        return True
    try:
        module.__class__ = type(f"FSDP{own.__name__}", (FSDPModule, own), {})
    except TypeError:
        return False
    module.__class__ = own
    return True


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before FSDP2 put one of its own before it."""
    found: type[nn.Module] = type(module)
    if isinstance(module, FSDPModule) and found.__bases__[0] is FSDPModule:
        found = found.__bases__[1]
    return found
