"""Precision of sharded training: the Trainer's flag, autocast on any device, clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from typing_extensions import override

from ..common.grads import SkippedSteps, gradients_of
from ..sharded_tensors.shards import local_part
from ..sharded_tensors.user_code import callers_code
from ..upstream.lightning import (
    FSDPPrecision,
    LightningModule,
    LightningOptimizer,
    _DtypeContextManager,
    is_overridden,
)
from ..upstream.patches import Patches
from .engine import Engine
from .settings import PrecisionSettings
from .sharded_model import recall_sharded
from .units import convert_floats, make_masters, one_dtype_in_each_unit

PrecisionFlag = Literal["64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
_DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
_SCALER_DEFAULTS = (65536.0, 2.0, 0.5, 2000)
"""Of torch's ``GradScaler``, in the order of its arguments."""


class Trained(Protocol):
    """The strategy as its precision plugin sees it."""

    skipped_steps: SkippedSteps

    @property
    def engine(self) -> Engine[Any]:
        """Of the sharded model."""

    @property
    def root_device(self) -> torch.device:
        """Of this process."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Of the running fit."""

    def run_backward(self, backward: Callable[[], None], *, keeps_graph: bool = False) -> None:
        """Run a backward."""

    def run_backward_of_user(self, backward: Callable[[], None], *, keeps_graph: bool = False) -> None:
        """Run a ``backward()`` that the user has written."""

    def finish_gradients(self, optimizer: Optimizer) -> bool:
        """Complete the gradients before they are unscaled, clipped and used."""

    def reduce_left_over(self) -> None:
        """Reduce the gradients of a window whose last micro-batch has no backward."""

    def scale_grads(self, optimizer: Optimizer, factor: float) -> None:
        """Multiply an optimizer's gradients."""

    def prepare_to_clip(self, optimizer: Optimizer) -> None:
        """Make the optimizer's gradients what is to be clipped."""

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Clip by the global norm."""


class AccelFSDPPrecision(FSDPPrecision):
    """The meaning of ``Trainer(precision=...)`` under `AccelFSDPStrategy`.

    Args:
        precision: ``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"`` (fp32 weights, half computation and reduction);
            ``"bf16-true"`` or ``"16-true"`` (everything in half precision); ``"64-true"`` by
            ``plugins=[DoublePrecision()]``, since the Trainer does not know it with FSDP.
        strategy: The strategy it works for.

    Raises:
        ValueError: If ``precision`` is another.
    """

    def __init__(self, precision: str, strategy: Trained) -> None:
        # Not super().__init__: it builds a scaler for CUDA, whatever the device.
        if precision not in get_args(PrecisionFlag):
            raise ValueError(
                f"precision={precision!r} is not possible with {type(strategy).__name__}. "
                f"Use one of {', '.join(get_args(PrecisionFlag))}."
            )
        self.precision = precision  # type: ignore[assignment]
        self.scaler: torch.amp.GradScaler | None = None  # type: ignore[assignment]
        self._strategy = strategy
        self._is_mixed = precision.endswith("-mixed")
        self._dtype = _DTYPES[precision.split("-")[0]]
        self._desired_input_dtype = torch.float32 if self._is_mixed else self._dtype

    @property
    def settings(self) -> PrecisionSettings:
        """The dtypes of the engines: half computation and reduction under mixed precision, else nothing."""
        if not self._is_mixed:
            return PrecisionSettings()
        dtype = self._dtype
        return PrecisionSettings(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    @property
    def accelerate_name(self) -> str:
        """The same in Accelerate's words: ``no``, ``fp16`` or ``bf16``."""
        return {"16-mixed": "fp16", "bf16-mixed": "bf16"}.get(self.precision, "no")

    def outside_context(self) -> AbstractContextManager[Any]:
        """The context of calls from hooks, which meet half weights under mixed precision."""
        return self.forward_context() if self._is_mixed else nullcontext()

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if not self._is_mixed:
            return convert_floats(module, self._desired_input_dtype)
        engine = self._strategy.engine
        if recall_sharded(module, engine.version) is None:  # else it was converted before it was sharded
            make_masters(module)
            if engine.version == 1:
                one_dtype_in_each_unit(module, engine.settings)
        return module

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        if self._is_mixed:
            return torch.autocast(self._strategy.root_device.type, dtype=self._dtype)
        if torch.get_default_dtype() == self._desired_input_dtype:
            return nullcontext()
        return _DtypeContextManager(self._desired_input_dtype)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        backward = partial(super().backward, tensor, model, optimizer, *args, **kwargs)
        is_users = is_overridden("backward", model)
        run = self._strategy.run_backward_of_user if is_users else self._strategy.run_backward
        run(backward, keeps_graph=bool(kwargs.get("retain_graph")))

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        has_gradients = True

        def closure_with_complete_gradients() -> Any:
            nonlocal has_gradients
            with callers_code():
                result = closure()
            if result is None and model.automatic_optimization and self.scaler is None:  # the last one has no loss
                self._strategy.reduce_left_over()
            has_gradients = self._strategy.finish_gradients(optimizer)
            return result

        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure_with_complete_gradients, **kwargs)
        result = closure_with_complete_gradients()
        if not has_gradients:
            return result
        is_skipped = result is None and model.automatic_optimization  # there was no backward
        if not is_skipped:
            self.unscale(optimizer)
        self._after_closure(model, optimizer)
        if is_skipped:
            return result
        with self._strategy.skipped_steps.watch(optimizer), _without_scaling_of_its_own(optimizer):
            result = self.scaler.step(optimizer, **kwargs)
        if model.automatic_optimization:
            self.scaler.update()
        return result

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scaler's factor, once for each step."""
        if self.scaler is None:
            return
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self.scaler._per_optimizer_states[id(plain)]["stage"] is OptState.STEPPED:  # the second time in one batch
            self.update_scale(step_goes_on=True)
        if self.scaler._per_optimizer_states[id(plain)]["stage"] is OptState.READY:
            self.scaler.unscale_(plain)

    def update_scale(self, *, step_goes_on: bool = False) -> None:
        """Update the scaler by the steps since the last time: in manual optimization once for each training step.

        Gradients that still wait for their optimizer (it steps every other batch, say) were scaled by the old factor;
        they are brought to the new one, so that unscaling them comes out right.

        Args:
            step_goes_on: Whether optimizers that are unscaled (clipped, say) have yet to step.
        """
        if self.scaler is None:
            return
        states = dict(self.scaler._per_optimizer_states)
        if not any(state["found_inf_per_device"] for state in states.values()):
            return
        before = self.scaler.get_scale()
        self.scaler.update()
        factor = self.scaler.get_scale() / before
        for optimizer in self._strategy.optimizers:
            state = states.get(id(optimizer))
            if state is not None and state["stage"] is OptState.UNSCALED:
                if step_goes_on:
                    self.scaler._per_optimizer_states[id(optimizer)] = state
            elif factor != 1.0:  # of one that has stepped, too: it may have new gradients, or some that nobody uses
                self._strategy.scale_grads(optimizer, factor)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._strategy.clip_grad_norm(optimizer, float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self._strategy.prepare_to_clip(optimizer)
        for gradient in gradients_of(self.main_params(optimizer)):
            local_part(gradient).clamp_(-clip_val, clip_val)


def check_scaler(plugin: object) -> None:
    """Check that a precision plugin of Lightning's has no gradient scaler that the user has chosen.

    Raises:
        ValueError: If it has: a sharded model needs one of its own.
    """
    scaler: Any = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return
    found = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    if found != _SCALER_DEFAULTS:
        raise ValueError(
            f"{type(plugin).__name__} has a scaler with (init_scale, growth_factor, backoff_factor, growth_interval) "
            f"= {found}; FSDP uses its own scaler with {_SCALER_DEFAULTS}. Omit the scaler, and set these values in "
            "on_train_start, for example with trainer.strategy.precision_plugin.scaler.set_growth_interval(...)."
        )


@contextmanager
def _without_scaling_of_its_own(optimizer: Optimizer) -> Iterator[None]:
    """Make the scaler decide on a fused optimizer's step, as on any other's.

    Left to itself, a fused optimizer would unscale inside its step: after clipping, which needs true gradients, and
    with each rank looking for overflows in its own shards alone.
    """
    plain: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    if not getattr(plain, "_step_supports_amp_scaling", None):
        yield
        return
    with Patches("user code") as patches:
        patches.put(plain, "_step_supports_amp_scaling", False)
        yield
