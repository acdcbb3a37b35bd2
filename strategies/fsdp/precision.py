"""Precision of sharded training: the Trainer's flag, autocast on any device, clipping by the global norm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from .gradients import gradients_of, local_tensor
from .settings import PrecisionSettings

if TYPE_CHECKING:
    from .strategy import AccelFSDPStrategy

PrecisionFlag = Literal["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
_HALF = {"16": torch.float16, "bf16": torch.bfloat16}


class AccelFSDPPrecision(FSDPPrecision):
    """What ``Trainer(precision=...)`` means under `AccelFSDPStrategy`.

    Args:
        precision: ``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"`` (fp32 weights, half computation and reduction);
            ``"bf16-true"`` or ``"16-true"`` (everything in half precision).
        strategy: The strategy it works for.

    Raises:
        ValueError: If ``precision`` is another.
    """

    def __init__(self, precision: str, strategy: AccelFSDPStrategy) -> None:
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
        self._half_dtype = _HALF.get(precision.split("-")[0])
        self._desired_input_dtype = torch.float32 if self._is_mixed else self._half_dtype or torch.float32

    @property
    def settings(self) -> PrecisionSettings:
        """What the engines are told: half computation and reduction under mixed precision, else nothing."""
        if not self._is_mixed:
            return PrecisionSettings()
        dtype = self._half_dtype
        return PrecisionSettings(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    @property
    def accelerate_name(self) -> str:
        """The same in Accelerate's words: ``no``, ``fp16`` or ``bf16``."""
        return {"16-mixed": "fp16", "bf16-mixed": "bf16"}.get(self.precision, "no")

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if not self._is_mixed:
            return super().convert_module(module)
        # fp32 master weights, also when the model was loaded in half precision (huggingface/accelerate#3979).
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
        return module

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        if self._is_mixed:
            return torch.autocast(self._strategy.root_device.type, dtype=self._half_dtype)
        return _DtypeContextManager(self._desired_input_dtype)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        def closure_with_whole_gradients() -> Any:
            result = closure()
            self._strategy.finish_gradients(optimizer, rescale=model.automatic_optimization)
            return result

        with nullcontext() if self.scaler is None else self._strategy.skipped_steps.watch(optimizer):
            return super().optimizer_step(optimizer, model, closure_with_whole_gradients, **kwargs)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._strategy.clip_grad_norm(optimizer, float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        for gradient in gradients_of(self.main_params(optimizer)):
            local_tensor(gradient).clamp_(-clip_val, clip_val)
