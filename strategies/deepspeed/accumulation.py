"""Gradient accumulation in DeepSpeed's engine: complete, the same on all ranks, discarded when the window ends.

[Note: one window]
Left to itself, DeepSpeed 0.19 gets some windows wrong:

- It reduces gradients in the order in which backward makes them. Ranks that use different parameters would add up the
  gradients of different ones.
- It keeps the gradients of a window that was dropped; stage 3 also keeps that of a parameter which the next window does
  not use. Its optimizers step on all gradients that they have.

So the engine never decides what a window is (``managed_gradient_accumulation`` is false): each backward adds to it,
`GradientAccumulator.complete` ends it, and `GradientAccumulator.forget` drops it.

Ranks agree on the parameters that have a gradient on any of them: before each backward at stages 2 and 3, at the end of
a window at stages 0 and 1. Where they differ, the gradients of this backward are held back and reduced after it, in one
order, with zeros for those that are missing. Ranks that use the same parameters in different orders are known only once
their gradients are added up: a number for the order travels after each backward, and the step compares it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...state.collectives import all_reduce_max_async
from ...state.process_group import is_planned
from ...state.rendezvous import CollectiveOrderChecker
from ..common.grads import dtype_of_powers, norm_powers, reduce_powers
from ..common.items import ItemAverage
from ..sharded_tensors.global_tensors import wait_for_streams
from ..sharded_tensors.guards import refuse_in_threads
from ..sharded_tensors.user_code import library_code, lose_gradients, running_as_library
from ..upstream.patches import Patches, replace_for_good
from . import zero_optimizer
from .library import is_gathered_by_user
from .upstream import _get_default_group, _get_grad_fn_or_grad_acc, _will_engine_execute_node
from .zero_optimizer import ChangedWeights, PerParameterStep, attach_window, detach_window, step_on_all_values

_NAME = "accelight_window"
_BACKWARD_OF_ITS_OWN = (
    "A backward reached weights without DeepSpeed's engine, which would lose their gradients. Return the loss of "
    "training_step(), or call self.manual_backward(loss) in manual optimization; in the module's own backward() call "
    "loss.backward(). For the gradient of an input use torch.autograd.grad(loss, input)."
)


@running_as_library("zero_grad", "forget", "set_mode")  # to users' code, p.grad is the reduced one alone
class GradientAccumulator:
    """Follows one engine.

    Args:
        engine: DeepSpeed's engine, made for training with ``managed_gradient_accumulation`` off.
        optimized: The parameters that its optimizer trains.
        device: Where this rank computes.
        holds_parameters: Whether stage 3 is set to hold parameters (`hold_parameters`).
        items: Its numbers travel with the messages about gradients.
        gradient_factor: Returns what the gradients of the window that ends are multiplied by. With 0 no optimizer
            steps.
    """

    def __init__(
        self,
        engine: Any,
        optimized: Iterable[nn.Parameter],
        device: torch.device,
        *,
        holds_parameters: bool = False,
        items: ItemAverage | None = None,
        gradient_factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.engine, self.device, self._holds_parameters = engine, device, holds_parameters
        self._items, self._gradient_factor = items or ItemAverage(is_on=False), gradient_factor
        self.factor = 1.0
        """The factor by which the complete gradients of this window are still to be multiplied."""
        self.stage = int(engine.zero_optimization_stage())
        zero = self._zero = engine.optimizer
        self._is_partitioned = zero_optimizer.is_partitioned_optimizer(zero)
        self.names: Mapping[nn.Parameter, str] = dict(engine.param_names)
        optimized = list(optimized)
        self._frozen = [each for each in optimized if not each.requires_grad]
        self._left_out = set(map(id, self._frozen)) if self._is_partitioned else set()
        if self._is_partitioned:
            self._parameters = [each for group in zero_optimizer.parameter_groups(zero) for each in group]
        else:
            self._parameters = [each for each in optimized if each.requires_grad]
        self._places = {parameter: place for place, parameter in enumerate(self._parameters)}
        self.is_plain = isinstance(zero, torch.optim.Optimizer)
        """Whether the optimizer is torch's own, with the parameters as they are."""
        self.given: tuple[torch.optim.Optimizer, list[list[nn.Parameter]]] | None = None
        """The optimizer of the user's code, and the parameters of its groups; see `OptimizerStateTransfer`."""
        self.used: set[nn.Parameter] = set()
        """Parameters that have a gradient in this window, on any rank."""
        self._leaves: set[nn.Parameter] = set()
        self._order = 0
        """A number for the order in which gradients were reduced in this window."""
        self._orders: Callable[[], Sequence[int]] = tuple
        """Returns the extremes of that number over the ranks."""
        self._is_held = self._is_complete = self._in_backward = False
        self._is_dirty = True
        self.has_begun = False
        """Whether a backward has run in this window."""
        self._clip_norm: float | None = None
        self.norm: Tensor | None = None
        """Of the gradients before they were clipped, where users have looked at them since."""
        self.is_stale = self._adds_to_stale = False
        """Whether the optimizer has stepped and gradients have not been zeroed since."""
        self.hooks_before_step = False
        """Whether the user's code runs between the end of a window and the step."""
        self.has_stepped = False
        """Whether the last `step` had gradients to step on."""
        self.steps: PerParameterStep | None = None
        self.changes: ChangedWeights | None = None
        """Of a ZeRO optimizer: the weights that it steps on beside those that the model computes with."""
        if self._is_partitioned:
            self._follow_zero()
        self.gathered_changes: GatheredChanges | None = None
        """Of stage 3."""
        if self.stage == 3:
            self.gathered_changes = GatheredChanges(engine, self.names)
        self._clear, self._is_stepping = zero.zero_grad, False
        attach_window(zero, self)
        engine.__dict__[_NAME] = self  # not as a submodule

    @contextmanager
    def on_module(self, module: nn.Module) -> Iterator[None]:
        """Make the module's own ``zero_grad()`` drop these gradients as well, in this context.

        Lightning calls it before validation, and users do in manual optimization.
        """
        zero_grad = module.zero_grad

        def zero_all(set_to_none: bool = True) -> None:
            self.zero_grad()
            zero_grad(set_to_none)

        try:
            with Patches("user code") as patches:
                patches.put(module, "zero_grad", zero_all)
                yield
        finally:
            if self.is_plain:
                detach_window(self._zero)  # the user's own, which may train elsewhere

    def _follow_zero(self) -> None:
        zero = self._zero
        self.steps = PerParameterStep(zero, self.names)
        step_on_all_values(zero)
        self.changes = ChangedWeights(zero, self._parameters, self.names, self._frozen)
        self._leaves = {each for each in self._parameters if getattr(each, "ds_z3_leaf_module", None) is not None}
        self._reduce = zero.reduce_ready_partitions_and_remove_grads
        replace_for_good("ZeRO optimizers", zero, reduce_ready_partitions_and_remove_grads=self._reduce_noting)
        if self.stage <= 2:
            process = zero.process_gradients

            def process_gradients(*args: Any) -> None:
                self._check_in_backward()
                process(*args)

            replace_for_good("ZeRO optimizers", zero, process_gradients=process_gradients)
        self._finalize = zero.finalize_gradient_accumulation_boundary
        # complete() has done it
        replace_for_good("ZeRO optimizers", zero, finalize_gradient_accumulation_boundary=lambda: None)
        if self.stage == 3:
            self._collect = zero.independent_gradient_partition_epilogue
            replace_for_good("ZeRO optimizers", zero, independent_gradient_partition_epilogue=self._collect_all)

    def _collect_all(self) -> None:
        """Make stage 3 keep its reduced gradients; of parameters that are frozen by now it would take zeros."""
        frozen = [each for each in self.used if not each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            self._collect()
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _reduce_noting(self, parameter: nn.Parameter, *args: Any) -> None:
        if not parameter.requires_grad:  # frozen since the forward
            kept = getattr(parameter, zero_optimizer.gradient_attribute(self._zero), None) if self.stage <= 1 else None
            if kept is None:
                return  # with no gradient from an earlier micro-batch
        if self.stage == 3:
            self._check_in_backward()
        if not getattr(self._zero, "_coalesce_grad_reduction", False):
            if parameter not in self._leaves:  # DeepSpeed fills in zeros for those
                self.used.add(parameter)
            self._order = hash((self._order, self._places.get(parameter, -1))) % 2**31  # it travels as int32
        self._reduce(parameter, *args)

    def _check_in_backward(self) -> None:
        if not self._in_backward:
            raise RuntimeError(_BACKWARD_OF_ITS_OWN)

    # ------------------------------------------------------------------ what it knows
    @property
    def is_complete(self) -> bool:
        """Whether the gradients are reduced, and the optimizer has not stepped on them."""
        return self._is_complete

    @property
    def loss_scale(self) -> float:
        """The factor of the gradients until the step."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return 1.0 if scaler is None else float(scaler.cur_scale)

    def keeps(self, parameter: Tensor) -> bool:
        """Return whether the gradient of a parameter is not where torch has it: in a partition, or freed by a step."""
        return (self._is_partitioned or self.is_stale) and parameter in self._places

    def leaves_out(self, parameter: Tensor) -> bool:
        """Return whether the user's optimizer was given a parameter, frozen, that DeepSpeed's does not hold."""
        return id(parameter) in self._left_out

    # ------------------------------------------------------------------ backward
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the engine's backward, as one more micro-batch of this window.

        Raises:
            RuntimeError: On every rank, before anything is reduced, if ranks use different parameters and this stage
                cannot handle that.
        """
        if self._is_complete:
            raise RuntimeError(
                "A backward ran while complete gradients were neither used in a step nor zeroed: DeepSpeed cannot "
                "add to them. Call optimizer.step() or optimizer.zero_grad() first; to accumulate over more "
                "batches, use Trainer(accumulate_grad_batches=...)."
            )
        self._adds_to_stale |= self.is_stale
        self._check_frozen()
        self._is_dirty = self.has_begun = True
        zero = self._zero
        if self._is_partitioned:
            zero.set_gradient_accumulation_boundary(False)
        if self._holds_parameters:
            gather(self.engine)
        if self.stage == 3:  # its buffers are zero at the start of a window: always add, also twice in one batch
            zero.micro_step_id = 1
        agrees = self._is_partitioned and self.stage >= 2 and loss.requires_grad
        hook = loss.register_hook(self._agree_before_backward) if agrees else None  # type: ignore[no-untyped-call]
        self._in_backward = True
        try:
            with _repeated_backward(self.engine) if self.stage == 3 and kwargs.get("retain_graph") else nullcontext():
                self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
            if self._is_held:
                self._reduce_held_back()
            if agrees:  # not where the window ends: users' code may do that on one rank alone
                self._orders = all_reduce_max_async([self._order, -self._order])
        finally:
            self._in_backward = False
            self._stop_coalescing()
            if hook is not None:
                hook.remove()

    def _check_frozen(self) -> None:
        if self.is_plain:  # torch's own, which holds what it was given
            optimizer: torch.optim.Optimizer = self._zero
            self._parameters = [
                each for group in optimizer.param_groups for each in group["params"] if each.requires_grad
            ]
            return
        unfrozen = [self.names[each] for each in self._frozen if each.requires_grad]
        if unfrozen:
            raise RuntimeError(
                f"{', '.join(unfrozen)} was frozen when fit() started, but no longer is: DeepSpeed's optimizer does "
                "not hold it and would never train it. Start fit() with it unfrozen and freeze it in "
                "on_train_start() until it should train, or unfreeze it between two calls of fit(), or use stage 0 "
                "in fp32."
            )

    def _agree_before_backward(self, _: Tensor) -> None:
        agreed = self._agree(will_get_gradients(self._parameters))
        pairs = list(zip(self._parameters, agreed.some, agreed.mixed, strict=True))
        self.used.update(each for each, some, _ in pairs if some and each in self._leaves)
        if self.stage == 2 and not any(agreed.some):
            self._zero.setup_buckets()  # which the first gradient would have done: it reduces them all the same
        mixed = [each for each, _, differs in pairs if differs and each not in self._leaves]
        if not mixed:
            return
        if self.stage == 3 and not self._holds_parameters:
            self._refuse_mixed(mixed)
        self._is_held = True
        self._zero._coalesce_grad_reduction = self.engine.inside_no_sync_ctxt = True

    def _agree(self, have: Sequence[bool]) -> Agreed:
        agreed = agree(have, self.device, self._items.message())
        self._items.receive(lambda: agreed.maxima)
        return agreed

    def _refuse_mixed(self, mixed: list[nn.Parameter]) -> None:
        first = mixed[0]
        lacking = ranks_without(will_get_gradients([first])[0], self.device)
        raise RuntimeError(
            f"{', '.join(self.names[each] for each in mixed)}: only some ranks use it in this batch (rank "
            f"{', '.join(map(str, lacking))} does not use {self.names[first]}): {WAY_OUT}"
        )

    def _stop_coalescing(self) -> None:
        if self._is_held:
            self._is_held = self._zero._coalesce_grad_reduction = self.engine.inside_no_sync_ctxt = False

    def _reduce_held_back(self) -> None:
        self._stop_coalescing()
        self._add_missing_zeros()
        flush = self.engine._flush_coalesced_reduction_zero3 if self.stage == 3 else None
        (flush or self.engine._flush_coalesced_reduction_zero12)(self._zero)

    def _add_missing_zeros(self) -> None:
        """Make the ranks have gradients of the same parameters."""
        attribute = zero_optimizer.gradient_attribute(self._zero)
        have = [getattr(each, attribute, None) is not None for each in self._parameters]
        for parameter, here, some in zip(self._parameters, have, self._agree(have).some, strict=True):
            if some and not here:
                dtype = self._zero.gradient_accumulation_dtype if attribute == "grad_accum" else parameter.dtype
                setattr(parameter, attribute, torch.zeros_like(parameter, dtype=dtype))

    # ------------------------------------------------------------------ the end of a window
    def complete(self) -> None:
        """Make the gradients complete: what other ranks have is in them, and DeepSpeed's optimizer has them ready."""
        if self._is_complete or not self._is_dirty:
            return
        self._is_complete = True
        if self.hooks_before_step:
            self.follow_changed_weights()  # they may change what the optimizer steps on
        if self.stage >= 2 and self._is_partitioned:
            if self.used:
                self._finalize()
        else:
            self._reduce_now()
        factor = self._gradient_factor()
        if factor:
            self.multiply(factor)
        else:
            self.forget()

    def multiply(self, factor: float) -> None:
        """Multiply the complete gradients, now or where the optimizer steps."""
        self.factor *= factor
        if not self._is_partitioned:
            self.apply_factor()

    @property
    def is_to_multiply(self) -> bool:
        """Whether the step is still to multiply the gradients, or to clip them."""
        return self.factor != 1.0 or self._clip_norm is not None

    @torch.no_grad()
    def apply_factor(self) -> None:
        """Multiply complete gradients by what is left of their factor, which the step would do: users look at them."""
        factor, self.factor = self.factor, 1.0
        if factor == 1.0:
            return
        if not self._is_partitioned:
            for gradient in plain_gradients(self.engine):
                gradient.mul_(factor)
            return
        for piece in zero_optimizer.pieces(self._zero):
            if piece.parameter in self.used:
                zero_optimizer.gradient_piece(self._zero, piece).mul_(factor)

    def _reduce_now(self) -> None:
        engine, zero = self.engine, self._zero
        if self._is_partitioned:  # stage 1
            zero.setup_buckets()
            self._add_missing_zeros()
        else:
            have = self._agree([self._has_gradient(each) for each in self._parameters]).some
            self.used = {each for each, some in zip(self._parameters, have, strict=True) if some}
            self._check_plain()
        engine._running_engine_step = True  # as its own step() says
        try:
            engine.allreduce_gradients()
        finally:
            engine._running_engine_step = False
        if not self._is_partitioned:  # DeepSpeed has filled in zeros for every parameter
            for parameter in engine.module.parameters():
                if parameter not in self.used:
                    parameter.grad = None

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        flags = getattr(self._zero, "fp32_groups_has_gradients", None)
        if flags is None:
            return parameter.grad is not None
        for group, has in zip(self._zero.bf16_groups, flags, strict=True):
            for each, one in zip(group, has, strict=True):
                if each is parameter:
                    return bool(one)
        return False

    def _check_plain(self) -> None:
        unused = [self.names[each] for each in self._parameters if each not in self.used]
        if unused and self.used and not self.is_plain:
            raise RuntimeError(
                f"{', '.join(unused)} had no gradient on any rank in this window: {type(self._zero).__name__} of "
                "DeepSpeed would step on it anyway. Use stage 1, 2 or 3, or freeze it before fit()."
            )

    def follow_changed_weights(self) -> None:
        """Copy weights that users' code has changed to those that the optimizer steps on."""
        if self.gathered_changes is not None:
            self.gathered_changes.take_over()
        if self.changes is not None:
            self.changes.attach()

    def sync_to_optimizer(self) -> None:
        """As `follow_changed_weights`, amid users' code: what is gathered stays so."""
        if self.gathered_changes is not None:
            self.gathered_changes.sync_to_partitions()
        if self.changes is not None:
            self.changes.sync_to_optimizer()

    def accept_weights(self) -> None:
        """Accept the weights that there are now: they come from a checkpoint."""
        for changes in (self.gathered_changes, self.changes):
            if changes is not None:
                changes.accept()

    def step(self, **kwargs: Any) -> None:
        """Step on the parameters that have a gradient; without any, do nothing."""
        if self._adds_to_stale:
            raise RuntimeError(
                "manual_backward() followed optimizer.step() without zero_grad(): torch would add to the gradients "
                "of that step, but DeepSpeed has dropped them. Call optimizer.zero_grad() after each step, or "
                "before the first backward of the next."
            )
        self.complete()
        self._check_orders()
        self._is_complete, self.has_stepped = False, bool(self.used)
        if not self.used:
            self._clip_norm = None
            return
        self.follow_changed_weights()
        if self.gathered_changes is not None:
            self.gathered_changes.end_probing()
        if self.steps is not None:
            self.steps.used = self.used
        reduces = self.engine.enable_backward_allreduce
        self.engine.enable_backward_allreduce = False  # complete() has done it
        self._is_stepping = True
        try:
            with self._clipping():
                self.engine.step(**kwargs)
        finally:
            self._is_stepping = False
            self.engine.enable_backward_allreduce = reduces
        if self.changes is not None:
            self.changes.accept()
        self.forget()
        self.is_stale = True

    def _check_orders(self) -> None:
        if sum(self._orders()):
            raise RuntimeError(
                "Ranks used the same parameters in different orders in this accumulation window, so DeepSpeed added up "
                "gradients of different parameters. Use the layers in the same order on every rank, or use stage 1."
            )

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of this window by their norm: DeepSpeed's optimizers do it as they step."""
        if not getattr(self._zero, "compute_grad_norm", True):
            raise RuntimeError(
                "clip_gradients() needs the norm: set compute_grad_norm to true in the DeepSpeed config."
            )
        self._clip_norm = max_norm if self._clip_norm is None else min(max_norm, self._clip_norm)
        if not self._is_partitioned:
            self.clip_now()

    @torch.no_grad()
    def clip_now(self) -> None:
        """Do what `clip` has left to the step, if anything: users look at the gradients. Every rank calls it."""
        max_norm, self._clip_norm = self._clip_norm, None
        if max_norm is not None:
            self.norm = gradient_norm(self)
            self.multiply(min(1.0, max_norm / (float(self.norm) + 1e-6)))  # torch's and DeepSpeed's formula

    def set_mode(self, name: str) -> None:
        """Call ``train()`` or ``eval()`` of the optimizer, which change weights (schedule-free), on every rank."""
        with library_code():  # what the optimizer writes to flat parameters is no change of users'
            if self.changes is None:
                getattr(self._zero.optimizer, name)()
            else:
                self.changes.switch_mode(name)

    @contextmanager
    def _clipping(self) -> Iterator[None]:
        if self._clip_norm is None:
            yield
            return
        before, self._zero.clip_grad = self._zero.clip_grad, self._clip_norm
        try:
            yield
        finally:
            self._zero.clip_grad = before

    # ------------------------------------------------------------------ nothing left
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop the window, as the optimizer's and the module's ``zero_grad()`` are to do."""
        if self._is_stepping:  # stage 3 asks for it in the middle of its step
            self._clear(*args, **kwargs)
            return
        self.is_stale = self._adds_to_stale = False
        self.forget()

    def forget(self) -> None:
        """Drop every gradient, wherever DeepSpeed keeps it, and what a backward that failed has left."""
        self._clip_norm = self.norm = None
        if not self._is_dirty:
            return
        self._is_dirty = self._is_complete = self.has_begun = False
        self._stop_coalescing()
        self.used = set()
        self._order, self._orders, self.factor = 0, tuple, 1.0
        lose_gradients(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None
        drop_gradients(self.engine)


@torch.no_grad()
def gradient_norm(window: GradientAccumulator) -> torch.Tensor:
    """Return the global norm of a window's complete gradients, without their scale; every rank calls it."""
    window.complete()
    zero = window.engine.optimizer
    if not zero_optimizer.is_partitioned_optimizer(zero):
        return plain_norm(window.engine)
    parts: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for index in range(len(zero_optimizer.parameter_groups(zero))):
        parts.setdefault(zero_optimizer.process_group(zero, index), [])
    for piece in zero_optimizer.pieces(zero):
        if piece.parameter in window.used:
            parts[zero_optimizer.process_group(zero, piece.group)].append(zero_optimizer.gradient_piece(zero, piece))
    total = torch.zeros((), dtype=dtype_of_powers(window.device), device=window.device)
    for group, gradients in parts.items():
        power = norm_powers(gradients, 2.0).sum().to(total) if gradients else torch.zeros_like(total)
        reduce_powers(power, [group], 2.0)
        total += power
    return (total.sqrt() * (window.factor / window.loss_scale)).float()


def plain_norm(engine: Any) -> torch.Tensor:
    """Return the norm of unpartitioned gradients: stage 0 computes none in fp32, and a scaled one in fp16."""
    config = getattr(engine.optimizer, "loss_scale_config", None)
    scale = 1.0 if config is None else config.cur_scale
    return nn.utils.get_total_norm([gradient.float() for gradient in plain_gradients(engine)]) / scale


def plain_gradients(engine: Any) -> list[Tensor]:
    """Return the gradients of an optimizer that shards nothing."""
    of_bf16_optimizer = getattr(engine.optimizer, "fp32_groups_gradients", None)
    if of_bf16_optimizer is not None:
        return [gradient for group in of_bf16_optimizer for gradient in group if gradient is not None]
    return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]


