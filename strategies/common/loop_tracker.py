"""Tells `GradientState` what the Trainer's loops do; strategies, callbacks and user code read it there."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ...state import GradientAccumulationPlugin, GradientState
from ...state.accumulation import ShortWindows
from ..upstream.lightning import Trainer, rank_zero_info, sized_len
from .carried_windows import carried_windows
from .launcher_variables import ACCUMULATION, warn_if_overruled


class LoopTracker:
    """Follows the Trainer batch by batch.

    Args:
        gradient_accumulation: What the user gave the strategy, or None to follow ``accumulate_grad_batches`` alone.
    """

    def __init__(self, gradient_accumulation: GradientAccumulationPlugin | int | None = None) -> None:
        if isinstance(gradient_accumulation, int):
            gradient_accumulation = GradientAccumulationPlugin(num_steps=gradient_accumulation)
        self.plugin = gradient_accumulation or GradientAccumulationPlugin()
        self.window_position = 1
        """Place of the present micro-batch in its window, counted from 1, as the Trainer's progress tells it."""
        self._first_batch: int | None = None
        """The Trainer's total count at the first batch of this fit; a resumed one may begin within a window."""
        self._said_short = False
        self._short_windows: ShortWindows = "full"
        self._changes = ExitStack()
        self._loaders: list[Any] = []
        self._num_training_loaders = 0
        self._evaluated = (-1, 0)
        """Index of the evaluation's present loader, and how many batches it has given. Lightning counts over all."""

    def start_fit(self, trainer: Trainer, *, config: str | None = None) -> None:
        """Make the Trainer and the plugin agree on the number of accumulation steps.

        Where nobody gives one, ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` does; else a warning says that it does not. 1
        of the Trainer, its default, is not given.

        Args:
            trainer: About to fit.
            config: What a config that gives the number is called; the Trainer has it already.

        Raises:
            ValueError: If two give a number and they differ.
        """
        wanted, given = self.plugin.num_steps, trainer.accumulate_grad_batches
        other = where = f"{config}={given}" if config else f"Trainer(accumulate_grad_batches={given})"
        if wanted is not None:
            where = f"gradient_accumulation={wanted}"
        elif given == 1 and config is None:
            GradientState()._set_plugin(self.plugin)
            wanted = GradientState().num_steps  # from the environment
        if wanted is not None and wanted != given:
            if given != 1 or config is not None:
                raise ValueError(f"{where} and {other} differ. Give one of them, or the same number.")
            trainer.accumulate_grad_batches = wanted
        warn_if_overruled(ACCUMULATION, trainer.accumulate_grad_batches, where)
        self._set_num_steps(trainer.accumulate_grad_batches)
        self.window_position, self._first_batch, self._said_short = 1, None, False
        self._short_windows = self.plugin.resolve_short_windows()
        if not self.plugin.sync_with_dataloader:
            self._changes.enter_context(carried_windows(trainer, lambda: self.window_position == 1))

    def _set_num_steps(self, num_steps: int) -> None:
        GradientState()._set_plugin(replace(self.plugin, num_steps=num_steps))

    def note_train_batch(self, trainer: Trainer, *, counted: bool) -> None:
        """Take note of the batch that training is about to use.

        Args:
            trainer: The Trainer, inside its training loop.
            counted: Whether the loop's progress counts this batch as ready already.
        """
        progress, ahead = trainer.fit_loop.epoch_loop.batch_progress, 0 if counted else 1
        batch, total = progress.current.ready + ahead, progress.total.ready + ahead  # from 1: of the epoch, of all
        num_steps = trainer.accumulate_grad_batches
        state = GradientState()
        if state.num_steps != num_steps:  # a GradientAccumulationScheduler changes it from epoch to epoch
            self._set_num_steps(num_steps)
        self._follow(trainer.train_dataloader, above=0)
        self._num_training_loaders = 1
        is_last = progress.is_last_batch or batch == trainer.num_training_batches
        if self._first_batch is None:
            self._first_batch = total
        carried = not self.plugin.sync_with_dataloader
        position = ((total if carried else batch) - 1) % num_steps + 1
        self.window_position = min(position, total - self._first_batch + 1)
        window_ends = position == num_steps or (is_last and not carried)  # Lightning's rule
        self._tell_end(batch, is_last)
        state._set_sync_gradients(window_ends)
        if (
            counted
            and window_ends
            and self.window_position < num_steps
            and trainer.lightning_module.automatic_optimization
        ):
            self._say_short(num_steps)

    def _say_short(self, num_steps: int) -> None:
        if self._said_short:
            return
        self._said_short = True
        divisor, other = (
            (self.window_position, '"full" divides by the full number, as Lightning and Accelerate do')
            if self._short_windows == "mean"
            else (num_steps, '"mean" divides by what the window has')
        )
        rank_zero_info(
            f"An accumulation window ended after {self.window_position} of {num_steps} micro-batches; its gradients "
            f"are divided by {divisor}. GradientAccumulationPlugin(short_windows=...): {other}."
        )

    def note_evaluation_batch(self, trainer: Trainer, dataloader_idx: int) -> None:
        """Take note of the batch that validation, testing or prediction is about to use."""
        loop: Any = trainer._active_loop
        loaders = loop._combined_loader.flattened
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else loop._combined_loader
        self._follow(loader, above=self._num_training_loaders)
        limits = loop.max_batches
        limit = limits[dataloader_idx] if isinstance(limits, list) and dataloader_idx < len(limits) else math.inf
        previous, batch = self._evaluated
        batch = batch + 1 if previous == dataloader_idx else 1
        self._evaluated = dataloader_idx, batch
        self._tell_end(batch, loop.batch_progress.is_last_batch or batch == limit)

    def _tell_end(self, batch: int, is_last: bool) -> None:
        """Say whether the loop uses no other batch than this; a limit may end it before the loader's padding."""
        loader = self._loaders[-1]
        length = sized_len(loader) if is_last else None
        cut_short = length is not None and batch < length
        GradientState()._set_end_of_dataloader(loader, is_last, cut_short=cut_short)

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
        self._evaluated = (-1, 0)
        while len(self._loaders) > self._num_training_loaders:
            self._close_last()

    def close(self) -> None:
        """Forget every loader; outside of loops gradients are always synchronised."""
        self._num_training_loaders = 0
        self.end_evaluation()
        GradientState()._set_sync_gradients(True)
        self._changes.close()

    @property
    def short_window_factor(self) -> float:
        """What the present window's gradients have to be multiplied by when it ends; 1 unless it is short.

        Lightning divides each loss by the full number of steps before it can know that the window will be cut short
        (Lightning-AI/pytorch-lightning#19987).
        """
        return GradientState().num_steps / self.window_position if self._short_windows == "mean" else 1.0
