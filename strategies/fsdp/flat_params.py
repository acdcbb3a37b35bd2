"""FSDP1's flat parameters: the units as torch keeps them, unreduced gradients, each rank's shards, and the reset."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Collection, Container, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ...checkpoint.names import clean_name
from ..common.grads import hook_leaf
from ..sharded_tensors.shards import FlatLayout, memory_order
from ..upstream.patches import replace_for_good
from ..upstream.torch_core import reduce_scatter_single
from ..upstream.torch_fsdp1 import (
    HandleTrainingState,
    TrainingState,
    _div_if_needed,
    _get_reduce_scatter_tensors,
    _reshard,
    _unshard,
)
from .sharded_model import GUARD, hooked_in_loss, hooks_of, unwrap_root
from .step import is_inside


class WholeParameter(NamedTuple):
    """A parameter as it was before sharding."""

    key: object
    """The same for all names of a tied one."""
    numel: int
    is_trained: bool


def units_of(root: nn.Module) -> list[Any]:
    """Return the `FullyShardedDataParallel` units that have parameters, in one order on all ranks, parents first."""
    return [unit for unit in _all_units(root) if unit._handle is not None]


def names_of(root: nn.Module, units: Iterable[Any]) -> list[str]:
    """Return the names of ``units`` inside ``root``, with the traces of wrappers."""
    names = {module: name for name, module in root.named_modules()}
    return [names[unit] for unit in units]


def owners_of(root: nn.Module) -> set[nn.Module]:
    """Return the modules whose parameters are in a flat one, as ties too, and the units around modules."""
    found: set[nn.Module] = set(_all_units(root))
    for unit in units_of(root):
        flat_param = unit._handle.flat_param
        found.update(owner for _, owner, *_ in (*flat_param._param_infos, *flat_param._shared_param_infos))
    return found


def parameters_by_owner(root: nn.Module) -> dict[nn.Module, list[WholeParameter]]:
    """Return the parameters that each module would have of its own without FSDP, for the modules of units."""
    found: dict[nn.Module, list[WholeParameter]] = {}
    for unit in units_of(root):
        flat_param = unit._handle.flat_param
        trained = flat_param._params or [flat_param] * len(flat_param._param_infos)
        known: dict[tuple[nn.Module, str], WholeParameter] = {}
        infos = zip(flat_param._param_infos, flat_param._shapes, trained, strict=True)
        for (name, owner, _), shape, parameter in infos:
            known[owner, name] = WholeParameter((id(unit), id(owner), name), shape.numel(), parameter.requires_grad)
            found.setdefault(owner, []).append(known[owner, name])
        for _, owner, _, name, first, _ in flat_param._shared_param_infos:
            found.setdefault(owner, []).append(known[first, name])
    return found


def _all_units(root: nn.Module) -> list[Any]:
    # Not FullyShardedDataParallel.fsdp_modules(), which takes ten times as long to the same list.
    return [module for module in root.modules() if isinstance(module, FullyShardedDataParallel)]


def units_by_module(
    root: nn.Module,
) -> MutableMapping[nn.Module, tuple[FullyShardedDataParallel, FullyShardedDataParallel]]:
    """Return for each module the outermost unit and the unit that gathers the module's own parameters.

    By identity: the hash of a metric is another one after each update.
    """
    found: MutableMapping[nn.Module, Any] = WeakIdKeyDictionary()

    def visit(module: nn.Module, outermost: Any, unit: Any) -> None:
        if isinstance(module, FullyShardedDataParallel):
            outermost, unit = outermost or module, module
        if unit is not None:
            found.setdefault(module, (outermost, unit))
        for child in module.children():
            visit(child, outermost, unit)

    visit(root, None, None)
    return found


VIEWS = "_accelight_views"
"""The attribute of a handle for the views that modules had when it was gathered, if it has hidden them."""


def reset_to_idle(root: nn.Module) -> None:
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
            forget_gradient(handle)
    reshard(root)


def check_not_summoned(root: nn.Module) -> None:
    """Look whether the user has the full parameters.

    Raises:
        RuntimeError: If so: what is written to them reaches the shards when the context ends, and not before.
    """
    if any(unit.training_state == TrainingState.SUMMON_FULL_PARAMS for unit in _all_units(root)):
        raise RuntimeError(
            "The model cannot be saved or loaded inside summon_full_params(): changes to full parameters reach the "
            "shards when the context ends. Exit the context first."
        )


def gather_for_backward(unit: Any) -> None:
    """Gather a unit before its own hook in the backward does, as torch prefetches."""
    handle = unit._handle
    before, handle._training_state = handle._training_state, HandleTrainingState.BACKWARD_PRE
    _unshard(unit, handle, unit._unshard_stream, unit._pre_unshard_stream)
    handle._training_state, handle._prefetched = before, True
    unit._device_handle.current_stream().wait_stream(unit._unshard_stream)


def reshard(root: nn.Module) -> None:
    """Free what is gathered, and let parameters be the sharded ones."""
    for unit in units_of(root):
        handle = unit._handle
        if is_gathered(handle):
            _reshard(unit, handle, handle.uses_sharded_strategy)
        elif not handle.uses_sharded_strategy:
            _show_parameters(handle)


def _show_parameters(handle: Any) -> None:
    """Give modules of a unit that is not sharded their parameters again, in place of views of the flat one.

    torch 2.13 does it in the unit's backward alone, which a forward need not have; a state dict has no views.
    """
    name, module, _ = handle.flat_param._param_infos[0]
    if handle.flat_param._params is not None and not isinstance(getattr(module, name), nn.Parameter):
        handle._use_sharded_views()


def is_gathered(handle: Any) -> bool:
    """Return whether a unit's parameters are gathered, or torch still shows those that were."""
    flat_param = handle.flat_param
    gathered = [getattr(flat_param, name, None) for name in ("_full_param_padded", "_full_prec_full_param_padded")]
    return (
        any(tensor is not None and tensor.untyped_storage().size() > 0 for tensor in gathered)
        or flat_param.data_ptr() != flat_param._local_shard.data_ptr()
        or handle._skipped_use_sharded_views
    )


