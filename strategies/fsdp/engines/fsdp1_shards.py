"""Weights of FSDP1's units that are used while they are sharded: by name, and not as whatever torch leaves there.

A unit's ``forward`` gathers its weights. Who reads one elsewhere in a step (a regulariser, a call past the unit) gets
this rank's piece of an original parameter, whose norm is another one; and of a flat parameter a tensor whose memory is
gone, which ends the process.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....checkpoint.names import clean_name
from ..steps.outside_calls import is_inside
from ..units.sharded_root import inside_root
from .fsdp1_units import VIEWS, is_gathered, units_of


class ShardedWeight:
    """Stands where a weight stands while its unit is gathered; it has the looks of one, and nothing in it."""

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.name, self.shape, self.dtype, self.device = name, shape, dtype, device

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or "name" not in self.__dict__:  # copies and pickles ask before it is filled
            raise AttributeError(attribute)
        raise AttributeError(_message(self.name))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls)]
        raise RuntimeError(_message(found[0].name if found else "a weight"))


def _message(name: str) -> str:
    return (
        f"{name} was used while it is sharded: by somebody who reads the weight, or calls a module inside of its unit "
        "past the unit. Call the unit itself (the module that auto_wrap_policy wraps), or leave the module to the "
        "root's unit. Instead of a penalty on weights, give the optimizer weight_decay."
    )


ONE_BACKWARD = (
    "FSDP1 prepares one backward for each step: return the sum of all losses, and call backward() of it once; or use "
    "fsdp_version=2."
)


def explained(error: BaseException, units: Mapping[nn.Module, Any]) -> RuntimeError | None:
    """Return what to raise instead of an error of torch's inside a module that was called past its unit.

    Args:
        error: That ended a step, nothing of which has been put in order yet.
        units: Each module's unit.
    """
    in_wrong_state = isinstance(error, ValueError) and "expected to be in states" in str(error)
    if in_wrong_state or (isinstance(error, AssertionError) and "Expects `BACKWARD_PRE`" in str(error)):
        return RuntimeError(f"A backward began at a tensor that training_step() did not return. {ONE_BACKWARD}")
    if type(error) is not RuntimeError:
        return None
    if "you can only change requires_grad flags of leaf variables" in str(error):
        return RuntimeError(
            "requires_grad was changed inside of a step, where FSDP1 shows views of flat parameters. Freeze in a hook, "
            "such as on_train_batch_start(); for the gradient of an input, which leaves weights alone, use "
            "torch.autograd.grad(loss, input); or use fsdp_version=2."
        )
    if "being modified inplace" in str(error) or "has been modified inplace" in str(error):
        return RuntimeError(
            "A weight was changed in place inside of a forward, where FSDP1 shows views of a flat parameter. Change it "
            "through weight.data, in training_step(), or in a hook; or use fsdp_version=2."
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
    """Let weights of ``root`` tell who uses them while they are sharded; those that do already go on."""
    prefixes = {unit: prefix for prefix, unit in inside_root(root).named_modules()}
    for unit in units_of(root):
        handle = unit._handle
        flat_param: Any = handle.flat_param
        names = [clean_name(".".join(filter(None, [prefixes[unit], fqn]))) for fqn in flat_param._fqns]
        if flat_param._params is None:
            _guard_flat(handle, names)
        elif handle.uses_sharded_strategy:
            for name, parameter in zip(names, flat_param._params, strict=True):
                _guard_original(name, parameter)


def _guard_original(name: str, parameter: Any) -> None:
    if hasattr(parameter, "_accelight_guard"):
        return

    def refuse(_: Tensor) -> None:
        if is_inside():  # with original parameters, a step's own graph goes through the flat one
            raise RuntimeError(_message(name))

    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch hooks nothing else
    parameter._accelight_guard = parameter.register_hook(refuse)
    parameter.requires_grad_(is_trained)


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

    def take_away() -> None:
        for (module, own), stand_in in stand_ins.items():
            view = vars(module).get(own)
            if isinstance(view, Tensor):
                views[module, own] = view
                object.__setattr__(module, own, stand_in)

    def use_sharded_flat_param() -> None:
        type(handle)._use_sharded_flat_param(handle)
        take_away()

    def use_unsharded_flat_param(unsharded: Tensor) -> None:
        for (module, own), view in views.items():  # a backward that recomputes gets no new ones
            if isinstance(vars(module).get(own), ShardedWeight):
                object.__setattr__(module, own, view)
        views.clear()
        type(handle)._use_unsharded_flat_param(handle, unsharded)

    handle._use_sharded_flat_param = use_sharded_flat_param
    handle._use_unsharded_flat_param = use_unsharded_flat_param
    take_away()
    owner = handle._fully_sharded_module
    inside = {module for module, _ in stand_ins}
    for module in owner.modules():
        if module is not owner and not inside.isdisjoint(module.modules()):
            module.__dict__["requires_grad_"] = partial(_refuse_freezing, module, flat_param)


def _refuse_freezing(module: nn.Module, flat_param: Tensor, requires_grad: bool = True) -> nn.Module:
    if requires_grad == flat_param.requires_grad:  # it is so already
        return module
    raise RuntimeError(
        f"requires_grad_({requires_grad}) of this {type(module).__name__} would do nothing: with use_orig_params=False "
        "its parameters are part of its unit's flat one. Set use_orig_params=True (the default), or freeze a unit as a "
        "whole."
    )
