"""Optimizer steps that a gradient scaler leaves out, and the schedules that must not run ahead of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from ..upstream.lightning import LightningModule, LRSchedulerConfig

_HOOK = "lr_scheduler_step"


class SkippedSteps:
    """Knows whether the last optimizer step was skipped, and holds schedulers back then."""

    def __init__(self) -> None:
        self.last: bool = False
        """Whether the last step was left out for gradients that overflowed."""

    @contextmanager
    def watch(self, optimizer: Optimizer) -> Iterator[None]:
        """Find out whether ``optimizer`` really steps inside this context."""
        stepped: list[bool] = []
        handle = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            yield
        finally:
            handle.remove()
        self.last = not stepped

    def hold_back(self, module: LightningModule, configs: Sequence[LRSchedulerConfig]) -> None:
        """Let schedulers that count steps stand still at a skipped one.

        Source: accelerate 1.15 ``scheduler.py`` (``AcceleratedScheduler``).
        """
        self.let_go(module)
        by_step = {id(config.scheduler) for config in configs if config.interval == "step"}
        advance = module.lr_scheduler_step

        def advance_if_stepped(scheduler: Any, metric: Any) -> None:
            if not (self.last and id(scheduler) in by_step):
                advance(scheduler, metric)

        # On the instance: the Trainer looks the hook up there, and the class is the user's.
        module.__dict__[_HOOK] = advance_if_stepped

    @staticmethod
    def let_go(module: LightningModule) -> None:
        """Undo `hold_back`."""
        module.__dict__.pop(_HOOK, None)