def hook_state(unit: Any) -> tuple[Any, ...]:
    """Return the node that accumulates the unit's gradient and the hook on it; the hook alone if it is frozen."""
    return getattr(unit._handle.flat_param, "_post_backward_hook_state", ())


def waiting_units(root: nn.Module) -> list[Any]:
    """Return the units that wait for the backward of a forward."""
    return [unit for unit in units_of(root) if len(hook_state(unit)) == 2]


def forget_frozen_hooks(root: nn.Module) -> None:
    """Remove the hooks of units that were frozen when they ran: thawed, such a unit would reduce nothing.

    torch 2.13 takes them for the hooks that reduce, and removes them in a backward alone, which may not come. That of a
    unit's first forward stays while it is frozen: another forward's frees the unit before the backward of the first.
    """
    for unit in units_of(root):
        if len(hook_state(unit)) == 1 and unit._handle.flat_param.requires_grad:
            hook_state(unit)[0].remove()
            del unit._handle.flat_param._post_backward_hook_state


def forget_views(root: nn.Module) -> None:
    """Forget what forwards without a backward have left of gathered parameters: no backward will ask for it.

    A view knows its flat parameter in C++, and that its modules in Python: no garbage collector would see the circle.
    """
    for unit in units_of(root):
        handle = unit._handle
        if handle.flat_param._tensors is not None:
            handle.flat_param._tensors = [None] * len(handle.flat_param._tensors)
        getattr(handle, VIEWS, {}).clear()


def forget_order(root: nn.Module) -> None:
    """Forget the forwards that no backward followed: they are no part of the order in which backward prefetches."""
    for unit in _all_units(root):
        unit._exec_order_data.handles_post_forward_order.clear()
        if unit._handle is not None:
            unit._handle._post_forward_index = None


def forget_gradient(handle: Any) -> None:
    """Clear the gradient of a flat parameter and of the original ones in it."""
    handle.flat_param.grad = None
    for parameter in handle.flat_param._params or ():
        parameter.grad = None


