"""Clipping by torch's functions in the user's own code, which does not see the gradients that DeepSpeed keeps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...common.flat_shards import FlatShard
from ...common.gradients import gradients_of
from ...common.user_code import is_user_code


def refuse_norm(module: nn.Module, gradients: Sequence[Tensor], norm_type: float) -> None:
    """Refuse to take a norm of gradients of ``module`` while DeepSpeed trains it; others are torch's business.

    Raises:
        RuntimeError: If they are some of the module's, or none: parameters have none that DeepSpeed has taken.
    """
    if any(isinstance(gradient, FlatShard) for gradient in gradients):  # hooks see those of the stages 1 to 3
        return
    own = {id(gradient) for gradient in gradients_of(module.parameters())}
    if gradients and not any(id(gradient) in own for gradient in gradients):
        return
    raise RuntimeError(
        "torch.nn.utils.clip_grad_norm_ (or get_total_norm) would clip nothing: DeepSpeed keeps the gradients of "
        f"{type(module).__name__} in buffers of its own. Use self.clip_gradients(optimizer, gradient_clip_val=...), in "
        "configure_gradient_clipping() too, or Trainer(gradient_clip_val=...); the norm is strategy.last_grad_norm."
    )


def refuse_change(module: nn.Module, function: str, parameters: Sequence[Tensor]) -> None:
    """Refuse a function of torch that is to change gradients of ``module`` while DeepSpeed trains it.

    Raises:
        RuntimeError: If one of the parameters is the module's.
    """
    if is_user_code() and any(isinstance(parameter.grad, FlatShard) for parameter in parameters):
        return
    own = {id(parameter) for parameter in module.parameters()}
    if not any(id(parameter) in own for parameter in parameters):
        return
    raise RuntimeError(
        f"torch.nn.utils.{function} would change nothing: DeepSpeed keeps the gradients of {type(module).__name__} in "
        "buffers of its own, and clips them by their norm only. Use self.clip_gradients(optimizer, "
        "gradient_clip_val=...), in configure_gradient_clipping() too, or Trainer(gradient_clip_val=...)."
    )
