"""Private names of torch's FSDP2 (2.11 to 2.15): the states and parameter groups behind ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group
from torch.profiler import record_function
from typing_extensions import override

from .patches import Patches, replace_for_good

__all__ = [
    "add_zeros",
    "disable_dynamo_once",
    "disabled_once",
    "drop_partly_reduced",
    "drop_unreduced_gradient",
    "set_frozen_group_dtypes",
    "groups_of_state",
    "label_quickly",
    "reset_iter_state",
    "reshard_to",
    "unify_dtypes",
]

_COMMON = "torch.distributed.fsdp._fully_shard._fsdp_common"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"
_PROFILER = "torch.autograd.profiler"

ATTRIBUTES = {
    "_all_gather_result": (_GROUP, "an exception leaves a gather that nobody waits for"),
    "_comm_ctx": (_STATE, "the order of forwards, from which backward prefetches"),
    "_dynamo_disable": (_COMMON, "what keeps hooks out of torch.compile, anew in each call"),
    "_device_handle": (_STATE, "a root that an exception left waits for its gathers"),
    "_fsdp_param_group": (_STATE, "the parameters that a unit gathers together"),
    "_get_fsdp_state": ("torch.distributed.fsdp.FSDPModule", "the state behind a sharded module"),
    "_is_profiler_enabled": (_PROFILER, "whether somebody reads labels"),
    "_lazy_init": (_STATE, "a part may be called before the root ever was"),
    "_modules_to_run_forward": (_STATE, "an exception leaves modules that have not run"),
    "_module_fqn": (_GROUP, "a unit's name, for errors"),
    "_orig_dtype": (_GROUP, "gradients that torch has not reduced have the parameters' dtype"),
    "_partial_reduce_output": (_GROUP, "hybrid sharding keeps gradients that are reduced in part"),
    "_partial_reduce_output_layout": (_GROUP, "what the gradients that are reduced in part are of"),
    "_init_sharded_post_forward_param_metadata": (_PARAM, "one mesh for all units, not one for each"),
    "_forward_hooks": ("torch.nn.Module", "those of a unit are replaced where they stand"),
    "_forward_pre_hooks": ("torch.nn.Module", "those of a unit are replaced where they stand"),
    "_post_forward": (_STATE, "a part called from outside goes through its unit's hooks"),
    "_post_forward_indices": (_GROUP, "forwards without a backward are no part of the prefetching order"),
    "_pre_backward": (_STATE, "a hook of autograd's, looked up in each forward"),
    "_pre_forward": (_STATE, "a part called from outside goes through its unit's hooks"),
    "_reduce_dtype": (_GROUP, "gradients that torch has not reduced are reduced in its dtype"),
    "_reshard_after_forward_event": (_GROUP, "an exception leaves a unit that is not sharded again"),
    "_root_post_backward_final_callback": (_STATE, "what ends a backward, looked up in each"),
    "_setattr_on_modules": (_PARAM, "modules show the shards, also where backward will gather from fewer processes"),
    "_sharded_post_forward_param": (_PARAM, "what lies over fewer processes is freed, and is nobody's parameter"),
    "_sharded_post_forward_param_data": (_PARAM, "what lies over fewer processes is freed"),
    "_state_ctx": (_STATE, "an exception leaves the iteration open"),
    "_to_sharded": (_GROUP, "an exception leaves parameters gathered"),
    "_to_sharded_post_forward": (_GROUP, "after a forward, parameters lie over fewer processes"),
    "_training_state": (_GROUP, "an exception leaves it set"),
    "_wait_all_gather_streams_on_event": (_GROUP, "what is sharded again is not gathered before that is done"),
    "_unsharded_param": (_PARAM, "the gathered parameter, where unreduced gradients are"),
}

ONLY_WITH = {
    "_dynamo_disable": "torch>=2.13",
    "_orig_dtype": "torch<2.15",
    "_partial_reduce_output_layout": "torch>=2.15",
    "_wait_all_gather_streams_on_event": "torch<2.15",
}
"""Names that not all versions have, and that are done without in the others."""


def groups_of_state(state: Any) -> list[Any]:
    """Return a unit's parameter groups."""
    groups = getattr(state, "_fsdp_param_groups", None)  # one group in an attribute of its own until torch 2.12
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def disable_dynamo_once(state: Any) -> None:
    """Keep the hooks of a unit out of torch.compile once, see `disabled_once`."""
    for name in ("_pre_backward", "_root_post_backward_final_callback"):
        replace_for_good("FSDP2 groups", state, **{name: MethodType(disabled_once(getattr(type(state), name)), state)})
    for name in ("_pre_forward", "_post_forward"):
        hook = getattr(type(state), name)
        replace_for_good("FSDP2 groups", state, **{name: MethodType(disabled_once(hook), state)})
        for module in state._modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, registered in hooks.items():  # in its place: others may have come before and after it
                    if registered == MethodType(hook, state):
                        hooks[key] = getattr(state, name)