def layouts_of(unit: Any) -> list[FlatLayout | None]:
    """Return this rank's range in each parameter of a sharded unit; None for one without elements.

    Raises:
        ValueError: If a parameter lies in memory in a way that has no ranges.
    """
    handle = unit._handle
    flat_param, mesh = handle.flat_param, unit._device_mesh
    is_hybrid = mesh is not None and mesh.ndim == 2
    replica, num_replicas = (mesh.get_coordinate()[0], mesh.size(0)) if is_hybrid else (0, 1)
    layouts: list[FlatLayout | None] = []
    ends = itertools.accumulate(flat_param._numels_with_padding)
    begins = [
        end - numel
        for end, numel, is_padding in zip(
            ends, flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True
        )
        if not is_padding
    ]
    for shape, strides, info, begin in zip(
        flat_param._shapes, flat_param._strides, flat_param._shard_param_infos, begins, strict=True
    ):
        order = memory_order(shape, strides)
        if order is None:
            raise ValueError(f"A parameter with the shape {tuple(shape)} and the strides {tuple(strides)} has gaps.")
        if not shape.numel():
            layouts.append(None)
            continue
        start, count = (info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0)
        place = FlatLayout(
            shape,
            tuple(strides),
            order,
            start,
            count,
            replica,
            num_replicas,
            handle.process_group,
            unit.compute_device,
            (begin, int(flat_param._local_shard.numel())),
        )
        layouts.append(place)
    return layouts


# ------------------------------------------------------------------------------------------------
# FSDP1's gradients that an accumulation window has not reduced yet, stored next to the parameters.
#
# [Note: unreduced gradients of FSDP1] In ``no_sync`` torch leaves a flat parameter's full gradient on the sharded
# parameter. Whatever comes between two micro-batches (a forward without gradient, a save, a second fit) meets a
# gradient of another size than its parameter then. So after such a backward we take it away, and when the window's last
# backward has accumulated its own, we add it, just before torch reduces the sum.


_WAITING = "_accelight_unreduced"
_ADDS_WAITING = "_accelight_hook"


@dataclass
class _Waiting:
    """A gradient that the ranks have not reduced yet."""

    gradient: Tensor
    """Of a whole flat parameter."""
    parameters: set[int] = field(default_factory=set)
    """Identities of the parameters in it that have one, or of the flat parameter."""


def _parameters_of(flat_param: Any) -> Iterable[nn.Parameter]:
    return flat_param._params or [flat_param]


class FrozenGradients:
    """Keeps the gradients of parameters that are frozen for a while (toggled off), which torch 2.13 would lose.

    With original parameters torch clears the gradients of frozen ones at each forward; a flat one's it moves aside, and
    fetches it again only if it is not frozen.
    """

    def __init__(self, root: nn.Module) -> None:
        self._units = units_of(root)
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def stash(self) -> None:
        """Call this before torch looks at the parameters."""
        for unit in self._units:
            flat_param: Any = unit._handle.flat_param
            for parameter in flat_param._params or [flat_param]:
                if parameter.grad is not None and not parameter.requires_grad:
                    self._kept.append((parameter, parameter.grad.clone()))

    def restore(self, *, also_later: bool = False) -> None:
        """Call this when control goes back to the user.

        Args:
            also_later: Whether what is unsharded gets its gradients the next time; else they are lost.
        """
        waiting = []
        for parameter, gradient in self._kept:
            if parameter.requires_grad:
                continue
            if parameter.shape == gradient.shape:
                parameter.grad = gradient
            elif also_later:
                waiting.append((parameter, gradient))
        self._kept = waiting
        for unit in self._units:
            flat_param: Any = unit._handle.flat_param
            if not flat_param.requires_grad and hasattr(flat_param, "_saved_grad_shard"):
                del flat_param._saved_grad_shard

    def forget(self, parameters: Collection[nn.Parameter] | None) -> None:
        """Drop the gradients of these parameters, which are cleared now; None drops all."""
        cleared = None if parameters is None else {id(one) for one in parameters}
        self._kept = [] if cleared is None else [one for one in self._kept if id(one[0]) not in cleared]


def stash(root: nn.Module, without: Collection[tuple[int, int]], *, reduced: bool = False) -> None:
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
        if not handle.uses_sharded_strategy:
            _keep_frozen(handle, {index for unit, index in without if unit == number})
        waiting: _Waiting | None = getattr(flat_param, _WAITING, None)
        if waiting is None:
            waiting = _Waiting(gradient.data)
            setattr(flat_param, _WAITING, waiting)
        else:
            waiting.gradient.add_(gradient.data)
        waiting.parameters |= {id(one) for one in _parameters_of(flat_param) if one.requires_grad}
        forget_gradient(handle)
        if hasattr(flat_param, "_saved_grad_shard"):
            flat_param.grad = flat_param._saved_grad_shard
            del flat_param._saved_grad_shard
            for index in range(len(flat_param._params or ())):
                if (number, index) not in without:
                    assign_gradient(handle, index)


