"""FSDP1: `FullyShardedDataParallel`, a wrapper module around each unit; its backward, and access to its shards."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from ...checkpoint.names import clean_name
from ...state.collectives import AllReduceMaxAsync
from ...state.process_group import is_planned
from ..common.broadcast import send_from_rank_zero
from ..common.grads import gradients_of, hook_leaf, norm_of_parts, refuse_second_derivatives
from ..common.modules import is_extra_state
from ..sharded_tensors.global_tensors import NoAccess, ShardAccess
from ..sharded_tensors.kept_tensors import has_storage, storage_of
from ..sharded_tensors.optimizer_states import OptimizerStates
from ..sharded_tensors.shards import FlatLayout, FlatShard, cut_states, gathered, states_of
from ..sharded_tensors.user_code import (
    follow_state_dicts,
    is_hook,
    is_step,
    is_user_code,
    library_code,
    refuse_copies,
    replace_in_user_code,
)
from ..upstream.patches import replace_for_good
from ..upstream.torch_core import tree_map_only
from ..upstream.torch_fsdp1 import (
    HandleTrainingState,
    _lazy_init,
    _post_backward_hook,
    _post_forward,
    _post_forward_reshard,
    _pre_forward,
    _pre_forward_unshard,
    _register_pre_backward_hooks,
    _root_pre_forward,
)
from .engine import CPUOffloadShardedGradScaler, Engine, check_flat_parameters
from .flat_params import (
    ONE_BACKWARD,
    FrozenGradients,
    add_unreduced,
    add_waiting_gradients,
    assign_gradient,
    check_not_summoned,
    discard_unreduced_grads,
    forget_frozen_hooks,
    forget_order,
    forget_views,
    gather_for_backward,
    guard_shards,
    hook_state,
    is_gathered,
    is_unreduced,
    layouts_of,
    names_of,
    owners_of,
    reduce_left_over,
    reset_to_idle,
    reshard,
    scale_unreduced_grads,
    stash,
    translate_error,
    units_by_module,
    units_of,
    waiting_units,
)
from .settings import FSDP1Settings
from .sharded_model import (
    HOOKED,
    NamedTensor,
    RootWrapper,
    ShardedModel,
    hooked_in_loss,
    hooks_of,
    load_model_state_dict,
    model_state_dict,
    named_tensors,
    never_runs,
    own_tensors,
    roots_of,
    run_hooks,
    swap_for_empty,
)
from .step import Close, CollectiveOrder, FlatChanges, other_parameters
from .units import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..common.grads import Sharding


_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_KEPT_AFTER_FORWARD = {
    ShardingStrategy.FULL_SHARD: ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class FSDP1Engine(Engine[FSDP1Settings]):
    """Shards through ``torch.distributed.fsdp.FullyShardedDataParallel``."""

    version = 1
    model_key = "model"
    renews_parameters = False  # they are kept, or become part of a flat one
    _accumulating = False
    _waiting: Sequence[Any] = ()
    """Units that a step has used and its backward has not reached yet."""

    def __init__(self, settings: FSDP1Settings, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(settings, mesh, device)
        self._graphs = RetainedGraphs()

    @override
    def _shard(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.deferred_init:
            for module in plan.ignored:
                self._allocate(module)
        with warnings.catch_warnings():
            # One process, and NO_SHARD on request: the user knows, and torch says it for every unit.
            warnings.filterwarnings("ignore", ".*NO_SHARD.*")
            if not plan.parts:
                return self._wrap(model, plan)
            _replace(model, {part: self._wrap(part, plan) for part in plan.parts})
        return RootWrapper(model)

    def _wrap(self, model: nn.Module, plan: Plan) -> FullyShardedDataParallel:
        chosen, settings = set(plan.units), self.settings

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return recurse or module in chosen

        with _registered_once(model, chosen) as others:
            root = FullyShardedDataParallel(
                model,
                device_mesh=self.mesh,
                sharding_strategy=self._sharding_strategy(),
                # Shards of a CPU model are in host memory already, and torch 2.13 fails to pin them without a GPU.
                cpu_offload=CPUOffload(offload_params=settings.cpu_offload and self.device.type != "cpu"),
                auto_wrap_policy=policy if plan.units else None,
                backward_prefetch=settings.backward_prefetch,
                mixed_precision=self._mixed_precision(),
                **_ignored(model, plan),
                param_init_fn=self._param_init_fn(model, deferred_init=plan.deferred_init),
                device_id=self.device,
                forward_prefetch=settings.forward_prefetch,
                limit_all_gathers=settings.limit_all_gathers,
                use_orig_params=settings.use_orig_params,
            )
            others.update({unit._fsdp_wrapped_module: unit for unit in units_of(root)})
        return root

    def _param_init_fn(self, model: nn.Module, *, deferred_init: bool) -> Callable[[nn.Module], None] | None:
        """Return a function that materializes modules on the meta device, with rank 0's values on all ranks."""
        given = self.settings.param_init_fn
        if deferred_init:
            return given or self._allocate
        tensors = itertools.chain(model.parameters(), model.buffers())
        if not self.settings.sync_module_states or not any(tensor.is_meta for tensor in tensors):
            return given

        def materialize(module: nn.Module) -> None:
            if given is not None:
                given(module)
            elif any(tensor.is_meta for tensor in own_tensors(module)):
                with torch.no_grad():  # as torch does it
                    module.to_empty(device=self.device, recurse=False)
                    module.reset_parameters()  # type: ignore[operator]
            send_from_rank_zero(own_tensors(module), self.device)

        return materialize

    def _allocate(self, module: nn.Module) -> None:
        """Give the meta tensors of ``module`` itself memory, with ties kept, unlike ``to_empty``."""
        for tensor in own_tensors(module):
            if tensor.is_meta:
                swap_for_empty(tensor, self.device)

    @override
    @contextmanager
    def named_tensors(
        self, sharded: ShardedModel
    ) -> Iterator[tuple[list[NamedTensor], Callable[[], list[torch.Tensor]]]]:
        for root in roots_of(sharded.root, FullyShardedDataParallel):
            _lazy_init(root, root)  # with CPU offload torch copies what there is into pinned memory then
        reshard(sharded.root)
        module = self.state_dict_module(sharded.root)
        state = model_state_dict(module, is_checkpoint=False)
        extra = {name: state.pop(name) for name in list(state) if is_extra_state(name)}
        names: dict[str, list[str]] = {name: [name] for name in state if name not in sharded.ties}
        for alias, name in sharded.ties.items():
            names[name].append(alias)
        tensors = [NamedTensor(tuple(known), state[name], persistent=True) for name, known in names.items()]
        tensors += [named for named in named_tensors(module) if not named.persistent]
        yield tensors, lambda: [named.local() for named in tensors]
        state.update({alias: state[name] for alias, name in sharded.ties.items()})
        load_model_state_dict(module, {**state, **extra}, is_checkpoint=False)

    def _sharding_strategy(self) -> ShardingStrategy:
        """Return the strategy that fits the mesh.

        Raises:
            ValueError: If a hybrid strategy has no two-dimensional mesh, or the other way round; or a mesh of copies
                that are not sharded.
        """
        strategy, hybrid_mesh = self.settings.sharding_strategy, self.mesh.ndim == 2
        if not self.settings.reshard_during_accumulation:  # these stay gathered through no_sync()
            strategy = _KEPT_AFTER_FORWARD.get(strategy, strategy)
        if (strategy in _HYBRID) != hybrid_mesh:
            raise ValueError(
                f"sharding_strategy={strategy.name} and a mesh of shape {tuple(self.mesh.shape)} do not match. "
                "Hybrid strategies need device_mesh=(replicate, shard), and such a mesh needs HYBRID_SHARD(_ZERO2)."
            )
        if hybrid_mesh and self.mesh.size(1) == 1 < self.mesh.size(0):  # torch 2.13 would not reduce at all
            raise ValueError(
                f"device_mesh={tuple(self.mesh.shape)} shards over one process, where FSDP1 would not reduce "
                "gradients across replicas. Omit device_mesh and use sharding_strategy='NO_SHARD', or "
                "fsdp_version=2."
            )
        return strategy

    def _mixed_precision(self) -> MixedPrecision | None:
        precision = self.settings.precision
        if precision.param_dtype is precision.reduce_dtype is precision.buffer_dtype is None:
            return None
        return MixedPrecision(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            buffer_dtype=precision.buffer_dtype,
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_root_forward_inputs,
        )

    @override
    def lazy_init(self, root: nn.Module) -> None:
        # Else the first unit that is called would take itself for the root.
        for unit in roots_of(root, FullyShardedDataParallel):
            _lazy_init(unit, unit)
        self._units = units_by_module(root)
        units = units_of(root)
        self.path = CollectiveOrder([clean_name(unit_name) for unit_name in names_of(root, units)], self.timeout)
        engine = weakref.ref(self)  # torch's hooks on gradients keep what they know, past any garbage collector
        self._watch = UsedParameterTracker(root, self.path, lambda: _is_in_step(engine()))
        self._frozen = FrozenGradients(root)
        self._has_begun = False
        self._resharded: list[Any] = []
        guard_shards(root)
        for number, unit in enumerate(units):
            add_waiting_gradients(unit, lambda: _is_reducing(engine()), partial(self.path.reduce, number))
        self.reset_to_idle(root)
        self._watch.forget_gradients()
        discard_unreduced_grads(root)

    @override
    def check_optimizers(self, root: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().check_optimizers(root, optimizers)
        if not self.settings.use_orig_params:
            check_flat_parameters(root, optimizers)

    @override
    def sharded_modules(self, root: nn.Module) -> set[nn.Module]:
        return owners_of(root)

    @override
    def modules_in_units(self, root: nn.Module) -> Iterable[nn.Module]:
        return self._units

    @override
    def unshard_for_call(
        self, root: nn.Module, module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Close]:
        outermost, unit = self._units[module]
        handle: Any = unit._handle
        hooked = unit is module  # its own forward does the rest
        forget_frozen_hooks(root)
        self._frozen.stash()
        args = tree_map_only(torch.Tensor, _with_history, args)
        args, _ = _root_pre_forward(outermost, outermost, args, {})
        if not hooked:
            inner = unit._fsdp_wrapped_module
            args, _ = _pre_forward(unit, handle, _pre_forward_unshard, inner, args, {})

        def close(output: Any) -> Any:
            if not hooked:
                output = _post_forward(unit, handle, _post_forward_reshard, unit, None, output)
            if unit is not outermost:  # who ends the backward of this call, if there is one
                output = _register_pre_backward_hooks(outermost, outermost, output, None)
            self.reshard(root)
            self._frozen.restore()
            return output

        return args, close

    @override
    def translate_error(self, error: BaseException) -> RuntimeError | None:
        return translate_error(error, {module: unit for module, (_, unit) in self._units.items()})

    @override
    def reset_to_idle(self, root: nn.Module) -> None:
        reset_to_idle(root)
        self._watch.in_backward = False
        self.path.forget()
        self._frozen.restore()

    @override
    def discard_unreduced_grads(self, root: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        parameters = None if parameters is None else list(parameters)
        self._watch.forget_gradients(parameters)
        self._frozen.forget(parameters)
        discard_unreduced_grads(root, parameters)

    @override
    def end_training(self, root: nn.Module) -> None:
        super().end_training(root)
        self._graphs.forget(root)
        forget_views(root)

    @override
    def begin_forward(self) -> None:
        self._frozen.stash()

    @override
    def end_forward(self) -> None:
        self._frozen.restore(also_later=True)

    @override
    def begin_step(self, root: nn.Module) -> None:
        self._watch.probing, self._has_begun = not self._has_begun and not is_planned(), True
        self._waiting, self._resharded = [], []
        self._graphs.forget(root)
        forget_order(root)

    @override
    def end_step(self, root: nn.Module) -> None:
        self._waiting = waiting_units(root)

    @override
    def reshard_before_backward(self, root: nn.Module) -> None:
        self._resharded = [unit for unit in units_of(root) if is_gathered(unit._handle)]
        self.reshard(root)

    @override
    def begin_backward(self, root: nn.Module) -> None:
        again, self._resharded = self._resharded, []
        for unit in again:
            gather_for_backward(unit)
        expected, self._waiting = self._waiting, []
        self._graphs.begin_backward(root)
        expect_backward(root, expected)
        self._watch.begin()
        self._watch.in_backward = True
        self._frozen.stash()

    @override
    def end_backward(self, root: nn.Module, *, reduced: bool) -> None:
        self._watch.in_backward = False
        stash(root, self._watch.without, reduced=reduced)
        self._frozen.restore()
        if reduced:
            self.reduce_left_over(root)
            self._watch.sync_used_parameters(self.all_reduce_max_async)

    @override
    def reduce_left_over(self, root: nn.Module) -> None:
        reduce_left_over(root)

    @override
    def scale_unreduced_grads(self, root: nn.Module, parameters: Iterable[nn.Parameter], factor: float) -> None:
        scale_unreduced_grads(root, parameters, factor)

    @override
    def keep_graph(self) -> None:
        self._graphs.keep()

    @override
    def reshard(self, root: nn.Module) -> None:
        reshard(root)

    @override
    @contextmanager
    def no_sync(self, root: nn.Module) -> Iterator[None]:
        self._accumulating = True
        try:
            with ExitStack() as stack:
                for fsdp_root in roots_of(root, FullyShardedDataParallel):
                    stack.enter_context(fsdp_root.no_sync())
                yield
        finally:
            self._accumulating = False
            with library_code():  # also where users' code toggles an optimizer
                stash(root, self._watch.without)  # what backwards of the user's own left

    @override
    def grad_norm(self, root: nn.Module, parameters: Collection[nn.Parameter], norm_type: float) -> torch.Tensor:
        sharded = _sharded_parameters(root)
        ours = [parameter for parameter in parameters if parameter in sharded]
        whole = [parameter for parameter in parameters if parameter not in sharded]
        parts: dict[Sharding, list[torch.Tensor]] = {}
        if ours:  # also where this rank has no gradient of them: the others wait for it
            parts[self._sharding] = gradients_of(ours)
        parts[None, ()] = gradients_of(whole)
        return norm_of_parts(parts, norm_type, self._devices(ours, whole))

    @property
    def _sharding(self) -> Sharding:
        return self.mesh, (self.mesh.ndim - 1,)

    def _devices(self, sharded: Iterable[torch.Tensor], whole: Iterable[torch.Tensor]) -> dict[Sharding, torch.device]:
        """Return the device of gradients of either kind, also where only other ranks have some."""
        return {
            kind: next((tensor.device for tensor in tensors), self.device)
            for kind, tensors in ((self._sharding, sharded), ((None, ()), whole))
        }

    @override
    def total_norm(self, root: nn.Module, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        parameters = _sharded_parameters(root)
        known = {id(gradient) for gradient in gradients_of(parameters)}
        if known and not gradients and not self.settings.use_orig_params:
            raise RuntimeError(
                "There are no gradients to clip: with use_orig_params=False, a part of a unit has no parameters(). "
                "Set use_orig_params=True (the default), or clip all of self.parameters()."
            )
        parts: dict[Sharding, list[torch.Tensor]] = {self._sharding: [], (None, ()): []}
        for one in gradients:
            if isinstance(one, FlatShard):  # as users' hooks see gradients
                parts[self._sharding].append(one.held)
            else:
                parts[self._sharding if id(one) in known else (None, ())].append(one)
        return norm_of_parts(parts, norm_type, self._devices(parameters, parts[None, ()]))

    @override
    def grad_scaler(self) -> torch.amp.GradScaler:
        kind = CPUOffloadShardedGradScaler if self.settings.cpu_offload else ShardedGradScaler
        return kind(device=self.device.type)

    @override
    def hides_shards(self, root: nn.Module) -> bool:
        sharded = [unit._handle.uses_sharded_strategy for unit in units_of(root)]
        return len(sharded) > 1 or not all(sharded)  # what is assigned where nothing is sharded would come too late

    @override
    def shard_access(self, root: nn.Module) -> ShardAccess:
        access = FlatAccess(root, self._watch, self.optimizers)
        run_hooks_of_users(root, access)
        return access

    @override
    def state_dict_module(self, root: nn.Module) -> nn.Module:
        check_not_summoned(root)
        # Only the FSDP root can switch all its units to another state-dict type; around several roots there is ours.
        return root.module if isinstance(root, RootWrapper) else root


def _sharded_parameters(root: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose gradients are this rank's part alone, as optimizers may hold them."""
    sharded: set[nn.Parameter] = set()
    for unit in units_of(root):
        handle: Any = unit._handle
        if handle.uses_sharded_strategy:
            sharded.update(cast("Iterable[nn.Parameter]", handle.flat_param._params or [handle.flat_param]))
    return sharded


def _ignored(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return FSDP1's argument for the modules or the parameters to ignore: it does not take both."""
    modules = [module for module in model.modules() if module in plan.ignored and module is not model]
    if not plan.scalars:
        return {"ignored_modules": modules}
    parameters = {parameter for module in modules for parameter in module.parameters(recurse=False)}
    return {"ignored_states": [one for one in model.parameters() if one in parameters or one in plan.scalars]}


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each replacement where ``model`` registers the module that it stands for, under every name."""
    for parent in list(model.modules()):
        if parent not in replacements.values():
            for name, child in list(parent._modules.items()):
                if child is not None and child in replacements:
                    parent._modules[name] = replacements[child]


@contextmanager
def _registered_once(model: nn.Module, units: set[nn.Module]) -> Iterator[dict[nn.Module, nn.Module]]:
    """Reduce modules with units to one name in this context: torch would wrap the units once for each name.

    Yields:
        Takes the wrapper of each module, which then stands under all of its names.

    Raises:
        ValueError: If such a module has parameters outside of units as well, which torch must know by all names.
    """
    wrappers: dict[nn.Module, nn.Module] = {}
    aliases: list[tuple[nn.Module, str, nn.Module]] = []
    names: dict[nn.Module, str] = {}

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            if child not in names:
                names[child] = prefix + name
                visit(child, f"{prefix}{name}.")
            elif not units.isdisjoint(child.modules()):
                if _has_parameters_outside(child, units):
                    raise ValueError(
                        f"{prefix}{name} is another name of {names[child]}, which contains both FSDP1 units and "
                        "other parameters: torch would shard the units once per name. Make the second name a "
                        "property, or use fsdp_version=2."
                    )
                aliases.append((parent, name, child))

    visit(model, "")
    for parent, name, _ in aliases:
        parent._modules[name] = None  # not removed: the order stays
    try:
        yield wrappers
    finally:
        for parent, name, child in aliases:
            parent._modules[name] = wrappers.get(child, child)


def _has_parameters_outside(module: nn.Module, units: set[nn.Module]) -> bool:
    if module in units:
        return False
    if next(module.parameters(recurse=False), None) is not None:
        return True
    return any(_has_parameters_outside(child, units) for child in module.children())


def _is_reducing(engine: FSDP1Engine | None) -> bool:
    return engine is None or not engine._accumulating


def _is_in_step(engine: FSDP1Engine | None) -> bool:
    return engine is not None and engine.in_step


def _check_state_of(name: str, owner: nn.Parameter | None) -> None:
    if owner is None:
        raise RuntimeError(
            f"optimizer.state[{name}] with use_orig_params=False: optimizers have states of flat parameters, each of "
            "several of the model's. Set use_orig_params=True (the default)."
        )
    if not is_step():
        raise RuntimeError(
            f"optimizer.state[{name}] in the forward of a module, or in a hook on a parameter: with FSDP1 operations "
            "there would see this process's part of it. Use it in training_step() or in a hook of the LightningModule; "
            "or use fsdp_version=2."
        )


def _with_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a leaf: hooks that torch puts on what goes into frozen units stop ``torch.autograd.grad``."""
    return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor


# ------------------------------------------------------------------------------------------------
# This rank's ranges of FSDP1's parameters and gradients, for users' code: see `GlobalTensors`.


_WRAPPER = "_fsdp_wrapped_module."


class FlatAccess(NoAccess):
    """The `ShardAccess` of FSDP1.

    Args:
        root: Sharded and idle.
        watch: Knows where gradients are complete, and what a step changes.
        optimizers: Of the running fit; their states of sharded parameters are sharded alike.
    """

    shows_shards = True

    def __init__(self, root: nn.Module, watch: UsedParameterTracker, optimizers: Sequence[Optimizer] = ()) -> None:
        self._watch, self._optimizers = watch, optimizers
        self._states: dict[int, tuple[TensorWeakRef, FlatLayout]] | None = None
        self._places: dict[int, tuple[int, int]] = {}
        self._layouts: dict[int, FlatLayout] = {}
        self._flat: dict[int, Any] = {}
        self._unsharded: list[Any] = []
        """Handles of one process, or of ``NO_SHARD``."""
        for number, unit in enumerate(units_of(root)):
            handle: Any = unit._handle
            flat_param = handle.flat_param
            if not handle.uses_sharded_strategy:
                self._flat.update((id(parameter), flat_param) for parameter in flat_param._params or ())
                self._unsharded.append(handle)
                continue
            if flat_param._params is None:
                self._layouts[id(flat_param)], self._flat[id(flat_param)] = _whole_layout(unit), flat_param
                continue
            for index, (parameter, layout) in enumerate(zip(flat_param._params, layouts_of(unit), strict=True)):
                if layout is not None:
                    self._places[id(parameter)] = number, index
                    self._layouts[id(parameter)], self._flat[id(parameter)] = layout, flat_param

    def begin(self) -> None:
        """Look for the optimizers' states again when they are needed; find them by what steps see, too."""
        self._states = None
        OptimizerStates.follow(self._optimizers, self._trained)

    def _trained(self, key: Any) -> Any:
        if isinstance(key, str | int) or id(key) in self._flat:
            return key
        for flat_param in dict.fromkeys(self._flat.values()):
            owners = flat_param._params or itertools.repeat(None)
            for (name, module, _), owner in zip(flat_param._param_infos, owners, strict=False):
                if getattr(module, name) is key:
                    _check_state_of(name, owner)
                    self.gave_states = True
                    return owner
        return key

    def end(self) -> None:
        """Make the optimizers step on plain tensors, also where users' code has set their states."""
        for optimizer in self._optimizers:
            cut_states(optimizer, self._layouts)

    def _state(self, tensor: Tensor) -> FlatShard | None:
        if tensor.dim() != 1 or isinstance(tensor, nn.Parameter):
            return None
        if self._states is None:
            self._states = {
                id(value): (TensorWeakRef(value), self._layouts[id(parameter)])
                for optimizer in self._optimizers
                for parameter, state in states_of(optimizer)
                for value in (state.values() if id(parameter) in self._layouts else ())
                if isinstance(value, Tensor) and value.dim() == 1
            }
        weak, layout = self._states.get(id(tensor), (None, None))
        if weak is None or layout is None or weak() is not tensor or tensor.numel() != layout.count:
            return None
        return FlatShard(tensor.detach(), layout)

    def shard_of(self, tensor: Tensor) -> FlatShard | None:
        """Return this rank's range of a parameter that is not gathered, or of a state; None for any other tensor."""
        layout = self._layouts.get(id(tensor))
        if layout is None:
            return self._state(tensor)
        held, shards = tensor.detach(), self._flat[id(tensor)]._local_shard
        if held.dim() != 1 or held.numel() != layout.count:
            return None
        if layout.count and tensor.untyped_storage().data_ptr() != shards.untyped_storage().data_ptr():
            return None
        return FlatShard(held, layout)

    def writable(self, tensor: Tensor, *, assigns: bool) -> Tensor | None:
        """Return an alias of an unsharded parameter, which may be written to; None for any other tensor."""
        storage = tensor.untyped_storage().data_ptr()
        is_unsharded = id(tensor) in self._flat and id(tensor) not in self._layouts
        if assigns and (is_unsharded or any(_is_shown(tensor, handle) for handle in self._unsharded)):
            return tensor  # torch would look for what is assigned when the next step begins, and not in views
        return tensor.data if any(one.takes_writes(storage) for one in self._watch.changes.values()) else None

    @override
    def sync_to_optimizer(self, tensor: Tensor) -> None:
        """Copy what was written to the view that a module has in a step to its parameter."""
        if id(tensor) in self._places and (changes := self._watch.changes.get(self._places[id(tensor)][0])) is not None:
            changes.take()

    @override
    def lends(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in a flat parameter that is unsharded."""
        return has_storage(tensor) and any(one.has(storage_of(tensor)) for one in self._watch.changes.values())

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

    @override
    @torch.no_grad()
    def note_write_to_shard(self, tensor: Tensor) -> None:
        """Copy what was written to a parameter through the optimizer to the view that its module has in a step."""
        shard = self.shard_of(tensor)
        if shard is None or id(tensor) not in self._places:
            return
        info = self._flat[id(tensor)]._param_infos[self._places[id(tensor)][1]]
        shown = getattr(info.module, info.param_name)
        if shown is not tensor:
            shown.data.copy_(gathered(shard))

    def is_unreduced(self, tensor: Tensor) -> bool:
        """Return whether a parameter has a gradient that the ranks have not reduced yet."""
        flat_param = self._flat.get(id(tensor))
        return flat_param is not None and is_unreduced(flat_param, tensor)

    def owns_gradient(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a parameter of which this rank has a range now."""
        return id(tensor) in self._layouts and self.shard_of(tensor) is not None

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient.

        Raises:
            RuntimeError: In a ``backward()`` of the user's, and after one in a hook: the ranks agree after the step's
                own backward on who has a gradient.
        """
        if self._watch.in_backward and is_step():
            raise RuntimeError(
                "p.grad was used in backward(): with FSDP1, gradients are complete after it. Use p.grad in "
                "on_after_backward(), or in on_before_optimizer_step() where gradients accumulate, or fsdp_version=2."
            )
        if self._watch.used_in_hooks:
            raise RuntimeError(
                "backward() of a loss ran in a hook, and p.grad was used in one before the next backward of a step: "
                "with FSDP1 the processes do not agree on which parameters have a gradient until then. Use p.grad in "
                "on_before_optimizer_step(), or fsdp_version=2, or manual optimization with self.manual_backward(loss)."
            )
        gradient = parameter.grad
        return None if gradient is None else FlatShard(gradient, self._layouts[id(parameter)])

    def set_gradient(self, parameter: Tensor, gradient: FlatShard | None) -> None:
        """Replace the gradient."""
        parameter.grad = None if gradient is None else gradient.held.detach()


def _is_shown(tensor: Tensor, handle: Any) -> bool:
    """Return whether a tensor is the view of a flat parameter that a module has in a step."""
    flat_param = handle.flat_param
    if tensor.untyped_storage().data_ptr() != flat_param.untyped_storage().data_ptr():
        return False
    shown = (module._parameters.get(name, vars(module).get(name)) for name, module, _ in flat_param._param_infos)
    return any(one is tensor for one in shown)


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
    """Make ``apply()``, ``state_dict()`` and ``load_state_dict()`` of users' code work on shards.

    torch's own gather each unit for them, one after the other, and write full parameters into modules.

    Args:
        root: Sharded.
        access: Where the shards are.
    """
    if any(unit._handle.flat_param._params is not None for unit in units_of(root)):  # else modules have none
        follow_state_dicts((module for module in owners_of(root)), access)
    refuse_copies(units_of(root))
    for unit in units_of(root):
        replace_for_good("sharded modules", unit, apply=partial(_apply, unit))
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
    """Return this rank's range of a whole flat parameter, which users see with ``use_orig_params=False``."""
    flat_param, group = unit._handle.flat_param, unit._handle.process_group
    size = int(flat_param._local_shard.numel())
    shape = torch.Size((dist.get_world_size(group) * size,))
    start = dist.get_rank(group) * size
    return FlatLayout(shape, (1,), (0,), start, size, 0, 1, group, unit.compute_device, holds_several=True)


# ------------------------------------------------------------------------------------------------
# FSDP1's backwards: their preparation, and the parameters that received a gradient.


def expect_backward(root: nn.Module, expected: Iterable[Any]) -> None:
    """Prepare the units for a backward of an earlier forward, whatever ran in between.

    Parameters may have been frozen or thawed since, which torch 2.13 takes for a mistake (``_finalize_params``).

    Args:
        root: Sharded.
        expected: What `waiting_units` returned after the forward.

    Raises:
        RuntimeError: If another backward has run since, and has ended what the forward prepared.
    """
    if any(len(hook_state(unit)) != 2 for unit in expected):
        raise RuntimeError(
            "User code ran another backward between training_step() and its backward, for example in "
            "on_before_backward(): with FSDP1 it discards the preparation of the step's forward. Run it in another "
            "hook, or use fsdp_version=2."
        )
    for unit in units_of(root):
        _follow_gradients(unit._handle)
        unit._handle._reset_flat_param_grad_info_if_needed()
        flat_param: Any = unit._handle.flat_param
        if hook_state(unit) and len(hook_state(unit)) != 1 + flat_param.requires_grad:
            hook_state(unit)[-1].remove()
            del flat_param._post_backward_hook_state


class RetainedGraphs:
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
    """Update a flat parameter's gradient from its original parameters': cleared since, or set by the user.

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


class UsedParameterTracker:
    """Sees which original parameters a backward reached on this rank, and lets the ranks agree.

    A flat parameter's gradient has zeros for those that nobody used; one process has no gradient there, so that neither
    momentum nor decay touch them. The others have a gradient on every rank, an empty one where the rank has no element:
    optimizers have the same states everywhere.
    """

    def __init__(self, root: nn.Module, path: CollectiveOrder, is_in_step: Callable[[], bool]) -> None:
        self._units = units_of(root)
        self._used: set[tuple[int, int]] = set()
        self.without: set[tuple[int, int]] = set()
        """Units and parameters, by their numbers, that had no gradient before the last backward."""
        self.used_in_hooks: set[tuple[int, int]] = set()
        """Units and parameters that a backward in a hook has reached, on which the ranks do not agree yet."""
        self._arrived: set[tuple[int, int]] = set()
        """Units and parameters whose gradients the backward that runs has computed, and whose hooks have not run."""
        self._prepared: set[Any] = set()
        """Units that a forward has prepared for the backward that runs, which undoes it when it ends."""
        self.in_backward = False
        """Whether a backward runs, or a ``backward()`` of the user's."""
        self.probing = False
        """Whether this is the first training step of a fit."""
        self.changes: dict[int, FlatChanges] = {
            number: FlatChanges(unit._handle, lambda: self.probing)
            for number, unit in enumerate(self._units)
            if unit._handle.uses_sharded_strategy
        }
        for number, unit in enumerate(self._units):
            replace_for_good(
                "FSDP1 handles",
                unit._handle,
                pre_unshard=partial(_check_parameters, unit._handle),
                prepare_gradient_for_backward=partial(self._prepare_gradient, unit, is_in_step),
                prepare_gradient_for_optim=partial(_restore_gradient, unit._handle),
                _use_sharded_grad_views=partial(_keep_empty_gradients, unit._handle),
                _use_unsharded_views=self._around(number, unit._handle),
                _all_gather_flat_param=partial(_gather_together, unit._handle, path, number),
            )
            if unit._handle.flat_param._params is not None:
                hook_leaf(unit._handle.flat_param, HOOKED, partial(self._run_hooks, number))
            if number not in self.changes:
                replace_for_good("FSDP1 handles", unit._handle, reshard=partial(_reshard_whole, unit._handle))

    def _around(self, number: int, handle: Any) -> Callable[..., None]:
        use_views = type(handle)._use_unsharded_views

        def run(as_params: bool) -> None:
            use_views(handle, as_params)
            flat_param = handle.flat_param
            for name, module, *_ in (*flat_param._param_infos, *flat_param._shared_param_infos):
                if flat_param._params is not None and (view := vars(module).pop(name, None)) is not None:
                    module._parameters[name] = view  # parameters() has it in a backward; functional_call() replaces it
            for (name, module, _), owner in zip(flat_param._param_infos, flat_param._params or (), strict=False):
                view = getattr(module, name)
                if view is not owner:
                    view.__dict__ = owner.__dict__  # what users' code has set on the parameter, and sets on this one
            if not as_params and number in self.changes:
                self.changes[number].after_unshard()
            if as_params or not torch.is_grad_enabled() or handle._training_state != HandleTrainingState.FORWARD:
                return
            owners = flat_param._params or [flat_param] * len(flat_param._param_infos)
            for index, ((name, module, _), owner) in enumerate(zip(flat_param._param_infos, owners, strict=True)):
                view = getattr(module, name)
                if view.requires_grad:
                    arrive = partial(self._arrive, (number, index), owner if owner.requires_grad else None)
                    view.register_hook(arrive)
                    if owner is not flat_param:  # what a forward hooks is the parameter
                        if owner._backward_hooks is None:
                            owner._backward_hooks = OrderedDict()
                        view._backward_hooks = owner._backward_hooks

        return run

    def _arrive(self, place: tuple[int, int], owner: nn.Parameter | None, gradient: Tensor | None) -> Tensor | None:
        """Note a gradient; what was frozen at the forward, or is now, gets none, though the rest of its unit does.

        It is None where an operation has none for the parameter: for weights in 4 bits, say.
        """
        if gradient is None:
            return None
        if owner is None or not owner.requires_grad:
            return torch.zeros_like(gradient)
        self._used.add(place)
        self._arrived.add(place)
        if is_hook():
            self.used_in_hooks.add(place)
        return None

    def _run_hooks(self, number: int, gradient: Tensor) -> Tensor | None:
        """Run users' hooks on the gradients of a unit's parameters, each the sum over the forwards of the unit."""
        handle = self._units[number]._handle
        hooked = [
            (index, owner)
            for index, owner in enumerate(handle.flat_param._params)
            if (number, index) in self._arrived and hooks_of(owner)
        ]
        self._arrived = {place for place in self._arrived if place[0] != number}
        if not hooked:
            return None
        gradient = gradient.clone()
        pieces = list(handle._get_unflat_views(gradient))
        for index, owner in hooked:
            if (changed := run_hooks(owner, pieces[index])) is not None:
                pieces[index].copy_(changed)
        return gradient

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
        self._arrived.clear()
        self.without = {place for place, parameter in self._parameters() if parameter.grad is None}
        self._prepared = {unit for unit in self._units if hook_state(unit)}

    def sync_used_parameters(self, all_reduce_max_async: AllReduceMaxAsync) -> None:
        """Synchronize the set across ranks, after a backward that reduced; every rank calls it.

        Args:
            all_reduce_max_async: Reduces a small integer tensor to its maximum over the ranks.

        Raises:
            RuntimeError: On every rank, if a part of a flat parameter was used by none, and the rest was.
        """
        sizes = [len(unit._handle.flat_param._param_infos) for unit in self._units]
        places = [(number, index) for number, size in enumerate(sizes) for index in range(size)]
        used, self._used, self.used_in_hooks = self._used, set(), set()
        of_all = all_reduce_max_async([int(place in used) for place in places])
        if len(used) < len(places):  # else there is nothing to learn from the others
            used = {place for place, anywhere in zip(places, of_all(), strict=True) if anywhere}
        for place, parameter in self._parameters():
            if place not in used and place in self.without:
                parameter.grad = None
            elif place in used and (not parameter.requires_grad or not parameter.numel()):  # torch has cleared it
                assign_gradient(self._units[place[0]]._handle, place[1])
        for number, unit in enumerate(self._units):
            self._check_flat(number, unit, sizes[number], used)

    def add_gradient(self, place: tuple[int, int], gradient: torch.Tensor) -> None:
        """Add a full gradient to those that a parameter's unit reduces, by this backward or the next that reduces.

        Args:
            place: The numbers of the unit and of the parameter in it.
            gradient: Of this rank, of the parameter's shape.

        Raises:
            RuntimeError: If users have hooked the parameter.
        """
        number, index = place
        if hooks_of(self._owner(*place)):
            name, module, _ = self._units[number]._handle.flat_param._param_infos[index]
            raise RuntimeError(hooked_in_loss(module, name))
        add_unreduced(self._units[number]._handle, index, gradient)
        self._used.add(place)

    def forget_gradients(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Gradients of these parameters, or of all, are cleared, also those of an accumulation window under way."""
        if parameters is None:
            self._used.clear()
            self.used_in_hooks.clear()
            return
        cleared = set(map(id, parameters))
        self._used = {place for place in self._used if id(self._owner(*place)) not in cleared}
        self.used_in_hooks &= self._used

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
            f"{names} got no gradient in this step, but share a flat parameter with others that did: the optimizer's "
            "momentum and decay would change them, unlike on one process. Set use_orig_params=True."
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
    """Refuse a call with other parameters, before torch takes them over as they are, or with hooks that never run."""
    flat_param = handle.flat_param
    is_called = handle._training_state == HandleTrainingState.FORWARD and not handle._skipped_use_sharded_views
    for (name, module, _), parameter in zip(flat_param._param_infos, flat_param._params or (), strict=False):
        if parameter._post_accumulate_grad_hooks:
            raise RuntimeError(never_runs(f"{type(module).__name__}.{name}"))
        if is_called and module._parameters.get(name, parameter) is not parameter:
            raise other_parameters(module)
    return type(handle).pre_unshard(handle)


def _reshard_whole(handle: Any, free_unsharded_flat_param: bool) -> None:
    """Reshard a unit that one rank has whole, whose memory on the device waits for what computes with it.

    With CPU offload torch (2.11) copies it to the device on a stream of its own; freed, it is taken for the next copy.
    """
    flat_param = handle.flat_param
    if flat_param.device != flat_param._local_shard.device:
        flat_param.data.record_stream(torch.accelerator.current_stream())
    type(handle).reshard(handle, free_unsharded_flat_param)


def _gather_together(handle: Any, path: CollectiveOrder, number: int, *args: Any, **kwargs: Any) -> Any:
    path.gather(number)
    return type(handle)._all_gather_flat_param(handle, *args, **kwargs)


def _keep_empty_gradients(handle: Any) -> None:
    """Show parameters this rank's part of their gradients, an empty one where it has no element of the parameter."""
    flat_param = handle.flat_param
    elsewhere = [
        one
        for one, info in zip(flat_param._params, flat_param._shard_param_infos, strict=True)
        if not info.in_shard and one.grad is not None
    ]
    type(handle)._use_sharded_grad_views(handle)
    for parameter in elsewhere:
        parameter.grad = parameter.detach().new_empty(0)


def _restore_gradient(handle: Any) -> None:
    """Restore the gradient that was moved aside where no other has come: only its input's was asked for, say.

    torch 2.13 drops it then.
    """
    flat_param = handle.flat_param
    before = getattr(flat_param, "_saved_grad_shard", None)
    type(handle).prepare_gradient_for_optim(handle)
    if before is not None and flat_param.grad is None:
        flat_param.grad = before
