"""The units of an FSDP1 model as torch keeps them: brought to rest, and their unreduced gradients kept beside them.

[Note: unreduced gradients of FSDP1] In ``no_sync`` torch leaves a flat parameter's whole gradient on the sharded
parameter. Whatever comes between two micro-batches (a forward without gradient, a save, a second fit) meets a gradient
of another size than its parameter then. So after such a backward we take it away, and when the window's last backward
has accumulated its own, we add it, just before torch reduces the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import (
    _div_if_needed,
    _get_reduce_scatter_tensors,
    _post_backward_hook,
    _reshard,
)

from ...common.gradients import refuse_second_derivatives
from ..steps.same_path import SamePath

_WAITING = "_accelight_unreduced"


def units_of(root: nn.Module) -> list[Any]:
    """Return the `FullyShardedDataParallel` units that have parameters, in one order on all ranks, parents first."""
    return [unit for unit in _all_units(root) if unit._handle is not None]


def names_of(root: nn.Module, units: Iterable[Any]) -> list[str]:
    """Return the names of ``units`` inside ``root``, with the traces of wrappers."""
    names = {module: name for name, module in root.named_modules()}
    return [names[unit] for unit in units]


def roots_of(root: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the outermost units: the root itself, or the parts that stand in its place."""
    if isinstance(root, FullyShardedDataParallel):
        return [root]
    return [unit for child in root.children() for unit in roots_of(child)]


def _gather_together(handle: Any, path: SamePath, number: int, *args: Any, **kwargs: Any) -> Any:
    path.gather(number)
    return type(handle)._all_gather_flat_param(handle, *args, **kwargs)


def _first_derivatives_only(handle: Any) -> None:
    refuse_second_derivatives(type(handle._fully_sharded_module).__name__)
    type(handle).prepare_gradient_for_backward(handle)


def _all_units(root: nn.Module) -> list[Any]:
    return list(FullyShardedDataParallel.fsdp_modules(root))


def units_by_module(root: nn.Module) -> dict[nn.Module, tuple[FullyShardedDataParallel, FullyShardedDataParallel]]:
    """Return for each module the outermost unit and the unit that gathers the module's own parameters."""
    found: dict[nn.Module, tuple[FullyShardedDataParallel, FullyShardedDataParallel]] = {}

    def visit(module: nn.Module, outermost: Any, unit: Any) -> None:
        if isinstance(module, FullyShardedDataParallel):
            outermost, unit = outermost or module, module
        if unit is not None:
            found.setdefault(module, (outermost, unit))
        for child in module.children():
            visit(child, outermost, unit)

    visit(root, None, None)
    return found


def make_idle(root: nn.Module) -> None:
    """Bring every unit to rest, whatever an exception left it in; all that is gathered is freed.

    Source: torch 2.13 ``_post_backward_final_callback``, which a failed pass never reaches.
    """
    for unit in _all_units(root):
        unit.training_state = TrainingState.IDLE
        if unit._is_root:
            unit._post_backward_callback_queued = False
            unit._exec_order_data.next_iter()
        handle = unit._handle
        if handle is None:
            continue
        flat_param: Any = handle.flat_param
        waiting: tuple[Any, ...] = getattr(flat_param, "_post_backward_hook_state", ())
        if waiting:
            waiting[-1].remove()
            del flat_param._post_backward_hook_state
        flat_param._post_backward_called = False
        if hasattr(flat_param, "_saved_grad_shard"):
            del flat_param._saved_grad_shard
        handle._training_state = HandleTrainingState.IDLE
        handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = handle._prefetched = False
        handle._post_forward_index = None
        if flat_param.grad is not None and flat_param.grad.shape != flat_param._local_shard.shape:
            _forget(handle)
    reshard(root)


def reshard(root: nn.Module) -> None:
    """Free what is gathered, and let parameters be the sharded ones."""
    for unit in units_of(root):
        if unit._handle.uses_sharded_strategy and is_gathered(unit._handle):
            _reshard(unit, unit._handle, True)


def is_gathered(handle: Any) -> bool:
    """Return whether a unit's parameters are whole, or torch still shows those that were."""
    flat_param = handle.flat_param
    gathered = [getattr(flat_param, name, None) for name in ("_full_param_padded", "_full_prec_full_param_padded")]
    return (
        any(tensor is not None and tensor.untyped_storage().size() > 0 for tensor in gathered)
        or flat_param.data_ptr() != flat_param._local_shard.data_ptr()
        or handle._skipped_use_sharded_views
    )


