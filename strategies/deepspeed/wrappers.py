"""Wrappers that let a conventional training loop drive a DeepSpeed engine, its optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from .zero_optimizer import switch_mode


class DeepSpeedEngineWrapper:
    """Lets the caller, not DeepSpeed's own counter, say where a window of micro-batches ends.

    Args:
        engine: What ``deepspeed.initialize`` returned.

    Source: accelerate 1.15 ``utils/deepspeed.py``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run backward and, at the end of a window, everything of a step: clip, optimizer, zero, schedule.

        Args:
            loss: The micro-batch's loss. DeepSpeed divides it by the config's ``gradient_accumulation_steps``.
            sync_gradients: Whether the window ends here.
            **kwargs: For ``engine.backward``, for example ``retain_graph`` or ``scale_wrt_gas``.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the gradients' norm over all ranks at the last step, before clipping.

        None before the first step, and where DeepSpeed does not compute it (stage 0 in fp32).
        """
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm


class DeepSpeedOptimizerWrapper(Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` do nothing: `DeepSpeedEngineWrapper.backward` has done both.

    Args:
        optimizer: DeepSpeed's optimizer, as ``deepspeed.initialize`` returned it.

    Source: accelerate 1.15 ``utils/deepspeed.py``, ``optimizer.py``.
    """

    def __init__(self, optimizer: Any) -> None:  # no super().__init__: the parameters are the inner optimizer's
        self.optimizer = optimizer

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults, as far as it has any."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        return getattr(inner, "defaults", {})

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the engine has stepped.

        Raises:
            ValueError: If there is a closure, which nobody would call.
        """
        if closure is not None:
            raise ValueError(
                "DeepSpeed does not accept a closure: run backward through DeepSpeedEngineWrapper.backward."
            )

    @override
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine has zeroed the gradients after its step."""

    def train(self) -> None:
        """Let the user's optimizer go to training mode, where it has modes (schedule-free ones do)."""
        self._switch("train")

    def eval(self) -> None:
        """Let the user's optimizer go to evaluation mode, where it has modes."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        inner = getattr(self.optimizer, "optimizer", None)
        if callable(switch := getattr(self.optimizer, mode, None)):
            switch()
        elif callable(getattr(inner, mode, None)):
            switch_mode(self.optimizer, mode)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Hand the group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state on this rank."""
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand this rank's state to the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.optimizer).__name__})"


class DeepSpeedSchedulerWrapper:
    """A schedule whose ``step`` does nothing: the engine has advanced it, unless it skipped the step.

    Everything else is the inner schedule's.

    Args:
        scheduler: The engine's schedule, as ``deepspeed.initialize`` returned it.
        optimizers: The optimizer or optimizers that it drives.

    Source: accelerate 1.15 ``utils/deepspeed.py``, ``scheduler.py``.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has advanced the schedule."""

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while unpickling, before there is one
            raise AttributeError(name)
        return getattr(self.scheduler, name)
