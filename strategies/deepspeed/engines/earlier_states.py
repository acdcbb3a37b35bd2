"""The state that an optimizer has when an engine takes it: of an earlier fit, of plain steps, or from its making.

ZeRO lets the optimizer step on flat tensors. What it has for the parameters themselves would be left behind, and what
it has for the flat tensors of one engine means nothing to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adagrad, Optimizer

from .partial_steps import State
from .window import Window, window_of


@contextmanager
def keeping_adagrad(optimizer: Any) -> Iterator[None]:
    """Let DeepSpeed make an engine in this context without another Adagrad in the place of the user's.

    It would make one for the state on flat tensors, without the groups, their options and their schedule.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Adagrad):
        yield
        return
    optimizer.__class__ = type(kind.__name__, (Optimizer,), {})
    try:
        yield
    finally:
        optimizer.__class__ = kind


def drive_adagrad(engine: Any) -> None:
    """Let schedules that were made for the config's Adagrad drive the one that DeepSpeed has put in its place."""
    stepping, made = getattr(engine.optimizer, "optimizer", None), engine.basic_optimizer
    if isinstance(stepping, Adagrad) and isinstance(made, Adagrad) and stepping is not made:
        stepping.param_groups = made.param_groups


class EarlierStates:
    """Carries the state of the user's optimizer from engine to engine."""

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None
        self._groups: list[list[nn.Parameter]] = []
        self._whole: dict[nn.Parameter, State] = {}
        self._of_engines: dict[Optimizer, tuple[list[list[nn.Parameter]], Any]] = {}
        self._parts: dict[nn.Parameter, tuple[int, State, State]] | None = {}

    def keep(self, engine: Any) -> None:
        """Note what is in the optimizer of an engine that is about to end: this rank's part."""
        window = window_of(engine)
        if window is None or window.given is None or window.is_plain:
            return
        optimizer, groups = window.given
        parts = None
        if window.steps is not None and not getattr(engine.optimizer, "swap_optimizer", False):
            parts = {piece.parameter: (piece.start, spread, own) for piece, spread, own in window.steps.states()}
        self._of_engines[optimizer] = groups, parts

    def take(self, optimizer: Optimizer | None) -> None:
        """Take the state out of the optimizer that the next engine gets, which has the module's parameters then.

        Raises:
            ValueError: If an earlier engine had it, whose state cannot be reached.
        """
        self._optimizer = optimizer
        if optimizer is None:
            return
        if optimizer in self._of_engines:
            groups, self._parts = self._of_engines[optimizer]
            if self._parts is None:
                raise ValueError(
                    f"This {type(optimizer).__name__} has stepped in an earlier fit() with DeepSpeed, whose state "
                    "(on NVMe, or of stage 0 in half precision) cannot be handed on. Make a new optimizer in "
                    "configure_optimizers()."
                )
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = list(parameters)
        else:
            self._whole = {each: state for each, state in optimizer.state.items() if state}  # type: ignore[misc]
        optimizer.state.clear()
        self._groups = [list(group["params"]) for group in optimizer.param_groups]

    def give(self, window: Window) -> None:
        """Give the state to the optimizer of the next engine; every rank must call it.

        Raises:
            ValueError: If that cannot take any.
        """
        if self._optimizer is None:
            return
        window.given = self._optimizer, self._groups
        if window.is_plain:
            for parameter, state in self._full(window.device):
                self._optimizer.state[parameter] = state
        elif window.steps is not None:
            window.steps.take_states(self._full(window.device))
        elif any(True for _ in self._full(window.device)):
            raise ValueError(
                f"This {type(self._optimizer).__name__} has stepped before, and DeepSpeed's stage 0 in half precision "
                "takes no state. Make a new optimizer in configure_optimizers(), or use stage 1."
            )

    def _full(self, device: torch.device) -> Iterator[tuple[nn.Parameter, State]]:
        """Yield each parameter that has state, with all of it, one after the other in one order on all ranks."""
        yield from self._whole.items()
        parameters = [each for group in self._groups for each in group]
        parts = self._parts or {}
        mine = {
            place: ({key: value.dtype for key, value in spread.items()}, counted)
            for place, parameter in enumerate(parameters)
            if parameter in parts
            for _, spread, counted in [parts[parameter]]
        }
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        for place, parameter in enumerate(parameters):
            known = next((each[place] for each in told if place in each), None)
            if known is None or not (known[0] or known[1]):
                continue
            shape = getattr(parameter, "ds_shape", parameter.shape)
            state = dict(known[1])
            for key, dtype in known[0].items():
                full = torch.zeros(shape, dtype=dtype, device=device)
                if parameter in parts:
                    start, spread, _ = parts[parameter]
                    full.view(-1)[start : start + spread[key].numel()] = spread[key].to(device)
                dist.all_reduce(full)
                state[key] = full
            yield parameter, state