@cache
def disabled_once(hook: Any) -> Callable[..., Any]:
    """Return one of FSDP2's hooks as a function that torch.compile does not trace.

    torch (2.13, 2.14) makes it one in each call, which takes as long as all that we add to a step. What others have put
    in a hook's place is returned as it is.
    """
    decorator = getattr(_fsdp_common, "_dynamo_disable", None)
    if decorator is None or getattr(hook, "__code__", None) is not decorator(disabled_once).__code__:
        return hook
    return torch.compiler.disable(hook.__wrapped__, reason="FSDP2's hooks")  # type: ignore[no-untyped-call]


def label_quickly(patches: Patches) -> None:
    """Make FSDP2's labels for profilers almost free while no profiler runs; else they are torch's own.

    Seven for each unit and step, each through the dispatcher (torch 2.13): a tenth of a step of small units. What
    others have put in their place stays.
    """
    patches.remove()
    labelled: Any = _fsdp_param_group
    if labelled.record_function in (record_function, _label):
        patches.share(labelled, "record_function", lambda _: _label)


def _label(name: str, args: str | None = None) -> AbstractContextManager[Any]:
    return record_function(name, args) if profiler._is_profiler_enabled else _RecordFunctionFast(name)


def set_frozen_group_dtypes(group: Any) -> None:
    """Tell a group that was frozen when torch looked in which dtypes to reduce: it may be thawed.

    torch 2.13 leaves them at None, and then cannot reduce under mixed precision; 2.15 looks at frozen parameters, too.
    """
    if not hasattr(group, "_orig_dtype") or group._orig_dtype is not None:
        return
    floating = [param for param in group.fsdp_params if param.orig_dtype.is_floating_point]
    if len({param.orig_dtype for param in floating}) == 1:
        group._orig_dtype, group._reduce_dtype = floating[0].orig_dtype, floating[0].reduce_dtype


def drop_unreduced_gradient(param: Any) -> None:
    """Forget what backwards without a reduction have left of a parameter's gradient."""
    param._unsharded_param.grad = None
    if "unsharded_accumulated_grad" in vars(param):  # torch 2.15 adds up in the gradient itself
        param.unsharded_accumulated_grad = None


def drop_partly_reduced(group: Any) -> None:
    """Forget what hybrid sharding has reduced in part."""
    group._partial_reduce_output = None
    getattr(group, "_partial_reduce_output_layout", []).clear()  # of torch 2.15


def add_zeros(params: Iterable[Any]) -> None:
    """Give parameters a gradient of zeros, of the dtype that those of their unit have."""
    for param in params:
        leaf = param._unsharded_param
        accumulates = hasattr(param, "to_accumulated_grad_if_needed")
        leaf.grad = torch.zeros_like(leaf, dtype=None if accumulates else leaf.grad_dtype)


