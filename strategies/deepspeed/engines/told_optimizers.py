"""Optimizers that tell the window of their engine what the user's code asks of them."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer


def tell_window(optimizer: Any, window: Any) -> None:
    """Let ``optimizer.zero_grad()`` drop the window, and DeepSpeed's own refuse further groups."""
    optimizer.accelight_window = window
    kind: type = type(optimizer)
    inner = None if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
    has_modes = all(callable(getattr(inner, name, None)) for name in ("train", "eval"))
    optimizer.__class__ = _telling_class(kind, has_modes)
    if not isinstance(optimizer, Optimizer):
        optimizer.add_param_group = _refuse_group
        if isinstance(inner, Optimizer) and not hasattr(optimizer, "defaults"):
            optimizer.defaults = inner.defaults


def let_go(optimizer: Any) -> None:
    """Undo `tell_window`."""
    optimizer.__class__ = type(optimizer).__base__
    del optimizer.accelight_window


@functools.cache
def _telling_class(base: type, has_modes: bool) -> type:
    """Return a class of optimizers whose ``zero_grad()`` drops the window; ``train()`` and ``eval()`` reach the model.

    A method of the instance would not do: Lightning's own optimizers derive from the class, and call its methods.
    """

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        self.accelight_window.zero_grad(*args, **kwargs)

    def train(self: Any) -> None:
        self.accelight_window.set_mode("train")

    def evaluate(self: Any) -> None:
        self.accelight_window.set_mode("eval")

    modes = {"train": train, "eval": evaluate} if has_modes else {}
    return type(base.__name__, (base,), {"zero_grad": zero_grad, **modes, "__module__": base.__module__})


def _refuse_group(param_group: Any) -> None:
    raise RuntimeError(
        "DeepSpeed's optimizer takes no parameter group after fit() has begun (add_param_group, BaseFinetuning). Give "
        "the optimizer every parameter at once and freeze those in on_train_start() that train later, or unfreeze "
        "them between two calls of fit(), or use stage 0 in fp32."
    )