def waiting_units(root: nn.Module) -> list[Any]:
    """Return the units that wait for the backward of a forward."""
    return [unit for unit in units_of(root) if len(_hook_state(unit)) == 2]


def expect_backward(root: nn.Module, expected: Iterable[Any]) -> None:
    """Let the units be ready for a backward of what was computed before, whatever came in between.

    Parameters may have been frozen or thawed since, which torch 2.13 takes for a mistake (``_finalize_params``).

    Args:
        root: Sharded.
        expected: What `waiting_units` returned after the forward.

    Raises:
        RuntimeError: If another backward has run since, and has ended what the forward prepared.
    """
    if any(len(_hook_state(unit)) != 2 for unit in expected):
        raise RuntimeError(
            "A backward of one's own ran between training_step() and its backward (in on_before_backward(), say): with "
            "FSDP1 it ends what the step's forward has prepared. Run it in another hook, or use fsdp_version=2."
        )
    for unit in units_of(root):
        _follow_gradients(unit._handle)
        unit._handle._reset_flat_param_grad_info_if_needed()
        flat_param: Any = unit._handle.flat_param
        if _hook_state(unit) and len(_hook_state(unit)) != 1 + flat_param.requires_grad:
            _hook_state(unit)[-1].remove()
            del flat_param._post_backward_hook_state


class KeptGraphs:
    """Prepares units for another backward of a graph that one has kept (``retain_graph=True``).

    torch 2.13 prepares them in the forward, for one backward, which undoes it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._last: dict[Any, tuple[Any, list[Any]]] = {}
        self._kept: dict[Any, tuple[Any, list[Any]]] = {}

    def begin_backward(self) -> None:
        """Note what the forward has prepared, and prepare what has been used up."""
        for unit, (node, tensors) in self._kept.items():
            flat_param: Any = unit._handle.flat_param
            unit._handle._reset_flat_param_grad_info_if_needed()
            unit._handle._needs_pre_backward_unshard = True
            if flat_param._tensors is not None:
                flat_param._tensors = list(tensors)
            if flat_param.requires_grad and not _hook_state(unit):
                hook = node.register_hook(partial(_post_backward_hook, unit, unit._handle))
                flat_param._post_backward_hook_state = (node, hook)
        for unit in waiting_units(self._root):
            self._last[unit] = _hook_state(unit)[0], list(unit._handle.flat_param._tensors or ())

    def keep(self) -> None:
        """The last backward has kept its graph."""
        self._kept.update(self._last)

    def forget(self) -> None:
        """No other backward will come: what was prepared for one is undone."""
        self._last, self._kept = {}, {}
        for unit in waiting_units(self._root):
            _hook_state(unit)[-1].remove()
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


def forget_frozen_hooks(root: nn.Module) -> None:
    """Remove the hooks of units that were frozen when they ran: thawed, such a unit would reduce nothing.

    torch 2.13 takes them for the hooks that reduce, and removes them in a backward alone, which may not come.
    """
    for unit in units_of(root):
        if len(_hook_state(unit)) == 1:
            _hook_state(unit)[0].remove()
            del unit._handle.flat_param._post_backward_hook_state


def _hook_state(unit: Any) -> tuple[Any, ...]:
    """Return the node that accumulates the unit's gradient and the hook on it; the hook alone if it is frozen."""
    return getattr(unit._handle.flat_param, "_post_backward_hook_state", ())


def forget_order(root: nn.Module) -> None:
    """Forget the forwards that no backward followed: they are no part of the order in which backward prefetches."""
    for unit in _all_units(root):
        unit._exec_order_data.handles_post_forward_order.clear()
        if unit._handle is not None:
            unit._handle._post_forward_index = None


