"""Gradients of FSDP1 that a window has not reduced yet, kept beside the parameters.

[Note: unreduced gradients of FSDP1] In ``no_sync`` torch leaves a flat parameter's full gradient on the sharded
parameter. Whatever comes between two micro-batches (a forward without gradient, a save, a second fit) meets a gradient
of another size than its parameter then. So after such a backward we take it away, and when the window's last backward
has accumulated its own, we add it, just before torch reduces the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...upstream.torch_core import reduce_scatter_single
from ...upstream.torch_fsdp1 import _div_if_needed, _get_reduce_scatter_tensors
from .fsdp1_units import forget_gradient, units_of

_WAITING = "_accelight_unreduced"


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
        forget_gradient(handle)
        if hasattr(flat_param, "_saved_grad_shard"):
            flat_param.grad = flat_param._saved_grad_shard
            del flat_param._saved_grad_shard
            for index in range(len(flat_param._params or ())):
                if (number, index) not in without:
                    give_gradient(handle, index)


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


def has_unreduced(flat_param: Any) -> bool:
    """Return whether a flat parameter has a gradient that the ranks have not reduced yet."""
    return getattr(flat_param, _WAITING, None) is not None


def add_unreduced(handle: Any, index: int, gradient: torch.Tensor) -> None:
    """Add a full gradient of an original parameter to what its unit has not reduced yet."""
    flat_param = handle.flat_param
    waiting = getattr(flat_param, _WAITING, None)
    if waiting is None:
        waiting = torch.zeros(flat_param._unpadded_unsharded_size, dtype=flat_param.dtype, device=handle.device)
        setattr(flat_param, _WAITING, waiting)
    list(handle._get_unflat_views(waiting))[index].add_(gradient)


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
            give_gradient(handle, index)


def give_gradient(handle: Any, index: int) -> None:
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
        reduce_scatter_single(reduced, padded, group=unit.process_group)
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