def window_of(engine: Any) -> GradientAccumulator | None:
    """Return the accumulator of an engine, if it trains under the Trainer."""
    window: GradientAccumulator | None = engine.__dict__.get(_NAME)
    return window


class EngineBackwards(TorchFunctionMode):
    """Makes each ``loss.backward()`` of the user's code the engine's.

    Args:
        backward: Of a `GradientAccumulator`.
    """

    def __init__(self, backward: Callable[..., None]) -> None:
        super().__init__()
        self._backward = backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; the mode itself is off inside."""
        return (self._run if func is Tensor.backward else func)(*args, **(kwargs or {}))

    def _run(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if gradient is not None or create_graph or inputs is not None:
            raise RuntimeError(
                "backward(gradient=..., create_graph=..., inputs=...) in the module's backward(): DeepSpeed's "
                "engine accepts only a loss and retain_graph. Call loss.backward(), or train with AccelFSDPStrategy."
            )
        with library_code():
            self._backward(loss, retain_graph=bool(retain_graph))


@contextmanager
def _repeated_backward(engine: Any) -> Iterator[None]:
    """Make another backward through the same graph gather parameters again: stage 3 counts their uses down to zero."""
    counts = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
    layers = list(engine.module.modules())
    before = [{name: vars(layer)[name] for name in counts if name in vars(layer)} for layer in layers]
    yield
    for layer, each in zip(layers, before, strict=True):
        vars(layer).update(each)


# ------------------------------------------------------------------------------------------------
# Dropping all gradients of an engine, wherever DeepSpeed keeps them, so that the next window starts from nothing.
#
# The attributes are those of DeepSpeed 0.19.


def drop_gradients(engine: Any) -> None:
    """Drop the gradients in DeepSpeed's optimizer, and what a backward that failed has left in the engine."""
    zero = engine.optimizer
    if zero_optimizer.is_stage_3(zero):
        _drop_stage_3(zero)
    elif zero_optimizer.is_partitioned_optimizer(zero):
        _drop_stages_1_2(zero)
    elif hasattr(zero, "clear_hp_grads"):
        zero.clear_hp_grads()
        zero.clear_lp_grads()
    state = getattr(zero, "_backward_hook_state", None)
    if state is not None:
        state.backward_active_depth = 0
        state.reset_for_new_step()
    engine._unmanaged_backward_count = 0