def _keep_frozen(handle: Any, without: Container[int]) -> None:
    """Move gradients of frozen parameters, reduced before, out of the whole one to where torch keeps those of shards.

    Where nothing is sharded, a backward adds to the whole one what is unreduced.
    """
    flat_param = handle.flat_param
    params = enumerate(flat_param._params or ())
    frozen = {index for index, one in params if not one.requires_grad and index not in without}
    if frozen:
        flat_param._saved_grad_shard = torch.zeros_like(flat_param.grad)
        pieces = [handle._get_unflat_views(one) for one in (flat_param._saved_grad_shard, flat_param.grad)]
        for index, (kept, piece) in enumerate(zip(*pieces, strict=True)):
            if index in frozen:
                kept.copy_(piece)
                piece.zero_()


def add_waiting_gradients(unit: Any, is_last: Callable[[], bool], on_reduce: Callable[[], None]) -> None:
    """Make the last backward of each window reduce what `stash` took from ``unit``.

    Args:
        unit: With parameters.
        is_last: Whether the backward under way is a window's last.
        on_reduce: Called before torch reduces.
    """
    flat_param: Any = unit._handle.flat_param

    def add(parameter: torch.Tensor) -> None:
        waiting = getattr(parameter, _WAITING, None)
        if parameter.grad is not None and is_last():
            on_reduce()
        if waiting is not None and parameter.grad is not None and is_last():
            parameter.grad.data = parameter.grad.data.add(waiting.gradient)
            delattr(parameter, _WAITING)

    hook_leaf(flat_param, _ADDS_WAITING, add, "register_post_accumulate_grad_hook")


def is_unreduced(flat_param: Any, parameter: Tensor) -> bool:
    """Return whether a parameter of a unit has a gradient that the ranks have not reduced yet."""
    waiting: _Waiting | None = getattr(flat_param, _WAITING, None)
    return waiting is not None and id(parameter) in waiting.parameters


def add_unreduced(handle: Any, index: int, gradient: torch.Tensor) -> None:
    """Add a full gradient of an original parameter to what its unit has not reduced yet."""
    flat_param = handle.flat_param
    waiting: _Waiting | None = getattr(flat_param, _WAITING, None)
    if waiting is None:
        empty = torch.zeros(flat_param._unpadded_unsharded_size, dtype=flat_param.dtype, device=handle.device)
        waiting = _Waiting(empty)
        setattr(flat_param, _WAITING, waiting)
    piece = list(handle._get_unflat_views(waiting.gradient))[index]
    piece.add_(gradient.to(piece.device))  # that of offloaded shards is on the CPU
    waiting.parameters.add(id(flat_param._params[index]))


def reduce_left_over(root: nn.Module) -> None:
    """Reduce what waits in units that a window's last micro-batch did not reach: unused there, or frozen since."""
    for unit in units_of(root):
        handle = unit._handle
        flat_param: Any = handle.flat_param
        waiting: _Waiting | None = getattr(flat_param, _WAITING, None)
        if waiting is None:
            continue
        delattr(flat_param, _WAITING)
        reduced = _reduce(unit, waiting.gradient.to(handle._reduce_dtype)).to(flat_param)
        if flat_param.grad is not None:
            reduced += flat_param.grad
        flat_param.grad = reduced
        for index in range(len(flat_param._params or ())):
            assign_gradient(handle, index)


def assign_gradient(handle: Any, index: int) -> None:
    """Set an original parameter's gradient to its piece of the flat parameter's."""
    flat_param = handle.flat_param
    if flat_param._params is None or flat_param.grad is None:
        return
    info = flat_param._shard_param_infos[index]
    if not handle.uses_sharded_strategy:
        flat_param._params[index].grad = list(handle._get_unflat_views(flat_param.grad))[index]
    elif info.in_shard:
        flat_param._params[index].grad = flat_param.grad.narrow(0, info.offset_in_shard, info.numel_in_shard)
    else:
        flat_param._params[index].grad = flat_param._params[index].detach().new_empty(0)


