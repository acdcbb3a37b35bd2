"""FSDP2: `fully_shard` turns parameters into DTensors and hooks the units in place; `fsdp2_prepare_model`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from ...checkpoint.names import clean_name
from ...state.collectives import AllReduceMaxAsync
from ...state.process_group import is_planned
from ..common.grads import global_norm, gradients_of, hook_leaf, refuse_second_derivatives
from ..parallelism.config import build_named_mesh
from ..parallelism.tensor import is_cut
from ..sharded_tensors.global_tensors import NoAccess, ShardAccess
from ..sharded_tensors.kept_tensors import has_storage
from ..sharded_tensors.optimizer_states import OptimizerStates
from ..sharded_tensors.shards import cut_states, gathered
from ..sharded_tensors.user_code import follow_state_dicts, refuse_copies
from ..upstream.lightning import rank_zero_info
from ..upstream.patches import Patches, replace_for_good
from ..upstream.torch_fsdp2 import (
    add_zeros,
    disable_dynamo_once,
    disabled_once,
    drop_partly_reduced,
    drop_unreduced_gradient,
    groups_of_state,
    label_quickly,
    reset_iter_state,
    reshard_to,
    set_frozen_group_dtypes,
    unify_dtypes,
)
from .engine import CPUOffloadGradScaler, Engine, FSDP2GradScaler, GroupGradScaler
from .plugin import FullyShardedDataParallelPlugin
from .settings import FSDP2Settings, resolve_ignored
from .sharded_model import (
    GUARD,
    NamedTensor,
    RootWrapper,
    ShardedModel,
    build_mesh,
    hooked_in_loss,
    hooks_of,
    open_tensors,
    recall_sharded,
    roots_of,
    run_hooks_on,
    unwrap_root,
)
from .step import Close, CollectiveOrder, GroupChanges, is_inside, other_parameters
from .units import Plan, make_masters, output_heads
from .weights import prepare_with_weights


class FSDP2Engine(Engine[FSDP2Settings]):
    """Shards through ``torch.distributed.fsdp.fully_shard``."""

    version = 2
    model_key = "state_dict"
    renews_parameters = True
    keeps_last_unit = True
    """Whether the last unit stays unsharded until its backward, which comes first."""

    def __init__(self, settings: FSDP2Settings, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(settings, mesh, device)
        self._mesh_after_forward = _mesh_after_forward(settings, mesh)

    @override
    def _possible_units(self, model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        impossible = [unit for unit in units if not can_be_unit(unit)]
        if impossible:
            names = {module: clean_name(name) for name, module in model.named_modules()}
            rank_zero_info(
                "FSDP2 gathers these modules with their parent's unit instead of on their own, because FSDP2 cannot "
                f"subclass their classes: {', '.join(f'{names[one]} ({type(one).__name__})' for one in impossible)}."
            )
        return [unit for unit in units if unit not in impossible]

    @override
    def _shard(self, model: nn.Module, plan: Plan) -> nn.Module:
        if self.tensor_parallel is not None:
            self.tensor_parallel.apply(model)
        if self.sequence_parallel is not None:
            self.sequence_parallel.apply(model)
        root = model if isinstance(model, FSDPModule) else self._root_of(model)
        common: dict[str, Any] = {"mesh": self.mesh, "offload_policy": self._offload_policy()}
        ignored_params = {parameter for module in plan.ignored for parameter in module.parameters(recurse=False)}
        ignored_params |= plan.scalars
        if ignored_params:
            common["ignored_params"] = ignored_params
        # Units that stay gathered through a window must not be freed by its forward passes either.
        reshard = self.settings.reshard_after_forward and self.settings.reshard_during_accumulation
        # torch would gather the last unit again at once: only the loss comes between.
        kept = plan.units[-1] if plan.units and self.keeps_last_unit and self._mesh_after_forward is None else None
        policy = self._mp_policy(is_root=False)
        for module in [*plan.parts, *([] if plan.parts else [root])]:
            if not can_be_unit(module):
                raise ValueError(
                    f"FSDP2 cannot shard this {type(module).__name__}: FSDP2 cannot subclass its class. Wrap it in a "
                    "plain nn.Module as an attribute, and train that, or use FSDP1."
                )
        for unit in [*plan.units, *plan.parts]:
            if not isinstance(unit, FSDPModule):
                frees = bool(reshard) and unit is not kept
                fully_shard(unit, reshard_after_forward=frees, mp_policy=policy, **common)
                if self._mesh_after_forward is not None:
                    reshard_to(unit, self._mesh_after_forward)
        heads = [] if plan.parts else self._heads(model, plan)
        for head in heads:  # gathered once for each forward and backward, and treated otherwise as in the root's unit
            fully_shard(head, reshard_after_forward=False, mp_policy=self._mp_policy(is_root=True), **common)
        if not plan.parts and not isinstance(root, FSDPModule):
            # No reshard_after_forward: torch keeps the root gathered, whose parameters backward needs first.
            fully_shard(root, mp_policy=self._mp_policy(is_root=True), **common)
        for each in self.sharded_modules(root):
            replace_for_good("sharded modules", each, _apply=partial(_move, each))
        if self.settings.forward_prefetch:
            units = [unit for unit in [*plan.units, *heads] if isinstance(unit, FSDPModule)]
            for part in plan.parts or [root]:  # which gathers on streams of its own, and alone ends its backward
                inside = set(part.modules())
                _prefetch_in_order([unit for unit in units if unit in inside])
        return root

    def _heads(self, model: nn.Module, plan: Plan) -> list[nn.Module]:
        """A policy that names layers says nothing of the rest; any other says what it wants."""
        by_class = self.settings.wrap.kind == "transformer_based_wrap"
        return output_heads(model, plan.units, plan.ignored) if by_class else []

    def _root_of(self, model: nn.Module) -> nn.Module:
        return RootWrapper(model)

    def _mp_policy(self, *, is_root: bool) -> MixedPrecisionPolicy:
        precision = self.settings.precision
        return MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            output_dtype=precision.output_dtype,
            cast_forward_inputs=precision.cast_root_forward_inputs if is_root else precision.cast_forward_inputs,
        )

    def _offload_policy(self) -> OffloadPolicy:
        if not self.settings.cpu_offload:
            return OffloadPolicy()
        pin = self.settings.pin_memory
        # Pinning on a machine without an accelerator raises (torch 2.13).
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu" if pin is None else pin)

    @override
    @contextmanager
    def named_tensors(
        self, sharded: ShardedModel
    ) -> Iterator[tuple[list[NamedTensor], Callable[[], list[torch.Tensor]]]]:
        yield open_tensors(sharded.root, self.device)

    @override
    def lazy_init(self, root: nn.Module) -> None:
        for unit in roots_of(root, FSDPModule):  # else the first unit that is called would take itself for the root
            unit._get_fsdp_state()._lazy_init()
        self._units = Units(root)
        for group in self._units.groups:
            set_frozen_group_dtypes(group)
        if self.sequence_parallel is not None:
            self.sequence_parallel.after_trial = self._units.forget_forwards
        self._units_by_module = units_by_module(root)
        self.path = CollectiveOrder([clean_name(group._module_fqn or "") for group in self._units.groups], self.timeout)
        label_quickly(self._patches)
        self._watch, self._has_begun = UsedParameterTracker(self._units, self.path, lambda: self.in_step), False
        self._resharded: list[Any] = []
        self._may_wait = False
        self.reset_to_idle(root)
        self._units.discard_unreduced_grads()

    @override
    def sharded_modules(self, root: nn.Module) -> set[nn.Module]:
        return {
            module
            for module in root.modules()
            if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
        }

    @override
    def modules_in_units(self, root: nn.Module) -> Iterable[nn.Module]:
        return self._units_by_module

    @override
    def unshard_for_call(
        self, root: nn.Module, module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Close]:
        unit: Any = self._units_by_module[module]
        if unit is module:  # torch's hooks on the unit do the rest

            def close(output: Any) -> Any:
                self.reshard(root)
                return output

            return args, close
        state = unit._get_fsdp_state()
        args, _ = state._pre_forward(unit, args, {})

        def close_unit(output: Any) -> Any:
            output = state._post_forward(unit, args, output)
            self.reshard(root)
            return output

        return args, close_unit

    @override
    def reset_to_idle(self, root: nn.Module) -> None:
        for unit in roots_of(root, FSDPModule):
            reset_iter_state(unit)
        self.path.forget()

    @override
    def discard_unreduced_grads(self, root: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        self._units.discard_unreduced_grads(parameters)

    @override
    def begin_step(self, root: nn.Module) -> None:
        self._resharded = []
        self._watch.probing, self._has_begun = not self._has_begun and not is_planned(), True
        self._units.forget_forwards()

    @override
    def reshard_before_backward(self, root: nn.Module) -> None:
        self._resharded = [group for group in self._units.groups if group.is_unsharded]
        self.reshard(root)

    @override
    def begin_backward(self, root: nn.Module) -> None:
        again, self._resharded = self._resharded, []
        for group in again:
            group.unshard()
        for group in again:
            group.wait_for_unshard()
        self._units.enable_hooks()

    @override
    def end_backward(self, root: nn.Module, *, reduced: bool) -> None:
        if reduced:
            self.reduce_left_over(root)
            self._watch.sync_used_parameters(self.all_reduce_max_async)

    @override
    def reduce_left_over(self, root: nn.Module) -> None:
        if self._may_wait:
            self._may_wait = self._units.reduce_left_over()

    @override
    def scale_unreduced_grads(self, root: nn.Module, parameters: Iterable[nn.Parameter], factor: float) -> None:
        chosen = set(map(id, parameters))
        for param in self._units.params if self._may_wait else ():
            for gradient in unreduced(param) if id(param.sharded_param) in chosen else ():
                gradient.mul_(factor)

    @override
    def reshard(self, root: nn.Module) -> None:
        self._units.reshard()  # a forward without backward leaves at least the root's unit gathered

    @override
    @contextmanager
    def no_sync(self, root: nn.Module) -> Iterator[None]:
        for unit in roots_of(root, FSDPModule):
            unit.set_requires_gradient_sync(False)
            unit.set_reshard_after_backward(self.settings.reshard_during_accumulation)
        self._may_wait = True
        try:
            yield
        finally:
            for unit in roots_of(root, FSDPModule):
                unit.set_requires_gradient_sync(True)
                unit.set_reshard_after_backward(True)

    @override
    def grad_norm(self, root: nn.Module, parameters: Collection[nn.Parameter], norm_type: float) -> torch.Tensor:
        return global_norm(gradients_of(parameters), norm_type)

    @override
    def total_norm(self, root: nn.Module, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        return global_norm(gradients, norm_type)  # torch's is a partial sum to whoever reads it

    @override
    def grad_scaler(self) -> torch.amp.GradScaler:
        if self.tensor_parallel is not None:
            return GroupGradScaler(self.device.type, self.tensor_parallel.group)
        kind = CPUOffloadGradScaler if self.settings.cpu_offload else FSDP2GradScaler
        return kind(self.device.type)

    @override
    def shard_access(self, root: nn.Module) -> ShardAccess:
        access = UnitAccess(self._units, self._watch, self.optimizers)
        sharded = list(self.sharded_modules(root))
        follow_state_dicts(sharded, access)
        refuse_copies([*sharded, *(module for module in root.modules() if isinstance(module, FSDPModule))])
        return access

    @override
    def state_dict_module(self, root: nn.Module) -> nn.Module:
        return unwrap_root(root)


def _move(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Run ``module._apply()``, and keep what users' code has set on DTensors, of which torch makes new ones."""
    attributes = {name: vars(one) for name, one in module.named_parameters(recurse=False, remove_duplicate=False)}
    type(module)._apply(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if isinstance(parameter, DTensor):
            parameter.__dict__ = attributes[name]
    return module


def _mesh_after_forward(settings: FSDP2Settings, mesh: DeviceMesh) -> DeviceMesh | None:
    """Return over which mesh ``reshard_after_forward=<int>`` keeps parameters between forward and backward.

    `fully_shard` would start groups, and on GPUs communicators, of its own for each unit (torch 2.13).
    """
    size = settings.reshard_after_forward
    if isinstance(size, bool):
        return None
    num_shards, ranks = mesh.size(mesh.ndim - 1), mesh.mesh.flatten().tolist()
    if not 1 < size < num_shards or num_shards % size:
        raise ValueError(
            f"reshard_after_forward={size} must divide {num_shards}, the number of processes that FSDP2 shards over, "
            "and be less. Use such a number, or True or False."
        )
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"reshard_after_forward={size} needs a device_mesh over all {dist.get_world_size()} processes, and this "
            f"one has {len(ranks)}. Use reshard_after_forward=True or False."
        )
    return build_named_mesh({"replicate": len(ranks) // size, "shard": size}, mesh.device_type, ranks)


def _prefetch_in_order(units: list[FSDPModule]) -> None:
    """Make each unit prefetch the next one's parameters: registration order is the order of a static graph."""
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


def _refuse_gradient(record: Callable[[], Any], why: str, _: torch.Tensor) -> None:
    """Refuse a gradient that autograd takes to a sharded parameter, whose hooks run on that of the unsharded one."""
    param = record()  # a hook keeps what it knows, where no garbage collector looks
    if param is not None and is_inside() and hooks_of(param.sharded_param):
        raise RuntimeError(why)


# ------------------------------------------------------------------------------------------------
# The units of an FSDP2 model in torch: states, parameter groups, and leftovers of a backward.


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
        self._guarded: set[Any] = set()
        """Those whose sharded form refuses gradients of autograd's, as users have hooked it."""
        self._root = root
        self.root_groups: list[Any] = [
            group for unit in roots_of(root, FSDPModule) for group in groups_of_state(unit._get_fsdp_state())
        ]
        """Groups of the outermost units."""

    def places(self) -> dict[Any, tuple[nn.Module, str]]:
        """Return in which module, and under which name, each parameter is registered, sharded or not."""
        own = {id(each): (module, name) for module in self._root.modules() for name, each in module._parameters.items()}
        forms = ((param, (param.sharded_param, getattr(param, "_unsharded_param", None))) for param in self.params)
        return {param: next(own[id(form)] for form in both if id(form) in own) for param, both in forms}

    def reshard(self) -> None:
        """Leave none gathered, and no gather begun: what a unit has prefetched for another has the values of then."""
        for group in self.groups:
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            if not group.is_sharded:
                group.reshard()

    def reduce_left_over(self) -> bool:
        """Reduce what waits in parts that a window's last backward did not reach, as the end of their own does.

        Returns:
            Whether parameters that are frozen now have gradients that wait.
        """
        waiting = [param for param in self.params if unreduced(param)]
        chosen = {param for param in waiting if param.sharded_param.requires_grad}
        for unit in roots_of(self._root, FSDPModule) if chosen else ():
            inside: Any = cast("nn.Module", unit).modules()
            groups = [group for one in inside if isinstance(one, FSDPModule) for group in groups_of_state(_state(one))]
            if any(param in chosen for group in groups for param in group.fsdp_params):
                _state(unit)._root_post_backward_final_callback()
        return len(chosen) < len(waiting)

    def enable_hooks(self) -> None:
        """Enable users' hooks on parameters for the backward that comes."""
        for param in self.params:
            if not param.sharded_param._backward_hooks:
                continue
            if param not in self._guarded:
                self._guarded.add(param)
                refuse = partial(_refuse_gradient, weakref.ref(param), hooked_in_loss(*self.places()[param]))
                hook_leaf(param.sharded_param, GUARD, refuse)
            if (leaf := getattr(param, "_unsharded_param", None)) is not None:
                run_hooks_on(leaf, param)

    def forget_forwards(self) -> None:
        """Forget forwards without a backward (validation): they are no part of the next step's order."""
        for state in self.states:
            state._comm_ctx.post_forward_order.clear()
        for group in self.groups:
            group._post_forward_indices.clear()

    def discard_unreduced_grads(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget the gradients that no backward has reduced yet.

        Args:
            parameters: Sharded parameters whose gradients to forget; None for all.
        """
        if parameters is None:
            for group in self.groups:
                drop_partly_reduced(group)
        held = [param for param in self.params if unreduced(param)]
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
        watch: Of the same units.
        optimizers: Of the running fit.
    """

    def __init__(self, units: Units, watch: UsedParameterTracker, optimizers: Sequence[Optimizer]) -> None:
        self._params = {
            id(param.sharded_param): (param, group) for group in units.groups for param in group.fsdp_params
        }
        self._watch, self._optimizers = watch, optimizers

    @override
    def begin(self) -> None:
        """Find the states of sharded parameters by their unsharded forms, too."""
        OptimizerStates.follow(self._optimizers, self._trained)

    def _trained(self, key: Any) -> Any:
        if not isinstance(key, nn.Parameter) or id(key) in self._params:
            return key
        for param, _ in self._params.values():
            if getattr(param, "_unsharded_param", None) is key:
                self.gave_states = True
                return param.sharded_param
        return key

    @override
    def end(self) -> None:
        """Shard what users' code has set as states of sharded parameters."""
        for optimizer in self._optimizers:
            cut_states(optimizer)

    @override
    def writable(self, tensor: torch.Tensor, *, assigns: bool) -> torch.Tensor | None:
        """Return an unsharded parameter that is assigned to, whose memory is torch's; else None."""
        if not assigns or not isinstance(tensor, nn.Parameter):
            return None
        unsharded = (getattr(param, "_unsharded_param", None) for param, group in self._params.values())
        return tensor if any(one is tensor for one in unsharded) else None

    @override
    def sync_to_optimizer(self, tensor: torch.Tensor) -> None:
        """Copy what was written to an unsharded parameter to its shard."""
        param, group = self._params.get(id(tensor), (None, None))
        if param is not None and group.is_unsharded:
            self._watch.changes[group].take()

    @override
    def lends(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in an unsharded parameter."""
        return has_storage(tensor) and any(one.has(tensor) for one in self._watch.changes.values())

    @override
    def note_alias(self, tensor: torch.Tensor) -> None:
        """Make the unit of an unsharded parameter compare its values when it reshards."""
        for one in self._watch.changes.values() if has_storage(tensor) else ():
            if one.has(tensor):
                one.compare()

    @torch.no_grad()
    def note_write_to_shard(self, tensor: torch.Tensor) -> None:
        """Copy what a step has written to shards through the optimizer to the unsharded parameter; on all ranks.

        Raises:
            RuntimeError: If a tensor-parallel layer has a part of it.
        """
        param, group = self._params.get(id(tensor), (None, None))
        if param is None or not group.is_unsharded:
            return
        unsharded = param._unsharded_param
        if is_cut(unsharded):
            raise RuntimeError(
                "A step changed a parameter of optimizer.param_groups while a tensor-parallel layer has it unsharded. "
                "Change the module's own: for parameter in self.parameters()."
            )
        unsharded.copy_(gathered(tensor))

    def is_unreduced(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter has a gradient that the ranks have not reduced yet."""
        param, _ = self._params.get(id(tensor), (None, None))
        return param is not None and bool(unreduced(param))


def _state(unit: FSDPModule) -> Any:
    return unit._get_fsdp_state()


def unreduced(param: Any) -> list[torch.Tensor]:
    """Return the gradients of a parameter that the ranks have not reduced yet."""
    leaf = getattr(param, "_unsharded_param", None)
    found = [] if leaf is None else [leaf.grad, param.unsharded_accumulated_grad]
    return [gradient for gradient in found if gradient is not None]


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


class UsedParameterTracker:
    """Sees which parameters a backward reached on this rank, and lets the ranks agree.

    torch reduces those parameters of a unit that have a gradient. Ranks that use different ones would add up gradients
    of different parameters, so whoever lacks a gradient contributes zeros. What none of them used is without a gradient
    afterwards, as in one process.
    """

    def __init__(self, units: Units, path: CollectiveOrder, is_in_step: Callable[[], bool]) -> None:
        self._units, self._path, self._is_in_step = units, path, is_in_step
        self._used: set[Any] = set()
        self._filled: set[Any] = set()
        self.probing = False
        """Whether this is the first training step of a fit."""
        for state in units.states:
            disable_dynamo_once(state)
        places = units.places()
        self.changes = {group: GroupChanges(group, lambda: self.probing) for group in units.groups}
        for number, group in enumerate(units.groups):
            registered = [(param, *places[param]) for param in group.fsdp_params]
            replace_for_good(
                "FSDP2 groups",
                group,
                unshard=self._before_unshard(number, group, registered, type(group).unshard),
                post_backward=self._around(number, group, disabled_once(type(group).post_backward)),
                pre_backward=partial(_first_derivatives_only, group, disabled_once(type(group).pre_backward)),
            )

    def _before_unshard(
        self, number: int, group: Any, registered: list[tuple[Any, nn.Module, str]], unshard: Callable[..., Any]
    ) -> Callable[..., Any]:
        path = self._path

        def run(async_op: bool = False) -> None:
            if not group.is_unsharded:
                for param, module, name in registered:
                    if module._parameters.get(name) is not param.sharded_param:
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
        unify_dtypes(used)

    def sync_used_parameters(self, all_reduce_max_async: AllReduceMaxAsync) -> None:
        """Synchronize the set across ranks, after a backward that reduced; every rank calls it.

        Args:
            all_reduce_max_async: Reduces a small integer tensor to its maximum over the ranks.
        """
        params, used, filled = self._units.params, self._used, self._filled
        self._used, self._filled = set(), set()
        of_all = all_reduce_max_async([int(param in used) for param in params])
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
    with Patches("sharded modules") as patches:
        try:
            patches.put(module, "__class__", type(f"FSDP{own.__name__}", (FSDPModule, own), {}))
        except TypeError:
            return False
    return True


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before FSDP2 put one of its own before it."""
    found: type[nn.Module] = type(module)
    if isinstance(module, FSDPModule) and found.__bases__[0] is FSDPModule:
        found = found.__bases__[1]
    return found


# ------------------------------------------------------------------------------------------------
# FSDP2 in a plain PyTorch loop: the same sharding as under the strategy, with the model itself as the root.


class Accelerator(Protocol):
    """The required attributes of an ``accelerator``; it may have a ``device_mesh``, too."""

    @property
    def device(self) -> torch.device:
        """This process's device."""
        ...

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        ...

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin:
        """The settings of sharding."""
        ...


class _InPlaceEngine(FSDP2Engine):
    """Makes the model itself the root: nobody redirects its ``forward`` here."""

    refuses_holders = False  # users hold the original parameters, for `map_parameters`
    keeps_last_unit = False  # nobody reshards it after a forward without a backward

    @override
    def _root_of(self, model: nn.Module) -> nn.Module:
        return model


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard ``model`` in place as the plugin says; a model that is sharded already is left alone.

    Every rank calls it, in a running process group. Parameters become new objects: make the optimizer afterwards, or
    switch it (`parameters_by_name`, `map_parameters`, `fsdp2_switch_optimizer_parameters`). Where the plugin's
    ``mixed_precision_policy`` has a ``param_dtype``, what is trained is stored in fp32, as in Accelerate. With
    ``cpu_ram_efficient_loading=True`` rank 0's weights and buffers are sent to all; the other ranks' may be on the
    meta device.

    Args:
        accelerator: Anything with ``device``, ``is_main_process``, ``fsdp_plugin`` and, optionally, ``device_mesh``:
            a mesh, ``(replicate, shard)``, or None to shard over every rank. A connected strategy gives its precision.
        model: Not sharded with FSDP1.

    Returns:
        ``model``.

    Raises:
        ValueError: If the plugin is for FSDP1, or does not fit the model.
        RuntimeError: If there is no process group, if ``model`` was sharded by a strategy, or if rank 0's weights
            cannot be sent.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``.
    """
    plugin = accelerator.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp2_prepare_model needs a plugin with fsdp_version=2, got fsdp_version={plugin.fsdp_version}. "
            "Set FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    if isinstance(model, FSDPModule):
        return model
    if recall_sharded(model, FSDP2Engine.version) is not None:
        raise RuntimeError(
            f"{type(model).__name__} was sharded by AccelFSDPStrategy, whose Trainer calls it through a separate "
            "root. Use it under that strategy, or build a new model."
        )
    if not dist.is_initialized():
        raise RuntimeError("There is no process group: call torch.distributed.init_process_group() first.")
    engine = _engine_for(accelerator)
    if engine.settings.precision.param_dtype is not None:
        make_masters(model, without=resolve_ignored(model, engine.settings.ignored_modules))
    prepare_with_weights(engine, model, accelerator)
    return model


def _engine_for(accelerator: Accelerator) -> _InPlaceEngine:
    connected = getattr(accelerator, "_engine", None)  # a strategy knows the Trainer's precision
    if isinstance(connected, FSDP2Engine):
        return _InPlaceEngine(connected.settings, connected.mesh, connected.device)
    given = getattr(accelerator, "device_mesh", None)
    if isinstance(given, DeviceMesh) and given.ndim == 1:
        mesh = given
    else:
        mesh = build_mesh(given, dist.get_world_size(), accelerator.device.type)
    settings = accelerator.fsdp_plugin.settings(dp_replicate=mesh.size(0) if mesh.ndim == 2 else 1)
    if not isinstance(settings, FSDP2Settings):
        raise TypeError(f"expected FSDP2Settings, got {type(settings).__name__}.")
    return _InPlaceEngine(settings, mesh, accelerator.device)