def _drop_stages_1_2(zero: Any) -> None:
    for parameter in (each for group in zero.bit16_groups for each in group):
        parameter.grad_accum = None
    for group in range(len(zero.bit16_groups)):
        zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
    for bucket in zero.ipg_buckets.values():
        bucket.clear()
    zero.extra_large_param_to_reduce.clear()
    zero.previous_reduced_grads.clear()
    zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
    zero._release_ipg_buffers()
    zero.micro_step_id = -1
    if zero.cpu_offload:
        zero._wait_for_offload_copies()
        for gradient in zero.accumulated_grads_in_cpu.values():
            gradient.zero_()
        for master in zero.single_partition_of_fp32_groups:
            master.grad.zero_()
        zero.norm_for_param_grads = {}
        zero._offload_accumulated_param_ids = set()
        zero.local_overflow = False


def _drop_stage_3(zero: Any) -> None:
    zero.grad_partitions_flat_buffer.zero_()
    zero.averaged_gradients = {}
    for bucket in zero.ipg_buckets.values():
        bucket.clear_params()
    for parameter_id in zero.params_already_reduced:
        zero.params_already_reduced[parameter_id] = False
    zero._offload_boundary_param_ids = set()
    if zero.offload_optimizer:
        zero.norm_for_param_grads = {}
        zero.inf_or_nan_tracker.zero_()
        for master in zero.fp32_partitioned_groups_flat:
            if master.grad is not None:
                master.grad.zero_()


