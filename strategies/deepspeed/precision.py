"""Precision under DeepSpeed: its engine runs backward and the step; the strategy says when gradients are complete."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.optim import LBFGS
from typing_extensions import override

from ..upstream.lightning import DeepSpeedPrecision, GradClipAlgorithmType, LightningModule, is_overridden


class Trained(Protocol):
    """What the precision asks of the strategy that it works for."""

    def run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the engine's backward."""

    def run_backward_of_user(self, backward: Callable[[], None]) -> None:
        """Run a ``backward()`` that the user has written."""

    def clip_step(self, max_norm: float) -> None:
        """Let the next optimizer step clip its gradients by their norm."""

    def take_step(self, **kwargs: Any) -> None:
        """Let the engine clip, step and zero the gradients."""


class AccelDeepSpeedPrecision(DeepSpeedPrecision):
    """What ``Trainer(precision=...)`` means under `AccelDeepSpeedStrategy`.

    Args:
        precision: ``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"`` (half weights and computation, fp32 master weights
            in the optimizer); ``"bf16-true"`` or ``"16-true"`` (the same, and the module made in half precision).
        strategy: The strategy it works for.

    Raises:
        ValueError: If ``precision`` is another.
    """

    def __init__(self, precision: str, strategy: Trained) -> None:
        super().__init__(precision)  # type: ignore[arg-type]
        self._strategy = strategy

    @property
    def accelerate_name(self) -> str:
        """The same in Accelerate's words: ``no``, ``fp16`` or ``bf16``."""
        return {"16": "fp16", "bf16": "bf16"}.get(self.precision.split("-")[0], "no")

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if is_overridden("backward", model):
            self._strategy.run_backward_of_user(partial(model.backward, tensor, *args, **kwargs))
        else:
            self._strategy.run_backward(tensor, *args, **kwargs)

    @override
    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0:
            if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
                raise ValueError(
                    "DeepSpeed clips gradients by their norm only. Use clip_gradients(..., "
                    "gradient_clip_algorithm='norm')."
                )
            self._strategy.clip_step(float(clip_val))

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                "LBFGS evaluates its closure several times, which DeepSpeed cannot do. Use another optimizer."
            )
        result = closure()
        self._after_closure(model, optimizer)
        self._strategy.take_step(**kwargs)
        return result
