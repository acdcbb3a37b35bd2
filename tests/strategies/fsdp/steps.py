"""A callback that does something after given steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class AtStep(Callback):
    """Does something after each of some steps."""

    def __init__(self, actions: dict[int, Callable[[Trainer], None]]) -> None:
        self.actions = actions
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.steps.append(trainer.global_step)
        self.actions.get(trainer.global_step, lambda trainer: None)(trainer)
