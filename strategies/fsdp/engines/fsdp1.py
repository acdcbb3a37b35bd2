"""FSDP1: `FullyShardedDataParallel`, a wrapper module around each unit."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

from ....checkpoint.names import clean_name
from ...common.extra_states import is_extra_state
from ...common.global_tensors import ShardAccess
from ...common.gradients import clip_to_norm, gradients_of, norm_of_parts
from ...common.one_start import send_from_rank_zero
from ...upstream.torch_core import tree_map_only
from ...upstream.torch_fake import is_planned
from ...upstream.torch_fsdp1 import (
    _lazy_init,
    _post_forward,
    _post_forward_reshard,
    _pre_forward,
    _pre_forward_unshard,
    _register_pre_backward_hooks,
    _root_pre_forward,
)
from ..config.settings import FSDP1Settings
from ..steps.outside_calls import Close
from ..steps.same_path import SamePath
from ..units.model_state_dicts import load_model_state_dict, model_state_dict
from ..units.named_tensors import NamedTensor, named_tensors, swap_for_empty
from ..units.plan import Plan
from ..units.sharded_root import ShardedForm, ShardedRoot
from .base import Engine
from .fsdp1_access import FlatAccess, run_hooks_of_users
from .fsdp1_backward import BackwardWatch, KeptGraphs, expect_backward
from .fsdp1_shards import explained, guard_shards
from .fsdp1_units import (
    check_not_summoned,
    forget_frozen_hooks,
    forget_order,
    forget_views,
    make_idle,
    names_of,
    owners_of,
    reshard,
    roots_of,
    units_by_module,
    units_of,
    waiting_units,
)
from .fsdp1_unreduced import FrozenGradients, add_waiting_gradients, drop_unreduced, put_aside, reduce_left_over
from .optimizer_checks import check_flat_parameters
from .waiting_scalers import WaitingShardedGradScaler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...common.gradients import Sharding

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
        self._graphs = KeptGraphs()

    @override
    def _shard(self, model: nn.Module, plan: Plan) -> nn.Module:
        if plan.to_be_filled:
            for module in plan.ignored:
                self._give_memory(module)
        with warnings.catch_warnings():
            # One process, and NO_SHARD on request: the user knows, and torch says it for every unit.
            warnings.filterwarnings("ignore", ".*NO_SHARD.*")
            if not plan.parts:
                return self._wrap(model, plan)
            _replace(model, {part: self._wrap(part, plan) for part in plan.parts})
        return ShardedRoot(model)

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
                param_init_fn=self._param_init_fn(model, to_be_filled=plan.to_be_filled),
                device_id=self.device,
                forward_prefetch=settings.forward_prefetch,
                limit_all_gathers=settings.limit_all_gathers,
                use_orig_params=settings.use_orig_params,
            )
            others.update({unit._fsdp_wrapped_module: unit for unit in units_of(root)})
        return root

    def _param_init_fn(self, model: nn.Module, *, to_be_filled: bool) -> Callable[[nn.Module], None] | None:
        """Return what materializes modules on the meta device, with rank 0's values on all ranks."""
        given = self.settings.param_init_fn
        if to_be_filled:
            return given or self._give_memory
        tensors = itertools.chain(model.parameters(), model.buffers())
        if not self.settings.sync_module_states or not any(tensor.is_meta for tensor in tensors):
            return given

        def materialize(module: nn.Module) -> None:
            if given is not None:
                given(module)
            elif any(tensor.is_meta for tensor in _own_tensors(module)):
                with torch.no_grad():  # as torch does it
                    module.to_empty(device=self.device, recurse=False)
                    module.reset_parameters()  # type: ignore[operator]
            send_from_rank_zero(_own_tensors(module), self.device)

        return materialize

    def _give_memory(self, module: nn.Module) -> None:
        """Give the meta tensors of ``module`` itself memory, with ties kept, unlike ``to_empty``."""
        for tensor in _own_tensors(module):
            if tensor.is_meta:
                swap_for_empty(tensor, self.device)

    @override
    @contextmanager
    def named_tensors(self, form: ShardedForm) -> Iterator[tuple[list[NamedTensor], Callable[[], list[torch.Tensor]]]]:
        module = self.state_dict_module(form.root)
        state = model_state_dict(module)
        extra = {name: state.pop(name) for name in list(state) if is_extra_state(name)}
        names: dict[str, list[str]] = {name: [name] for name in state if name not in form.ties}
        for alias, name in form.ties.items():
            names[name].append(alias)
        tensors = [NamedTensor(tuple(known), state[name], persistent=True) for name, known in names.items()]
        tensors += [named for named in named_tensors(module) if not named.persistent]
        yield tensors, lambda: [named.local() for named in tensors]
        state.update({alias: state[name] for alias, name in form.ties.items()})
        load_model_state_dict(module, {**state, **extra})

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
                f"sharding_strategy={strategy.name} and a mesh of shape {tuple(self.mesh.shape)} do not fit. Hybrid "
                "strategies need device_mesh=(replicate, shard), and such a mesh needs HYBRID_SHARD(_ZERO2)."
            )
        if hybrid_mesh and self.mesh.size(1) == 1 < self.mesh.size(0):  # torch 2.13 would not reduce at all
            raise ValueError(
                f"device_mesh={tuple(self.mesh.shape)} shards over one process, and FSDP1 would not reduce gradients "
                "over its copies. Leave device_mesh out and use sharding_strategy='NO_SHARD', or fsdp_version=2."
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
    def get_ready(self, root: nn.Module) -> None:
        for unit in roots_of(root):  # else the first unit that is called would take itself for the root
            _lazy_init(unit, unit)
        self._units = units_by_module(root)
        units = units_of(root)
        self.path = SamePath([clean_name(unit_name) for unit_name in names_of(root, units)], self.timeout)
        engine = weakref.ref(self)  # torch's hooks on gradients keep what they know, past any garbage collector
        self._watch = BackwardWatch(root, self.path, lambda: _is_in_step(engine()))
        self._frozen = FrozenGradients(root)
        self._has_begun = False
        guard_shards(root)
        for number, unit in enumerate(units):
            add_waiting_gradients(unit, lambda: _is_reducing(engine()), partial(self.path.reduce, number))
        self.make_idle(root)
        self._watch.forget_gradients()
        drop_unreduced(root)

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
    def open_unit(self, root: nn.Module, module: nn.Module, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Close]:
        outermost, unit = self._units[module]
        handle: Any = unit._handle
        hooked = unit is module  # its own forward does the rest
        forget_frozen_hooks(root)
        self._frozen.put_aside()
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
            self._frozen.give_back()
            return output

        return args, close

    @override
    def explained(self, error: BaseException) -> RuntimeError | None:
        return explained(error, {module: unit for module, (_, unit) in self._units.items()})

    @override
    def make_idle(self, root: nn.Module) -> None:
        make_idle(root)
        self.path.forget()
        self._frozen.give_back()

    @override
    def drop_unreduced(self, root: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        parameters = None if parameters is None else list(parameters)
        self._watch.forget_gradients(parameters)
        drop_unreduced(root, parameters)

    @override
    def end_training(self, root: nn.Module) -> None:
        super().end_training(root)
        self._graphs.forget(root)
        forget_views(root)

    @override
    def begin_step(self, root: nn.Module) -> None:
        self._watch.probing, self._has_begun = not self._has_begun and not is_planned(), True
        self._waiting = []
        self._graphs.forget(root)
        forget_order(root)

    @override
    def end_step(self, root: nn.Module) -> None:
        self._waiting = waiting_units(root)

    @override
    def begin_backward(self, root: nn.Module) -> None:
        expected, self._waiting = self._waiting, []
        self._graphs.begin_backward(root)
        expect_backward(root, expected)
        self._watch.begin()
        self._frozen.put_aside()

    @override
    def end_backward(self, root: nn.Module, *, reduced: bool) -> None:
        put_aside(root, self._watch.without, reduced=reduced)
        self._frozen.give_back()
        if reduced:
            reduce_left_over(root)
            self._watch.settle(self.begin_max)

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
                for fsdp_root in roots_of(root):
                    stack.enter_context(fsdp_root.no_sync())
                yield
        finally:
            self._accumulating = False
            put_aside(root, self._watch.without)  # what backwards of the user's own left

    @override
    def clip_grad_norm(
        self, root: nn.Module, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        parameters = list(parameters)
        sharded = _sharded_parameters(root)
        ours = [parameter for parameter in parameters if parameter in sharded]
        whole = [parameter for parameter in parameters if parameter not in sharded]
        parts: dict[Sharding, list[torch.Tensor]] = {}
        if ours:  # also where this rank has no gradient of them: the others wait for it
            parts[self._sharding] = gradients_of(ours)
        parts[None, ()] = gradients_of(whole)
        total = norm_of_parts(parts, norm_type, self._devices(ours, whole))
        return clip_to_norm(gradients_of(parameters), total, max_norm)

    @property
    def _sharding(self) -> Sharding:
        return self.mesh, (self.mesh.ndim - 1,)

    def _devices(self, sharded: Iterable[torch.Tensor], whole: Iterable[torch.Tensor]) -> dict[Sharding, torch.device]:
        """Return where gradients of either kind lie, on this rank or on others."""
        return {
            kind: next((tensor.device for tensor in tensors), self.device)
            for kind, tensors in ((self._sharding, sharded), ((None, ()), whole))
        }

    @override
    def norm_of(self, root: nn.Module, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        parameters = _sharded_parameters(root)
        sharded = {id(gradient) for gradient in gradients_of(parameters)}
        if sharded and not gradients and not self.settings.use_orig_params:
            raise RuntimeError(
                "No gradients were given to be clipped: with use_orig_params=False, the parameters() of a part of a "
                "unit are none. Set use_orig_params=True (the default), or clip all of self.parameters()."
            )
        parts: dict[Sharding, list[torch.Tensor]] = {
            self._sharding: [one for one in gradients if id(one) in sharded],
            (None, ()): [one for one in gradients if id(one) not in sharded],
        }
        return norm_of_parts(parts, norm_type, self._devices(parameters, parts[None, ()]))

    @override
    def grad_scaler(self) -> torch.amp.GradScaler:
        kind = WaitingShardedGradScaler if self.settings.cpu_offload else ShardedGradScaler
        return kind(device=self.device.type)

    @override
    def hides_shards(self, root: nn.Module) -> bool:
        return sum(unit._handle.uses_sharded_strategy for unit in units_of(root)) > 1

    @override
    def shard_access(self, root: nn.Module) -> ShardAccess:
        access = FlatAccess(root, self._watch)
        run_hooks_of_users(root, access)
        return access

    @override
    def state_dict_module(self, root: nn.Module) -> nn.Module:
        check_not_summoned(root)
        # Only the FSDP root can switch all its units to another state-dict type; around several roots there is ours.
        return root.module if isinstance(root, ShardedRoot) else root


def _sharded_parameters(root: nn.Module) -> set[nn.Parameter]:
    """Return what optimizers may hold whose gradients are this rank's part alone."""
    sharded: set[nn.Parameter] = set()
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        handle = unit._handle
        if handle is not None and handle.uses_sharded_strategy:
            sharded.update(cast("Iterable[nn.Parameter]", handle.flat_param._params or [handle.flat_param]))
    return sharded


def _ignored(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return what FSDP1 is to leave alone: it takes modules or parameters, and not both."""
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
    """Let modules with units have one name in this context: torch would wrap the units once for each name.

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
                        f"{prefix}{name} is another name of {names[child]}, which has units of FSDP1 in it and other "
                        "parameters: torch would shard the units once for each name. Make the second name a property, "
                        "or use fsdp_version=2."
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


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_reducing(engine: FSDP1Engine | None) -> bool:
    return engine is None or not engine._accumulating


def _is_in_step(engine: FSDP1Engine | None) -> bool:
    return engine is not None and engine.in_step


def _with_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a leaf: hooks that torch puts on what goes into frozen units stop ``torch.autograd.grad``."""
    return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor
