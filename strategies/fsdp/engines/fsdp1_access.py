"""Where users' code finds this rank's ranges of FSDP1's parameters and their gradients, see `GlobalTensors`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...common.flat_shards import FlatLayout, FlatShard
from ...common.global_tensors import NoAccess
from ...common.module_state_dicts import follow_state_dicts, refuse_copies, replace_in_user_code
from ...common.user_code import is_user_code
from .flat_layouts import layouts_of
from .fsdp1_backward import BackwardWatch
from .fsdp1_units import owners_of, units_of
from .fsdp1_unreduced import has_unreduced

_WRAPPER = "_fsdp_wrapped_module."


class FlatAccess(NoAccess):
    """The `ShardAccess` of FSDP1.

    Args:
        root: Sharded and idle.
        watch: Knows which parameters have a gradient on some rank; one without elements on this rank shows none.
    """

    shows_shards = True

    def __init__(self, root: nn.Module, watch: BackwardWatch) -> None:
        self._watch = watch
        self._places: dict[int, tuple[int, int]] = {}
        self._layouts: dict[int, FlatLayout] = {}
        self._flat: dict[int, Any] = {}
        for number, unit in enumerate(units_of(root)):
            handle: Any = unit._handle
            if not handle.uses_sharded_strategy:
                continue
            flat_param = handle.flat_param
            if flat_param._params is None:
                self._layouts[id(flat_param)], self._flat[id(flat_param)] = _whole_layout(unit), flat_param
                continue
            for index, (parameter, layout) in enumerate(zip(flat_param._params, layouts_of(unit), strict=True)):
                if layout is not None:
                    self._places[id(parameter)] = number, index
                    self._layouts[id(parameter)], self._flat[id(parameter)] = layout, flat_param

    def shard_of(self, tensor: Tensor) -> FlatShard | None:
        """Return this rank's range of a parameter; None for any other tensor, and while the parameter is gathered."""
        layout = self._layouts.get(id(tensor))
        if layout is None:
            return None
        held, shards = tensor.detach(), self._flat[id(tensor)]._local_shard
        if held.dim() != 1 or held.numel() != layout.count:
            return None
        if layout.count and held.untyped_storage().data_ptr() != shards.untyped_storage().data_ptr():
            return None
        return FlatShard(held, layout)

    def writable(self, tensor: Tensor, *, assigns: bool) -> Tensor | None:
        """Return an alias of an unsharded parameter, which may be written to; None for any other tensor."""
        storage = tensor.untyped_storage().data_ptr()
        return tensor.data if any(one.takes_writes(storage) for one in self._watch.changes.values()) else None

    def linked(self, full: Tensor, tensor: Tensor) -> Tensor:
        """Return a full tensor whose gradient is reduced with those of the unit.

        Raises:
            RuntimeError: With ``use_orig_params=False``.
        """
        if id(tensor) not in self._places:
            raise RuntimeError(
                "A flat parameter was used in a loss while it is sharded. Set use_orig_params=True (the default), and "
                "use the original parameters."
            )
        anchor = torch.zeros((), requires_grad=True)
        add = partial(self._watch.add_gradient, self._places[id(tensor)])
        linked: Tensor = _Link.apply(full, anchor, add)  # type: ignore[no-untyped-call]
        return linked

    def is_unreduced(self, tensor: Tensor) -> bool:
        """Return whether the unit of a parameter has gradients that the ranks have not reduced yet."""
        flat_param = self._flat.get(id(tensor))
        return flat_param is not None and has_unreduced(flat_param)

    def owns_gradient(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a parameter of which this rank has a range now."""
        return self.shard_of(tensor) is not None

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient; an empty one where only other ranks have elements."""
        layout, gradient = self._layouts[id(parameter)], parameter.grad
        if gradient is None:
            if layout.count or id(parameter) not in self._watch.reduced:
                return None
            gradient = parameter.detach().new_empty(0)
        return FlatShard(gradient, layout)

    def set_gradient(self, parameter: Tensor, gradient: FlatShard | None) -> None:
        """Replace the gradient."""
        parameter.grad = None if gradient is None else gradient.held.detach()


class _Link(torch.autograd.Function):
    """A full tensor whose gradient goes to a function of ours; autograd would give it to this rank's shard."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, anchor: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.take(gradient)
        return None, None, None


def run_hooks_of_users(root: nn.Module, access: FlatAccess) -> None:
    """Let ``apply()``, ``state_dict()`` and ``load_state_dict()`` of users' code work on shards.

    torch's own gather each unit for them, one after the other, and write full parameters into modules.

    Args:
        root: Sharded.
        access: Where the shards are.
    """
    if any(unit._handle.flat_param._params is not None for unit in units_of(root)):  # else modules have none
        follow_state_dicts((module for module in owners_of(root)), access)
    refuse_copies(units_of(root))
    for unit in units_of(root):
        unit.__dict__["apply"] = partial(_apply, unit)
        replace_in_user_code(unit._state_dict_pre_hooks, lambda *_: None)
        replace_in_user_code(unit._state_dict_hooks, _strip_wrapper)
        replace_in_user_code(unit._load_state_dict_pre_hooks, partial(_add_wrapper, unit))
        replace_in_user_code(unit._load_state_dict_post_hooks, lambda *_: None)


def _apply(unit: Any, function: Callable[[nn.Module], None]) -> nn.Module:
    return nn.Module.apply(unit, function) if is_user_code() else type(unit).apply(unit, function)


def _strip_wrapper(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix + _WRAPPER)]:
        state_dict[prefix + key[len(prefix + _WRAPPER) :]] = state_dict.pop(key)


def _add_wrapper(unit: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(prefix + _WRAPPER)]:
        state_dict[prefix + _WRAPPER + key[len(prefix) :]] = state_dict.pop(key)


def _whole_layout(unit: Any) -> FlatLayout:
    """Return where this rank's range of a whole flat parameter lies, which users see with ``use_orig_params=False``."""
    flat_param, group = unit._handle.flat_param, unit._handle.process_group
    size = int(flat_param._local_shard.numel())
    shape = torch.Size((dist.get_world_size(group) * size,))
    return FlatLayout(shape, (1,), (0,), dist.get_rank(group) * size, size, 0, 1, group, unit.compute_device)