class FrozenGradients:
    """Keeps the gradients of parameters that are frozen for a while (toggled off), which torch 2.13 would lose.

    With original parameters torch clears the gradients of frozen ones at each forward; a flat one's it moves aside, and
    fetches it again only if it is not frozen.
    """

    def __init__(self, root: nn.Module) -> None:
        self._units = units_of(root)
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def put_aside(self) -> None:
        """Call this before torch looks at the parameters."""
        for unit in self._units:
            flat_param: Any = unit._handle.flat_param
            for parameter in flat_param._params or [flat_param]:
                if parameter.grad is not None and not parameter.requires_grad:
                    self._kept.append((parameter, parameter.grad.clone()))

    def give_back(self) -> None:
        """Call this when control goes back to the user."""
        for parameter, gradient in self._kept:
            if not parameter.requires_grad and parameter.shape == gradient.shape:
                parameter.grad = gradient
        self._kept = []
        for unit in self._units:
            flat_param: Any = unit._handle.flat_param
            if not flat_param.requires_grad and hasattr(flat_param, "_saved_grad_shard"):
                del flat_param._saved_grad_shard


def put_aside(root: nn.Module, without: Container[tuple[int, int]], *, reduced: bool = False) -> None:
    """Take the gradients that a backward left unreduced; see the note above.

    Those that were reduced before and not cleared, which torch keeps beside until the next reduction, come back.

    Args:
        root: Sharded.
        without: Numbers of the units and of their parameters that had no gradient before.
        reduced: Whether the backward was not in ``no_sync``: torch 2.13 leaves out a unit all the same if it computes
            in half precision and was called before with a graph that was dropped.
    """
    for number, unit in enumerate(units_of(root)):
        handle = unit._handle
        flat_param: Any = handle.flat_param
        flat_param._post_backward_called = False
        gradient = flat_param.grad
        if gradient is None:
            continue
        if gradient.shape == flat_param._local_shard.shape if handle.uses_sharded_strategy else reduced:
            continue
        waiting = getattr(flat_param, _WAITING, None)
        setattr(flat_param, _WAITING, gradient.data if waiting is None else waiting.add_(gradient.data))
        _forget(handle)
        if hasattr(flat_param, "_saved_grad_shard"):
            flat_param.grad = flat_param._saved_grad_shard
            del flat_param._saved_grad_shard
            for index in range(len(flat_param._params or ())):
                if (number, index) not in without:
                    _give_gradient(handle, index)


def _forget(handle: Any) -> None:
    handle.flat_param.grad = None
    for parameter in handle.flat_param._params or ():
        parameter.grad = None


def add_waiting_gradients(unit: Any, is_last: Callable[[], bool], tell: Callable[[], None]) -> None:
    """Let the last backward of each window reduce what `put_aside` took from ``unit``.

    Args:
        unit: With parameters.
        is_last: Whether the backward under way is a window's last.
        tell: Called before torch reduces.
    """
    flat_param: Any = unit._handle.flat_param
    if hasattr(flat_param, "_accelight_hook"):
        flat_param._accelight_hook.remove()

    def add(parameter: torch.Tensor) -> None:
        waiting = getattr(parameter, _WAITING, None)
        if parameter.grad is not None and is_last():
            tell()
        if waiting is not None and parameter.grad is not None and is_last():
            parameter.grad.data = parameter.grad.data.add(waiting)
            delattr(parameter, _WAITING)

    is_trained = flat_param.requires_grad
    flat_param.requires_grad_(True)  # torch hooks nothing else, and a frozen unit may be thawed
    flat_param._accelight_hook = flat_param.register_post_accumulate_grad_hook(add)
    flat_param.requires_grad_(is_trained)


def reduce_left_over(root: nn.Module) -> None:
    """Reduce what waits in units that a window's last micro-batch did not reach: unused there, or frozen since."""
    for unit in units_of(root):
        handle = unit._handle
        flat_param: Any = handle.flat_param
        waiting = getattr(flat_param, _WAITING, None)
        if waiting is None:
            continue
        delattr(flat_param, _WAITING)
        reduced = _reduce(unit, waiting.to(handle._reduce_dtype)).to(flat_param.dtype)
        if flat_param.grad is not None:
            reduced += flat_param.grad
        flat_param.grad = reduced.to(flat_param.device)
        for index in range(len(flat_param._params or ())):
            _give_gradient(handle, index)


def _give_gradient(handle: Any, index: int) -> None:
    """Let an original parameter's gradient be its piece of the flat parameter's."""
    flat_param = handle.flat_param
    if flat_param._params is None or flat_param.grad is None:
        return
    info = flat_param._shard_param_infos[index]
    if not handle.uses_sharded_strategy:
        flat_param._params[index].grad = list(handle._get_unflat_views(flat_param.grad))[index]
    elif info.in_shard:
        flat_param._params[index].grad = flat_param.grad.narrow(0, info.offset_in_shard, info.numel_in_shard)


