"""Backwards of FSDP1: what they need to have been prepared, and which parameters they reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.gradients import refuse_second_derivatives
from ...common.pending_maximum import BeginMax
from ...upstream.torch_fsdp1 import HandleTrainingState, _post_backward_hook
from ..steps.changed_weights import FlatChanges
from ..steps.outside_calls import other_parameters
from ..steps.same_path import SamePath
from ..units.parameter_hooks import run_hooks
from .fsdp1_shards import ONE_BACKWARD
from .fsdp1_units import hook_state, units_of, waiting_units
from .fsdp1_unreduced import add_unreduced, give_gradient


def expect_backward(root: nn.Module, expected: Iterable[Any]) -> None:
    """Let the units be ready for a backward of what was computed before, whatever came in between.

    Parameters may have been frozen or thawed since, which torch 2.13 takes for a mistake (``_finalize_params``).

    Args:
        root: Sharded.
        expected: What `waiting_units` returned after the forward.

    Raises:
        RuntimeError: If another backward has run since, and has ended what the forward prepared.
    """
    if any(len(hook_state(unit)) != 2 for unit in expected):
        raise RuntimeError(
            "A backward of one's own ran between training_step() and its backward (in on_before_backward(), say): with "
            "FSDP1 it ends what the step's forward has prepared. Run it in another hook, or use fsdp_version=2."
        )
    for unit in units_of(root):
        _follow_gradients(unit._handle)
        unit._handle._reset_flat_param_grad_info_if_needed()
        flat_param: Any = unit._handle.flat_param
        if hook_state(unit) and len(hook_state(unit)) != 1 + flat_param.requires_grad:
            hook_state(unit)[-1].remove()
            del flat_param._post_backward_hook_state


class KeptGraphs:
    """Prepares units for another backward of a graph that one has kept (``retain_graph=True``).

    torch 2.13 prepares them in the forward, for one backward, which undoes it.
    """

    def __init__(self) -> None:
        self._last: dict[Any, tuple[Any, list[Any]]] = {}
        self._kept: dict[Any, tuple[Any, list[Any]]] = {}

    def begin_backward(self, root: nn.Module) -> None:
        """Note what the forward has prepared, and prepare what has been used up."""
        for unit, (node, tensors) in self._kept.items():
            flat_param: Any = unit._handle.flat_param
            unit._handle._reset_flat_param_grad_info_if_needed()
            unit._handle._needs_pre_backward_unshard = True
            if flat_param._tensors is not None:
                flat_param._tensors = list(tensors)
            if flat_param.requires_grad and not hook_state(unit):
                hook = node.register_hook(partial(_post_backward_hook, unit, unit._handle))
                flat_param._post_backward_hook_state = (node, hook)
        for unit in waiting_units(root):
            self._last[unit] = hook_state(unit)[0], list(unit._handle.flat_param._tensors or ())

    def keep(self) -> None:
        """The last backward has kept its graph."""
        self._kept.update(self._last)

    def forget(self, root: nn.Module) -> None:
        """No other backward will come: what was prepared for one is undone.

        The nodes know the parameters in C++, where Python's garbage collector does not look: kept, they would keep the
        whole model.
        """
        self._last, self._kept = {}, {}
        for unit in waiting_units(root):
            hook_state(unit)[-1].remove()
            del unit._handle.flat_param._post_backward_hook_state


def _follow_gradients(handle: Any) -> None:
    """Let a flat parameter's gradient be what its original parameters' are: cleared since, or set by the user.

    torch 2.13 looks at them where it gathers, and not where a unit stays gathered between forward and backward.
    """
    flat_param = handle.flat_param
    gradient = flat_param.grad
    if flat_param._params is None or gradient is None or not handle._skipped_use_sharded_views:
        return
    for parameter, info in zip(flat_param._params, flat_param._shard_param_infos, strict=True):
        if not info.in_shard:
            continue
        piece = gradient.narrow(0, info.offset_in_shard, info.numel_in_shard)
        if parameter.grad is None:
            piece.zero_()
        elif parameter.grad.data_ptr() != piece.data_ptr():
            piece.copy_(parameter.grad)


class BackwardWatch:
    """Sees which original parameters a backward reached on this rank, and lets the ranks agree.

    A flat parameter's gradient has zeros for those that nobody used; one process has no gradient there, so that neither
    momentum nor decay touch them.
    """

    def __init__(self, root: nn.Module, path: SamePath, is_in_step: Callable[[], bool]) -> None:
        self._units = units_of(root)
        self._used: set[tuple[int, int]] = set()
        self.without: set[tuple[int, int]] = set()
        """Units and parameters, by their numbers, that had no gradient before the last backward."""
        self.reduced: set[int] = set()
        """Ids of the parameters that have had a gradient on some rank since gradients were cleared."""
        self._prepared: set[Any] = set()
        """Units that a forward has prepared for the backward that runs, which undoes it when it ends."""
        self.probing = False
        """Whether this is the first training step of a fit."""
        self.changes: dict[int, FlatChanges] = {
            number: FlatChanges(unit._handle, lambda: self.probing)
            for number, unit in enumerate(self._units)
            if unit._handle.uses_sharded_strategy
        }
        for number, unit in enumerate(self._units):
            unit._handle._use_unsharded_views = self._around(number, unit._handle)
            unit._handle.pre_unshard = partial(_check_parameters, unit._handle)
            unit._handle._all_gather_flat_param = partial(_gather_together, unit._handle, path, number)
            unit._handle.prepare_gradient_for_backward = partial(self._prepare_gradient, unit, is_in_step)
            unit._handle.prepare_gradient_for_optim = partial(_give_gradient_back, unit._handle)

    def _around(self, number: int, handle: Any) -> Callable[..., None]:
        use_views = type(handle)._use_unsharded_views

        def run(as_params: bool) -> None:
            use_views(handle, as_params)
            for name, module, _ in handle.flat_param._param_infos:
                if name in module._parameters:  # there torch.func.functional_call puts others; torch has it twice
                    vars(module).pop(name, None)
            if self.probing and not as_params and number in self.changes:
                self.changes[number].after_unshard()
            if as_params or not torch.is_grad_enabled() or handle._training_state != HandleTrainingState.FORWARD:
                return
            owners = handle.flat_param._params or [handle.flat_param] * len(handle.flat_param._param_infos)
            for index, ((name, module, _), owner) in enumerate(
                zip(handle.flat_param._param_infos, owners, strict=True)
            ):
                view = getattr(module, name)
                if view.requires_grad:
                    arrive = partial(self._arrive, (number, index), owner if owner.requires_grad else None)
                    view.register_hook(arrive)

        return run

    def _arrive(
        self, place: tuple[int, int], owner: nn.Parameter | None, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Note a gradient; what was frozen at the forward, or is now, gets none, though the rest of its unit does."""
        if owner is None or not owner.requires_grad:
            return torch.zeros_like(gradient)
        self._used.add(place)
        return run_hooks(owner, gradient) if owner._backward_hooks else None

    def _prepare_gradient(self, unit: Any, is_in_step: Callable[[], bool]) -> None:
        """Move the gradient that a unit has aside, for the one that comes: a frozen unit gets none.

        torch 2.13 moves a frozen one's, too, and adds it to the first gradient that the unit gets when it is thawed.
        """
        handle = unit._handle
        refuse_second_derivatives(type(handle._fully_sharded_module).__name__)
        if is_in_step():
            return  # a backward of the user's own, for the gradient of an input: none of a parameter comes
        if unit in self._prepared and not hook_state(unit):
            raise RuntimeError(f"A second backward ran in the module's backward(). {ONE_BACKWARD}")
        flat_param = handle.flat_param
        if any(parameter.requires_grad for parameter in flat_param._params or [flat_param]):
            type(handle).prepare_gradient_for_backward(handle)

    def begin(self) -> None:
        """Note which parameters have no gradient before a backward."""
        self.without = {place for place, parameter in self._parameters() if parameter.grad is None}
        self._prepared = {unit for unit in self._units if hook_state(unit)}

    def settle(self, begin_max: BeginMax) -> None:
        """Let the ranks agree, after a backward that reduced; every rank calls it.

        Args:
            begin_max: Lets the ranks tell each other.

        Raises:
            RuntimeError: On every rank, if a part of a flat parameter was used by none, and the rest was.
        """
        sizes = [len(unit._handle.flat_param._param_infos) for unit in self._units]
        places = [(number, index) for number, size in enumerate(sizes) for index in range(size)]
        used, self._used = self._used, set()
        of_all = begin_max([int(place in used) for place in places])
        if len(used) < len(places):  # else there is nothing to learn from the others
            used = {place for place, anywhere in zip(places, of_all(), strict=True) if anywhere}
        for place, parameter in self._parameters():
            if place in used:
                self.reduced.add(id(parameter))
            if place not in used and place in self.without:
                parameter.grad = None
            elif place in used and not parameter.requires_grad:  # frozen within the window: torch has cleared it
                give_gradient(self._units[place[0]]._handle, place[1])
        for number, unit in enumerate(self._units):
            self._check_flat(number, unit, sizes[number], used)

    def add_gradient(self, place: tuple[int, int], gradient: torch.Tensor) -> None:
        """Add a full gradient to those that a parameter's unit reduces, by this backward or the next that reduces.

        Args:
            place: The numbers of the unit and of the parameter in it.
            gradient: Of this rank, of the parameter's shape.
        """
        number, index = place
        add_unreduced(self._units[number]._handle, index, gradient)
        self._used.add(place)

    def forget_gradients(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Gradients of these parameters, or of all, are cleared, also those of an accumulation window under way."""
        if parameters is None:
            self.reduced.clear()
            self._used.clear()
            return
        cleared = set(map(id, parameters))
        self.reduced -= cleared
        self._used = {place for place in self._used if id(self._owner(*place)) not in cleared}

    def _check_flat(self, number: int, unit: Any, size: int, used: set[tuple[int, int]]) -> None:
        flat_param = unit._handle.flat_param
        of_unit = [index for index in range(size) if (number, index) in used]
        if flat_param._params is not None or len(of_unit) == size or not flat_param.requires_grad:
            return
        if not of_unit:
            flat_param.grad = None if number in {place[0] for place in self.without} else flat_param.grad
            return
        names = ", ".join(name for index, name in enumerate(flat_param._fqns) if index not in of_unit)
        raise RuntimeError(
            f"{names} got no gradient in this step, and lie in one flat parameter with some that did: the optimizer's "
            "momentum and decay would change them, which one process does not. Set use_orig_params=True."
        )

    def _owner(self, number: int, index: int) -> Any:
        flat_param: Any = self._units[number]._handle.flat_param
        return flat_param if flat_param._params is None else flat_param._params[index]

    def _parameters(self) -> Iterator[tuple[tuple[int, int], nn.Parameter]]:
        for number, unit in enumerate(self._units):
            flat_param: Any = unit._handle.flat_param
            for index, parameter in enumerate(flat_param._params or [flat_param]):
                yield (number, index), parameter


def _check_parameters(handle: Any) -> Any:
    """Refuse a call with other parameters, before torch takes them over as they are."""
    flat_param = handle.flat_param
    if handle._training_state == HandleTrainingState.FORWARD and not handle._skipped_use_sharded_views:
        for (name, module, _), parameter in zip(flat_param._param_infos, flat_param._params or (), strict=False):
            if module._parameters.get(name, parameter) is not parameter:
                raise other_parameters(module)
    return type(handle).pre_unshard(handle)


def _gather_together(handle: Any, path: SamePath, number: int, *args: Any, **kwargs: Any) -> Any:
    path.gather(number)
    return type(handle)._all_gather_flat_param(handle, *args, **kwargs)


def _give_gradient_back(handle: Any) -> None:
    """Let a unit have the gradient that was moved aside where none has come: its input's was wanted alone, say.

    torch 2.13 drops it then.
    """
    flat_param = handle.flat_param
    before = getattr(flat_param, "_saved_grad_shard", None)
    type(handle).prepare_gradient_for_optim(handle)
    if before is not None and flat_param.grad is None:
        flat_param.grad = before
