"""Tells `GradientState` what the Trainer's loops do; strategies, callbacks and user code read it there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer

from ..state import GradientAccumulationPlugin, GradientState


class LoopTracker:
    """Follows the Trainer batch by batch.

    Args:
        gradient_accumulation: What the user gave the strategy, or None to follow ``accumulate_grad_batches`` alone.

    Raises:
        NotImplementedError: If a window is to go on over the end of an epoch.
    """

    def __init__(self, gradient_accumulation: GradientAccumulationPlugin | int | None = None) -> None:
        if isinstance(gradient_accumulation, int):
            gradient_accumulation = GradientAccumulationPlugin(num_steps=gradient_accumulation)
        self.plugin = gradient_accumulation or GradientAccumulationPlugin()
        if not self.plugin.sync_with_dataloader:
            raise NotImplementedError(
                "sync_with_dataloader=False is not possible under the Trainer yet: a window ends with its epoch. "
                "Leave it out, or use GradientState().accumulate() in a loop of your own."
            )
        self.micro_batches = 1
        """Micro-batches in the present window, the present one included."""
        self._loaders: list[Any] = []
        self._num_training_loaders = 0

    def start_fit(self, trainer: Trainer) -> None:
        """Make the Trainer and the plugin agree on the number of accumulation steps.

        Where neither gives one, ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` does.

        Raises:
            ValueError: If both give a number and they differ.
        """
        wanted, given = self.plugin.num_steps, trainer.accumulate_grad_batches
        if wanted is None and given == 1:
            GradientState()._set_plugin(self.plugin)
            wanted = GradientState().num_steps  # from the environment
        if wanted is not None and wanted != given:
            if given != 1:
                raise ValueError(
                    f"gradient_accumulation={wanted} and Trainer(accumulate_grad_batches={given}) differ. "
                    "Give one of them, or the same number."
                )
            trainer.accumulate_grad_batches = wanted
        self._set_num_steps(trainer.accumulate_grad_batches)

    def _set_num_steps(self, num_steps: int) -> None:
        GradientState()._set_plugin(replace(self.plugin, num_steps=num_steps))

    def note_train_batch(self, trainer: Trainer, *, counted: bool) -> None:
        """Take note of the batch that training is about to use.

        Args:
            trainer: The Trainer, inside its training loop.
            counted: Whether the loop's progress counts this batch as ready already.
        """
        progress = trainer.fit_loop.epoch_loop.batch_progress
        batch = progress.current.ready + (0 if counted else 1)  # counted from 1 within the epoch
        num_steps = trainer.accumulate_grad_batches
        state = GradientState()
        if state.num_steps != num_steps:  # a GradientAccumulationScheduler changes it from epoch to epoch
            self._set_num_steps(num_steps)
        self._follow(trainer.train_dataloader, above=0)
        self._num_training_loaders = 1
        is_last = progress.is_last_batch or batch == trainer.num_training_batches
        self.micro_batches = (batch - 1) % num_steps + 1
        state._set_end_of_dataloader(self._loaders[-1], is_last)
        state._set_sync_gradients(self.micro_batches == num_steps or is_last)

    def note_evaluation_batch(self, trainer: Trainer, dataloader_idx: int) -> None:
        """Take note of the batch that validation, testing or prediction is about to use."""
        loop: Any = trainer._active_loop
        loaders = loop._combined_loader.flattened
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else loop._combined_loader
        self._follow(loader, above=self._num_training_loaders)
        limits = loop.max_batches
        limit = limits[dataloader_idx] if isinstance(limits, list) and dataloader_idx < len(limits) else math.inf
        is_last = loop.batch_progress.is_last_batch or loop.batch_progress.current.ready + 1 == limit
        GradientState()._set_end_of_dataloader(self._loaders[-1], is_last)

    def _follow(self, loader: Any, *, above: int) -> None:
        """Make ``loader`` the active one; the lowest ``above`` of the stack stay open under it."""
        while len(self._loaders) > above and self._loaders[-1] is not loader:
            self._close_last()
        if len(self._loaders) == above:
            self._loaders.append(loader)
            GradientState()._add_dataloader(loader)

    def _close_last(self) -> None:
        GradientState()._remove_dataloader(self._loaders.pop())

    def end_evaluation(self) -> None:
        """Forget the evaluation's loaders; a training loop that it interrupted goes on."""
        while len(self._loaders) > self._num_training_loaders:
            self._close_last()

    def close(self) -> None:
        """Forget every loader; outside of loops gradients are always synchronised."""
        self._num_training_loaders = 0
        self.end_evaluation()
        GradientState()._set_sync_gradients(True)

    @property
    def short_window_factor(self) -> float:
        """What gradients of a last, shorter window have to be multiplied by.

        Lightning divides each loss by the full number of steps before it can know that the window will be cut short
        (Lightning-AI/pytorch-lightning#19987).
        """
        return float(GradientState().num_steps) / self.micro_batches