def unify_dtypes(params: Sequence[Any]) -> None:
    """Bring the gradients of a unit to one dtype, as torch wants them; 2.15 does it itself."""
    if [param for param in params if vars(param).get("unsharded_accumulated_grad") is not None]:
        for param in params:
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


class _GroupOverFewer(_fsdp_param_group.FSDPParamGroup):
    """Between a forward and its backward it is sharded over fewer processes. Nothing but that backward sees it.

    torch (2.13) shows users that form, with other rows where a size is not divisible, and a second forward gathers from
    it although the shards may have changed since.
    """

    @override
    def unshard(self, async_op: bool = False) -> None:
        if self.is_sharded_post_forward and self._training_state.name != "PRE_BACKWARD":
            self._to_sharded()
        super().unshard(async_op)

    @override
    def _to_sharded_post_forward(self) -> None:
        if not torch.is_grad_enabled():  # no backward will come
            self._to_sharded()
            return
        super()._to_sharded_post_forward()  # type: ignore[no-untyped-call]
        for param in self.fsdp_params:
            param._setattr_on_modules(param.sharded_param)

    @override
    def _to_sharded(self) -> None:
        super()._to_sharded()  # type: ignore[no-untyped-call]
        for param in self.fsdp_params:  # torch keeps them until the next forward
            param._sharded_post_forward_param = param._sharded_post_forward_param_data = None


def reshard_to(unit: Any, mesh: DeviceMesh) -> None:
    """Keep a unit's parameters over another mesh between forward and backward.

    Args:
        unit: Sharded, and never called before.
        mesh: Two dimensions, of which the second one shards; it divides the mesh of the unit.
    """
    info = _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in groups_of_state(unit._get_fsdp_state()):
        replace_for_good("FSDP2 groups", group, __class__=_GroupOverFewer)
        group.post_forward_mesh_info = info
        for param in group.fsdp_params:
            param.post_forward_mesh_info = info
            param._init_sharded_post_forward_param_metadata(torch.empty(param.sharded_param.size(), device="meta"))


def reset_iter_state(unit: FSDPModule) -> None:
    """Bring a root to rest that an exception has left in a forward or backward. All but partly reduced gradients stay.

    Source: torch 2.13 ``FSDPModule.reset_iter_state``, which 2.10 lacks; 2.15 drops all gradients there.
    """
    root: Any = unit._get_fsdp_state()
    groups = [group for state in root._state_ctx.all_states for group in groups_of_state(state)]
    params = [param for group in groups for param in group.fsdp_params]
    leaves = [getattr(param, name, None) for param in params for name in ("sharded_param", "_unsharded_param")]
    gradients = [(leaf, leaf.grad) for leaf in leaves if leaf is not None and leaf.grad is not None]
    if hasattr(unit, "reset_iter_state"):
        unit.reset_iter_state()
    else:
        _reset_root(root, groups)
    for leaf, gradient in gradients:
        if leaf.grad is None:
            leaf.grad = gradient.to(getattr(leaf, "grad_dtype", None) or gradient.dtype)


def _reset_root(root: Any, groups: Iterable[Any]) -> None:
    common = root._comm_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        pending = getattr(common, name, None)  # the names are there from the first forward on
        if pending is not None:
            _wait(root._device_handle, pending.event)
            setattr(common, name, None)
    getattr(common, "post_forward_order", []).clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
    for group in groups:
        _reset_group(group)
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any) -> None:
    gathering, group._all_gather_result = group._all_gather_result, None
    if gathering is not None:
        _wait(group.device_handle, gathering.all_gather_event)
        if isinstance(gathering.all_gather_work, dist.Work):
            gathering.all_gather_work.wait()
    group.finalize_backward()
    event, group._reshard_after_forward_event = group._reshard_after_forward_event, None
    if event is not None:
        group._wait_all_gather_streams_on_event(event)
    group._partial_reduce_output = None
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()


def _wait(device: Any, event: Any) -> None:
    if event is not None:
        device.current_stream().wait_event(event)
