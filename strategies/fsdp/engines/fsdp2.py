"""FSDP2: `fully_shard`, which turns parameters into DTensors and hooks the units in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ....checkpoint.names import clean_name
from ...common.global_tensors import ShardAccess
from ...common.gradients import clip_to_norm, global_norm, gradients_of
from ...common.module_state_dicts import follow_state_dicts, refuse_copies
from ...upstream.lightning import rank_zero_info
from ...upstream.torch_fake import is_planned
from ...upstream.torch_fsdp2 import give_frozen_group_dtypes, reset_iter_state
from ..config.settings import FSDP2Settings
from ..steps.outside_calls import Close
from ..steps.same_path import SamePath
from ..units.groups import late_heads
from ..units.named_tensors import NamedTensor, open_tensors
from ..units.plan import Plan
from ..units.sharded_root import ShardedForm, ShardedRoot, inside_root
from .base import Engine
from .fsdp2_units import (
    BackwardWatch,
    UnitAccess,
    Units,
    can_be_unit,
    roots_of,
    units_by_module,
)
from .waiting_scalers import WaitingGradScaler


class FSDP2Engine(Engine[FSDP2Settings]):
    """Shards through ``torch.distributed.fsdp.fully_shard``."""

    version = 2
    model_key = "state_dict"
    renews_parameters = True

    @override
    def _possible_units(self, model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        impossible = [unit for unit in units if not can_be_unit(unit)]
        if impossible:
            names = {module: clean_name(name) for name, module in model.named_modules()}
            rank_zero_info(
                "FSDP2 gathers these with what is around them instead of on their own, since their classes cannot take "
                f"FSDP2's as another base: {', '.join(f'{names[one]} ({type(one).__name__})' for one in impossible)}."
            )
        return [unit for unit in units if unit not in impossible]

    @override
    def _shard(self, model: nn.Module, plan: Plan) -> nn.Module:
        root = model if isinstance(model, FSDPModule) else self._root_of(model)
        common: dict[str, Any] = {"mesh": self.mesh, "offload_policy": self._offload_policy()}
        ignored_params = {parameter for module in plan.ignored for parameter in module.parameters(recurse=False)}
        ignored_params |= plan.scalars
        if ignored_params:
            common["ignored_params"] = ignored_params
        # What stays gathered through a window must not be freed by its forward passes either.
        reshard = self.settings.reshard_after_forward and self.settings.reshard_during_accumulation
        policy = self._mp_policy(is_root=False)
        for module in [*plan.parts, *([] if plan.parts else [root])]:
            if not can_be_unit(module):
                raise ValueError(
                    f"FSDP2 cannot shard this {type(module).__name__}: its class cannot take FSDP2's as another base. "
                    "Put it into a plain nn.Module as an attribute, and train that, or use FSDP1."
                )
        for unit in [*plan.units, *plan.parts]:
            if not isinstance(unit, FSDPModule):
                fully_shard(unit, reshard_after_forward=reshard, mp_policy=policy, **common)
        heads = [] if plan.parts else self._heads(model, plan)
        for head in heads:  # gathered once for each forward and backward, and treated otherwise as in the root's unit
            fully_shard(head, reshard_after_forward=False, mp_policy=self._mp_policy(is_root=True), **common)
        if not plan.parts and not isinstance(root, FSDPModule):
            # No reshard_after_forward: torch keeps the root gathered, whose parameters backward needs first.
            fully_shard(root, mp_policy=self._mp_policy(is_root=True), **common)
        if self.settings.forward_prefetch:
            _prefetch_in_order([unit for unit in [*plan.units, *heads] if isinstance(unit, FSDPModule)])
        return root

    def _heads(self, model: nn.Module, plan: Plan) -> list[nn.Module]:
        """A policy that names layers says nothing of the rest; any other says what it wants."""
        by_class = self.settings.wrap.kind == "transformer_based_wrap"
        return late_heads(model, plan.units, plan.ignored) if by_class else []

    def _root_of(self, model: nn.Module) -> nn.Module:
        return ShardedRoot(model)

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
    def named_tensors(self, form: ShardedForm) -> Iterator[tuple[list[NamedTensor], Callable[[], list[torch.Tensor]]]]:
        yield open_tensors(form.root, self.device)

    @override
    def get_ready(self, root: nn.Module) -> None:
        for unit in roots_of(root):  # else the first unit that is called would take itself for the root
            unit._get_fsdp_state()._lazy_init()
        self._units = Units(root)
        for group in self._units.groups:
            give_frozen_group_dtypes(group)
        self._units_by_module = units_by_module(root)
        self.path = SamePath([clean_name(group._module_fqn or "") for group in self._units.groups], self.timeout)
        self._watch, self._has_begun = BackwardWatch(self._units, self.path, lambda: self.in_step), False
        self.make_idle(root)
        self._units.drop_unreduced()

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
    def open_unit(self, root: nn.Module, module: nn.Module, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Close]:
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
    def make_idle(self, root: nn.Module) -> None:
        for unit in roots_of(root):
            reset_iter_state(unit)
        self.path.forget()

    @override
    def drop_unreduced(self, root: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        self._units.drop_unreduced(parameters)

    @override
    def begin_step(self, root: nn.Module) -> None:
        self._watch.probing, self._has_begun = not self._has_begun and not is_planned(), True
        self._units.forget_forwards()

    @override
    def begin_backward(self, root: nn.Module) -> None:
        self._units.let_hooks_run()

    @override
    def end_backward(self, root: nn.Module, *, reduced: bool) -> None:
        if reduced:
            self._watch.settle(self.begin_max)

    @override
    def reshard(self, root: nn.Module) -> None:
        self._units.reshard()  # a forward without backward leaves at least the root's unit gathered

    @override
    @contextmanager
    def no_sync(self, root: nn.Module) -> Iterator[None]:
        sharded = _as_fsdp(root)
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(self.settings.reshard_during_accumulation)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)
            sharded.set_reshard_after_backward(True)

    @override
    def clip_grad_norm(
        self, root: nn.Module, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        gradients = gradients_of(parameters)
        return clip_to_norm(gradients, global_norm(gradients, norm_type), max_norm)

    @override
    def norm_of(self, root: nn.Module, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        return global_norm(gradients, norm_type)  # torch's is a partial sum to whoever reads it

    @override
    def grad_scaler(self) -> torch.amp.GradScaler:
        kind = WaitingGradScaler if self.settings.cpu_offload else torch.amp.GradScaler
        return kind(self.device.type)

    @override
    def shard_access(self, root: nn.Module) -> ShardAccess:
        access = UnitAccess(self._units)
        sharded = list(self.sharded_modules(root))
        follow_state_dicts(sharded, access)
        refuse_copies([*sharded, *(module for module in root.modules() if isinstance(module, FSDPModule))])
        return access

    @override
    def state_dict_module(self, root: nn.Module) -> nn.Module:
        return inside_root(root)


def _as_fsdp(root: nn.Module) -> FSDPModule:
    if not isinstance(root, FSDPModule):
        raise TypeError(f"expected the FSDP2 root that prepare() returned, got {type(root).__name__}.")
    return root


def _prefetch_in_order(units: list[FSDPModule]) -> None:
    """Let each unit gather the next one's parameters: registration order is the order of a static graph."""
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