def _reduce(unit: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``gradient`` over the ranks: this rank's shard of it, or all of it if nothing is sharded."""
    if unit._handle.uses_sharded_strategy:
        padded, reduced = _get_reduce_scatter_tensors(unit, gradient)
        _div_if_needed(padded, unit._gradient_predivide_factor)
        reduce_scatter_single(reduced, padded, group=unit.process_group)
        if hasattr(unit, "_inter_node_pg"):
            dist.all_reduce(reduced, group=unit._inter_node_pg)
    else:
        reduced = gradient
        _div_if_needed(reduced, unit._gradient_predivide_factor)
        dist.all_reduce(reduced, group=unit.process_group)
    _div_if_needed(reduced, unit._gradient_postdivide_factor)
    return reduced


def scale_unreduced_grads(root: nn.Module, parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply what `stash` took of these parameters."""
    chosen = set(map(id, parameters))
    for unit in units_of(root):
        flat_param: Any = unit._handle.flat_param
        waiting: _Waiting | None = getattr(flat_param, _WAITING, None)
        if waiting is None or waiting.parameters.isdisjoint(chosen):
            continue
        own = _parameters_of(flat_param)
        pieces = unit._handle._get_unflat_views(waiting.gradient) if flat_param._params else [waiting.gradient]
        for parameter, piece in zip(own, pieces, strict=True):
            if id(parameter) in chosen:
                piece.mul_(factor)


def discard_unreduced_grads(root: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Forget what `stash` took: of all parameters, or of these."""
    chosen = None if parameters is None else {id(parameter) for parameter in parameters}
    for unit in units_of(root):
        flat_param: Any = unit._handle.flat_param
        waiting: _Waiting | None = getattr(flat_param, _WAITING, None)
        if waiting is None:
            continue
        left = set() if chosen is None else waiting.parameters - chosen
        if not left:
            delattr(flat_param, _WAITING)
        elif left != waiting.parameters:
            for parameter, piece in zip(
                flat_param._params, unit._handle._get_unflat_views(waiting.gradient), strict=True
            ):
                if id(parameter) not in left:
                    piece.zero_()
            waiting.parameters = left


# ------------------------------------------------------------------------------------------------
# Errors that name FSDP1's weights when they are used while sharded.
#
# A unit's ``forward`` gathers its weights. Who reads one elsewhere in a step (a regulariser, a call past the unit) gets
# this rank's piece of an original parameter, whose norm is another one; and of a flat parameter a tensor whose memory
# is gone, which ends the process.


class ShardedWeight:
    """Stands where a weight stands while its unit is gathered; it has the looks of one, and nothing in it."""

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.name, self.shape, self.dtype, self.device = name, shape, dtype, device

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or "name" not in self.__dict__:  # copies and pickles ask before it is filled
            raise AttributeError(attribute)
        raise AttributeError(_message(self.name))

    def __getitem__(self, _: Any) -> NoReturn:
        raise RuntimeError(_message(self.name))

    def __setitem__(self, _: Any, __: Any) -> NoReturn:
        raise RuntimeError(_message(self.name))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls)]
        raise RuntimeError(_message(found[0].name if found else "a weight"))


def _message(name: str) -> str:
    return (
        f"{name} was used while it is sharded: user code read the weight, or called a module inside a unit without "
        "calling the unit. Call the unit itself (the module that auto_wrap_policy wraps), or keep the module in the "
        "root's unit. Instead of a penalty on weights, set the optimizer's weight_decay."
    )


ONE_BACKWARD = (
    "FSDP1 prepares one backward per step: return the sum of all losses, and call its backward() once; or use "
    "fsdp_version=2."
)


def translate_error(error: BaseException, units: Mapping[nn.Module, Any]) -> RuntimeError | None:
    """Return a clearer error for one of torch's inside a module that was called past its unit.

    Args:
        error: That ended a step, nothing of which has been put in order yet.
        units: Each module's unit.
    """
    in_wrong_state = isinstance(error, ValueError) and "expected to be in states" in str(error)
    if in_wrong_state or (isinstance(error, AssertionError) and "Expects `BACKWARD_PRE`" in str(error)):
        return RuntimeError(f"A backward started at a tensor that training_step() did not return. {ONE_BACKWARD}")
    if type(error) is not RuntimeError:
        return None
    if "you can only change requires_grad flags of leaf variables" in str(error):
        return RuntimeError(
            "requires_grad was changed inside a step, where FSDP1 shows views of flat parameters. Freeze in a hook, "
            "such as on_train_batch_start(); for the gradient of an input, without gradients of weights, use "
            "torch.autograd.grad(loss, input); or use fsdp_version=2."
        )
    if "being modified inplace" in str(error) or "has been modified inplace" in str(error):
        return RuntimeError(
            "A tensor that a graph needs was changed in place. If it is a weight, changed inside a forward, where "
            "FSDP1 shows views of a flat parameter: change it through weight.data, in training_step(), or in a hook; "
            "or use fsdp_version=2."
        )
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module) and module in units:
            handle = units[module]._handle
            own = handle is not None and any(owner is module for _, owner, _ in handle.flat_param._param_infos)
            if own and handle.uses_sharded_strategy and not is_gathered(handle):
                return RuntimeError(_message(f"A weight of {type(module).__name__}"))
    return None