def _reduce(unit: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``gradient`` over the ranks: this rank's shard of it, or all of it if nothing is sharded."""
    if unit._handle.uses_sharded_strategy:
        padded, reduced = _get_reduce_scatter_tensors(unit, gradient)
        _div_if_needed(padded, unit._gradient_predivide_factor)
        dist.reduce_scatter_tensor(reduced, padded, group=unit.process_group)
        if hasattr(unit, "_inter_node_pg"):
            dist.all_reduce(reduced, group=unit._inter_node_pg)
    else:
        reduced = gradient
        _div_if_needed(reduced, unit._gradient_predivide_factor)
        dist.all_reduce(reduced, group=unit.process_group)
    _div_if_needed(reduced, unit._gradient_postdivide_factor)
    return reduced


def drop_unreduced(root: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Forget what `put_aside` took: of all parameters, or of these."""
    chosen = None if parameters is None else {id(parameter) for parameter in parameters}
    for unit in units_of(root):
        flat_param: Any = unit._handle.flat_param
        waiting = getattr(flat_param, _WAITING, None)
        if waiting is None:
            continue
        if chosen is None or id(flat_param) in chosen or _all_in(flat_param, chosen):
            delattr(flat_param, _WAITING)
        elif flat_param._params is not None:
            pieces = unit._handle._get_unflat_views(waiting)
            for parameter, piece in zip(flat_param._params, pieces, strict=True):
                if id(parameter) in chosen:
                    piece.zero_()


def _all_in(flat_param: Any, chosen: set[int]) -> bool:
    own = flat_param._params
    return own is not None and all(id(parameter) in chosen for parameter in own if parameter.requires_grad)


class BackwardWatch:
    """Sees which original parameters a backward reached on this rank, and lets the ranks agree.

    A flat parameter's gradient has zeros for those that nobody used; one process has no gradient there, so that neither
    momentum nor decay touch them.
    """

    def __init__(self, root: nn.Module, path: SamePath) -> None:
        self._units = units_of(root)
        self._used: set[tuple[int, int]] = set()
        self.without: set[tuple[int, int]] = set()
        """Units and parameters, by their numbers, that had no gradient before the last backward."""
        for number, unit in enumerate(self._units):
            unit._handle._use_unsharded_views = self._around(number, unit._handle)
            unit._handle._all_gather_flat_param = partial(_gather_together, unit._handle, path, number)
            unit._handle.prepare_gradient_for_backward = partial(_first_derivatives_only, unit._handle)

    def _around(self, number: int, handle: Any) -> Callable[..., None]:
        use_views = type(handle)._use_unsharded_views

        def run(as_params: bool) -> None:
            use_views(handle, as_params)
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
        return None

    def begin(self) -> None:
        """Note which parameters have no gradient before a backward."""
        self.without = {place for place, parameter in self._parameters() if parameter.grad is None}

    def settle(self, reduce_max: Callable[[torch.Tensor], None]) -> None:
        """Let the ranks agree, after a backward that reduced; every rank calls it.

        Args:
            reduce_max: Replaces a tensor of int32 on the CPU by its maximum over all ranks.

        Raises:
            RuntimeError: On every rank, if a part of a flat parameter was used by none, and the rest was.
        """
        sizes = [len(unit._handle.flat_param._param_infos) for unit in self._units]
        places = [(number, index) for number, size in enumerate(sizes) for index in range(size)]
        told = torch.tensor([int(place in self._used) for place in places], dtype=torch.int32)
        reduce_max(told)
        used = {place for place, anywhere in zip(places, told.tolist(), strict=True) if anywhere}
        self._used = set()
        for place, parameter in self._parameters():
            if place not in used and place in self.without:
                parameter.grad = None
            elif place in used and not parameter.requires_grad:  # frozen within the window: torch has cleared it
                _give_gradient(self._units[place[0]]._handle, place[1])
        for number, unit in enumerate(self._units):
            self._check_flat(number, unit, sizes[number], used)

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

    def _parameters(self) -> Iterator[tuple[tuple[int, int], nn.Parameter]]:
        for number, unit in enumerate(self._units):
            flat_param: Any = unit._handle.flat_param
            for index, parameter in enumerate(flat_param._params or [flat_param]):
                yield (number, index), parameter