# ------------------------------------------------------------------------------------------------
# The parameters that get a gradient, on each rank: all must know them before they reduce gradients.


@dataclass(frozen=True)
class Agreed:
    """Of each parameter, in the order given."""

    some: list[bool]
    """Whether some rank has a gradient."""
    mixed: list[bool]
    """Whether some have one and others have none."""
    maxima: list[int]
    """Of ``more``."""


def agree(have: Sequence[bool], device: torch.device, more: Sequence[int] = ()) -> Agreed:
    """Exchange with the other ranks, in one small reduction, which parameters have a gradient here.

    Args:
        have: For each parameter, in the same order on each rank.
        device: Where this rank computes; the CPU is used if the process group has a backend for it.
        more: Other numbers whose maxima over the ranks are wanted.
    """
    here = torch.tensor([[*have], [not each for each in have]], dtype=torch.int64)
    vector = torch.cat([here.flatten(), torch.tensor([*more], dtype=torch.int64)]).to(_device(device))
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    reduced: list[int] = vector.tolist()
    some, lacking, maxima = reduced[: len(have)], reduced[len(have) : 2 * len(have)], reduced[2 * len(have) :]
    mixed = [bool(one and other) for one, other in zip(some, lacking, strict=True)]
    return Agreed([bool(each) for each in some], mixed, maxima)