def guard_shards(root: nn.Module) -> None:
    """Make weights of ``root`` raise a clear error when used while they are sharded; those that do already stay."""
    prefixes = {unit: prefix for prefix, unit in unwrap_root(root).named_modules()}
    for unit in units_of(root):
        handle = unit._handle
        flat_param: Any = handle.flat_param
        names = [clean_name(".".join(filter(None, [prefixes[unit], fqn]))) for fqn in flat_param._fqns]
        if flat_param._params is None:
            _guard_flat(handle, names)
        elif handle.uses_sharded_strategy:
            for name, parameter in zip(names, flat_param._params, strict=True):
                _refuse_gradients(parameter, _message(name))
        else:
            for (name, module, _), parameter in zip(flat_param._param_infos, flat_param._params, strict=True):
                _refuse_gradients(parameter, hooked_in_loss(module, name), if_hooked=True)


def _refuse_gradients(parameter: Any, message: str, *, if_hooked: bool = False) -> None:
    """Let an original parameter refuse gradients of a step's graph, which goes through the flat parameter.

    Args:
        parameter: Of a unit.
        message: The error's.
        if_hooked: Whether only a parameter with users' hooks refuses them.
    """
    if hasattr(parameter, GUARD):
        return
    known = TensorWeakRef(parameter)

    def refuse(_: Tensor) -> None:
        if is_inside() and (not if_hooked or hooks_of(known())):
            raise RuntimeError(message)

    hook_leaf(parameter, GUARD, refuse)


def _guard_flat(handle: Any, names: list[str]) -> None:
    flat_param = handle.flat_param
    if not handle.uses_sharded_strategy or "_use_sharded_flat_param" in vars(handle):
        return
    stand_ins: dict[tuple[nn.Module, str], ShardedWeight] = {}
    for name, shape, (own, module, _) in zip(names, flat_param._shapes, flat_param._param_infos, strict=True):
        stand_ins[module, own] = ShardedWeight(name, shape, flat_param.dtype, handle.device)
    for own, module, _, first, first_module, _ in flat_param._shared_param_infos:
        stand_ins[module, own] = stand_ins[first_module, first]
    views: dict[tuple[nn.Module, str], Tensor] = {}
    setattr(handle, VIEWS, views)

    def remove_shown() -> None:
        is_shown = handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        for (module, own), stand_in in stand_ins.items():
            view = vars(module).get(own)
            if isinstance(view, Tensor):
                object.__setattr__(module, own, stand_in)
                if not is_shown:  # a state dict shows other memory than forward and backward: full precision, the CPU
                    views[module, own] = view

    def use_sharded_flat_param() -> None:
        type(handle)._use_sharded_flat_param(handle)
        remove_shown()

    def use_unsharded_flat_param(unsharded: Tensor) -> None:
        for (module, own), view in views.items():  # a backward that recomputes gets no new ones
            if isinstance(vars(module).get(own), ShardedWeight):
                object.__setattr__(module, own, view)
        type(handle)._use_unsharded_flat_param(handle, unsharded)

    replace_for_good(
        "FSDP1 handles",
        handle,
        _use_sharded_flat_param=use_sharded_flat_param,
        _use_unsharded_flat_param=use_unsharded_flat_param,
    )
    remove_shown()
    owner = handle._fully_sharded_module
    inside = {module for module, _ in stand_ins}
    for module in owner.modules():
        if module is not owner and not inside.isdisjoint(module.modules()):
            replace_for_good("sharded modules", module, requires_grad_=partial(_refuse_freezing, module, flat_param))


def _refuse_freezing(module: nn.Module, flat_param: Tensor, requires_grad: bool = True) -> nn.Module:
    if requires_grad == flat_param.requires_grad:  # it is so already
        return module
    raise RuntimeError(
        f"requires_grad_({requires_grad}) of this {type(module).__name__} would have no effect: with "
        "use_orig_params=False its parameters are part of its unit's flat parameter. Set use_orig_params=True (the "
        "default), or freeze a unit as a whole."
    )
