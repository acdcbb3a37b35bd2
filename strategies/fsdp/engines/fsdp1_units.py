"""The units of an FSDP1 model as torch keeps them, and how they are brought to rest."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ...upstream.torch_fsdp1 import HandleTrainingState, TrainingState, _reshard


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


def roots_of(root: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the outermost units: the root itself, or the parts that stand in its place."""
    if isinstance(root, FullyShardedDataParallel):
        return [root]
    return [unit for child in root.children() for unit in roots_of(child)]


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
"""Where a handle has the views that modules had when it was gathered, if it has hidden them."""


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
            forget_gradient(handle)
    reshard(root)


def check_not_summoned(root: nn.Module) -> None:
    """Look whether the user has the full parameters.

    Raises:
        RuntimeError: If so: what is written to them reaches the shards when the context ends, and not before.
    """
    if any(unit.training_state == TrainingState.SUMMON_FULL_PARAMS for unit in _all_units(root)):
        raise RuntimeError(
            "The model cannot be saved or loaded inside of summon_full_params(): what is written to full parameters "
            "reaches the shards when the context ends. Leave it first."
        )


def reshard(root: nn.Module) -> None:
    """Free what is gathered, and let parameters be the sharded ones."""
    for unit in units_of(root):
        handle = unit._handle
        if not handle.uses_sharded_strategy:
            _show_parameters(handle)
        elif is_gathered(handle):
            _reshard(unit, handle, True)


def _show_parameters(handle: Any) -> None:
    """Let modules of a unit that is not sharded have their parameters again, and not views of the flat one.

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

    torch 2.13 takes them for the hooks that reduce, and removes them in a backward alone, which may not come.
    """
    for unit in units_of(root):
        if len(hook_state(unit)) == 1:
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