def _device(device: torch.device) -> torch.device:
    cpu = torch.device("cpu")
    return cpu if cpu in _get_default_group()._device_types else device


def will_get_gradients(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return which parameters the running backward will give a gradient; call it in a hook, before any has one.

    What a reentrant checkpoint is still to recompute is not in the graph yet, and counts as unused.
    """
    with torch.enable_grad():  # older torch needs it for leaves
        nodes = [_get_grad_fn_or_grad_acc(each) if each.requires_grad else None for each in parameters]
    return [node is not None and _will_engine_execute_node(node) for node in nodes]


def ranks_without(have: bool, device: torch.device) -> list[int]:
    """Return the ranks that call this with False."""
    mine = torch.tensor([int(have)], device=_device(device))
    answers: list[Tensor] = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(answers, mine)
    return [rank for rank, each in enumerate(answers) if not int(each)]


# ------------------------------------------------------------------------------------------------
# Changes that users' code makes in stage 3's parameters while they are gathered.


class GatheredChanges:
    """Keeps what users' code changes in stage 3's parameters while they are gathered.

    DeepSpeed drops gathered values when it partitions a parameter anew; under ``ddp`` a change stays. So each rank
    takes its part over first. Version counters show changes in place, and `GlobalTensors` those through
    ``parameter.data``. Compiled code and kernels of one's own show nothing: until the first optimizer step, each rank
    compares the values with its partition, and a parameter that differs is taken over from then on.

    Args:
        engine: DeepSpeed's engine, of stage 3.
        names: The parameters' names.
    """

    def __init__(self, engine: Any, names: Mapping[nn.Parameter, str]) -> None:
        self._engine, self._names, self._device = engine, names, engine.device
        self._versions: dict[nn.Parameter, int] = {}
        self._changed: set[nn.Parameter] = set()
        self._always: set[nn.Parameter] = set()
        self._compared: set[nn.Parameter] = set()
        self._probes = not is_planned()
        for parameter in engine.module.parameters():
            self._watch(parameter)

    def _watch(self, parameter: Any) -> None:
        partition = inspect.unwrap(parameter.partition)  # not an earlier engine's watch

        @functools.wraps(partition)
        def partition_with_changes(
            param_list: list[nn.Parameter] | None = None, *args: Any, has_been_updated: bool = False, **kwargs: Any
        ) -> None:
            both: dict[bool, list[nn.Parameter]] = {False: [], True: []}
            for each in param_list or [parameter]:
                both[has_been_updated or self._is_changed(each)].append(each)
            for is_changed, some in both.items():
                if some:
                    partition(some, *args, has_been_updated=is_changed, **kwargs)
            if both[True]:
                wait_for_streams(self._device.type)  # the backward may gather them next
            self._accept(both[True])

        replace_for_good("ZeRO-3 gathering", parameter, partition=partition_with_changes)
        self._versions[parameter] = parameter._version

    def _is_changed(self, parameter: Any) -> bool:
        if parameter.ds_status.name != "AVAILABLE":
            return False
        if parameter in self._changed or parameter in self._always or self._has_new_version(parameter):
            return True
        if not (self._probes or parameter in self._compared) or not _differs_from_partition(parameter):
            return False
        if self._probes:
            self._always.add(parameter)
        return True

    def _has_new_version(self, parameter: nn.Parameter) -> bool:
        return self._versions[parameter] != parameter._version

    def _accept(self, parameters: Iterable[nn.Parameter]) -> None:
        for each in parameters:
            self._versions[each] = each._version
            self._changed.discard(each)

    def accept(self) -> None:
        """Accept the values that parameters have now: they come from a checkpoint."""
        self._accept(self._versions)

    def note(self, parameter: nn.Parameter) -> None:
        """Take note that users' code changes a parameter, which is gathered."""
        self._changed.add(parameter)

    def compare(self, parameter: nn.Parameter) -> None:
        """Compare a parameter from now on: users' code has an alias of it whose writes no version counts."""
        self._compared.add(parameter)

    def sync_to_partitions(self) -> None:
        """Copy changes so far to the partitions, and leave parameters gathered."""
        for each in self._versions:
            own, held = _own_part(each) if self._is_changed(each) else (None, None)
            if own is not None and held is not None:
                held.copy_(own)
                self._accept([each])

    def take_over(self) -> None:
        """Give partitions all changes that this rank has seen.

        Raises:
            RuntimeError: If a parameter was changed in place while it was partitioned, where it has no values.
        """
        for each in self._versions:
            parameter: Any = each
            if self._is_changed(parameter) and not is_gathered_by_user(parameter):
                parameter.ds_active_sub_modules.clear()  # as DeepSpeed does when it steps
                partition(self._engine, parameter)
        lost = [self._names[each] for each in self._versions if self._has_new_version(each)]
        if lost:
            self.accept()
            were, them = ("were", "them") if lost[1:] else ("was", "it")
            raise RuntimeError(
                f"{', '.join(lost)} {were} changed in place while stage 3 had {them} partitioned, so the change is "
                "lost. Change weights in a hook, such as on_train_batch_start() or on_train_batch_end(), or inside "
                "'with strategy.full_parameters(module):', on every rank."
            )

    def end_probing(self) -> None:
        """Stop comparing values, once the optimizer steps for the first time; every rank must call it."""
        if self._probes and dist.get_world_size() > 1:
            found = agree([each in self._always for each in self._versions], self._device).some
            self._always = {each for each, is_found in zip(self._versions, found, strict=True) if is_found}
        self._probes = False


def _differs_from_partition(parameter: Any) -> bool:
    own, held = _own_part(parameter)
    return own is not None and not torch.equal(own, held)


def _own_part(parameter: Any) -> tuple[Tensor | None, Tensor]:
    """Return this rank's part of a gathered parameter, or None, and what its partition has of it."""
    held: Tensor = parameter.ds_tensor
    if held.dtype != parameter.dtype or hasattr(held, "ds_quant_scale") or held.numel() < parameter.partition_numel():
        return None, held  # quantized, or on NVMe
    start, count = zero_optimizer.range_in_partition(parameter, held.numel())
    own = parameter.detach().reshape(-1).narrow(0, start if count else 0, count)
    return own.to(held.device), held.narrow(0, 0, count)


# ------------------------------------------------------------------------------------------------
# Keeping ranks on one path through the layers of a model that stage 3 has partitioned, or letting them differ.
#
# Stage 3 gathers a layer's parameters where the layer is used, on all ranks at once. A rank on a path of its own would
# gather other parameters than its peers, which crashes, hangs, or mixes up values.


WAY_OUT = (
    "Stage 3 gathers parameters where they are used, on all ranks together. Use stage 0, 1 or 2, or "
    "AccelDeepSpeedStrategy(find_unused_parameters=True), which keeps parameters gathered, or use the same layers "
    "on each rank, for example by adding 0 * layer(x).sum() to its loss."
)


def hold_parameters(engine: Any) -> list[Any]:
    """Make stage 3 keep all parameters gathered from each forward to the next step, so that ranks may differ.

    Returns:
        Handles of its hooks.
    """
    # Its trace of layers must be the same on every rank.
    replace_for_good("ZeRO-3 gathering", _coordinator(engine), reset_step=lambda: None)
    gather(engine)
    return [engine.module.register_forward_pre_hook(lambda *_: gather(engine), prepend=True)]


def gather(engine: Any) -> None:
    """Gather every parameter of an engine that `hold_parameters` has prepared."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameters = list(engine.module.parameters())
    partitioned = [each for each in parameters if each.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    if partitioned:
        partitioned[0].all_gather(param_list=partitioned)
    for parameter in parameters:
        parameter.is_external_param = True  # no layer releases it; the step does


def hold_parameters_in_forward(engine: Any) -> list[Any]:
    """Make an engine for evaluation keep all parameters gathered during each forward, so that ranks may differ.

    Returns:
        Handles of its hooks.
    """
    replace_for_good("ZeRO-3 gathering", _coordinator(engine), reset_step=lambda: None)
    return [
        engine.module.register_forward_pre_hook(lambda *_: gather(engine), prepend=True),
        engine.module.register_forward_hook(lambda *_: _release(engine), always_call=True),
    ]


def _release(engine: Any) -> None:
    parameters = list(engine.module.parameters())
    parameters[0].partition(param_list=parameters)


def finish_gather(engine: Any, parameter: nn.Parameter) -> None:
    """Wait for a parameter that DeepSpeed has begun to gather ahead of the forward that needs it."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    _gathers(engine).pop(parameter).wait()
    if not device.resolves_data_dependency():
        device.current_stream().wait_stream(_coordinator(engine)._PartitionedParameterCoordinator__allgather_stream)


def partition(engine: Any, parameter: Any) -> None:
    """Partition a gathered parameter.

    DeepSpeed gathers several at once; it waits for all of them, and keeps the others among the gathers under way.
    """
    _gathers(engine).pop(parameter, None)
    parameter.partition()


def _gathers(engine: Any) -> MutableMapping[nn.Parameter, Any]:
    """Return the gathers that DeepSpeed has begun and no layer has waited for, by parameter."""
    coordinator = _coordinator(engine)
    found: MutableMapping[nn.Parameter, Any] = coordinator._PartitionedParameterCoordinator__inflight_param_registry
    return found


class CollectiveOrder:
    """Refuses, by name, to gather the parameters of another layer than the other ranks.

    While DeepSpeed records in which order layers are used, ranks compare each of them. From then on nothing is
    compared, until a rank leaves the recorded order: the others have to say the same. A layer that users' code has let
    use weights of other layers since then leaves it, too: DeepSpeed would fetch others than it has recorded.

    Args:
        engine: DeepSpeed's engine, of stage 3.
        timeout: How long ranks wait for each other where they compare.
    """

    def __init__(self, engine: Any, timeout: timedelta) -> None:
        self._compared = CollectiveOrderChecker(WAY_OUT, timeout)
        # By identity: a metric's hash is another one after each update, on each rank at its own time.
        self._names: MutableMapping[nn.Module, str] = WeakIdKeyDictionary(
            {layer: name for name, layer in engine.module.named_modules()}
        )
        self._recorded: dict[int, int] = {}
        """The number of weights of other layers that each layer uses in the recorded order."""
        coordinator = self._coordinator = _coordinator(engine)
        self._fetch, self._check_trace = coordinator.fetch_sub_module, coordinator.trace_prologue
        replace_for_good(
            "ZeRO-3 gathering", coordinator, fetch_sub_module=self._fetch_alike, trace_prologue=self._depart_together
        )

    def _fetch_alike(self, layer: nn.Module, forward: bool) -> None:
        refuse_in_threads()
        if not all(each is None or hasattr(each, "ds_id") for each in layer._parameters.values()):
            raise RuntimeError(
                f"{self._name(layer)} was called with parameters other than the partitioned ones "
                "(torch.func.functional_call, vmap, parameters replaced by hand), which stage 3 cannot gather. Use "
                "stage 2, or call a copy of the module that was created in __init__(), with the values of "
                "'strategy.full_state_dict()'."
            )
        if not self._coordinator.is_complete_trace():
            self._compared.compare(f"{'goes' if forward else 'goes back'} through {self._name(layer)!r}")
        with torch.inference_mode(False):  # what is gathered in the user's stays, and would not train
            self._fetch(layer, forward)

    def _depart_together(self, layer: nn.Module) -> None:
        was_complete = self._coordinator.is_complete_trace()
        if not was_complete:
            self._recorded = {}
        elif not self._recorded:
            self._recorded = {id(each): _num_of_others(each) for each in self._names}
        self._check_trace(layer)
        if self._coordinator.is_complete_trace() and self._recorded.get(id(layer), 0) != _num_of_others(layer):
            self._coordinator._invalidate_trace()
        if was_complete and not self._coordinator.is_complete_trace():
            self._compared.compare(f"leaves the recorded order at {self._name(layer)!r}")

    def _name(self, layer: nn.Module) -> str:
        return self._names.get(layer) or type(layer).__name__


def _num_of_others(layer: Any) -> int:
    return sum(1 for _ in layer.ds_external_parameters()) if hasattr(layer, "ds_external_parameters") else 0


def _coordinator(engine: Any) -> Any:
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
