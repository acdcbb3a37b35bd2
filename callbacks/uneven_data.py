"""Ending an epoch on all processes when the data of one of them ends."""

from __future__ import annotations

import math
from typing import Any

from ..state import PartialState, check_triggers, gather_object, set_trigger, triggered_by
from ..strategies.upstream.lightning import Trainer, _DataLoaderIterDataFetcher

_EXHAUSTED = "accelight/data exhausted"
_EMPTY = "accelight/data empty"


class EpochEnd:
    """Lets the process with the least data decide how long an epoch is.

    Loaders that know their length are compared once. Others are asked at each batch, whether it is their last one:
    before the batch is used, so that its gradients are reduced and stepped with on all processes alike.
    """

    def __init__(self) -> None:
        self._agreed_loader: Any = None
        self._ask_each_batch = False

    def start(self, trainer: Trainer) -> None:
        """Agree on lengths, where the loaders are new.

        Raises:
            NotImplementedError: With ``training_step(dataloader_iter)``, where nobody knows which batch is the last.
        """
        loop: Any = trainer.fit_loop
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise NotImplementedError(
                "end_epoch_when_exhausted=True is not possible with training_step(dataloader_iter): the last batch is "
                "known too late. Use training_step(batch)."
            )
        if loop._combined_loader is self._agreed_loader:
            return
        self._agreed_loader = loop._combined_loader
        lengths: list[Any] = gather_object([(trainer.num_training_batches, trainer.val_check_batch)])
        self._ask_each_batch = PartialState().num_processes > 1 and any(math.isinf(num) for num, _ in lengths)
        if not self._ask_each_batch:
            loop.max_batches = min(num for num, _ in lengths)
            if trainer.val_check_batch is not None:
                trainer.val_check_batch = min(interval for _, interval in lengths)

    def before_batch(self, trainer: Trainer) -> None:
        """Make this batch the epoch's last one if it is the last one of any process.

        Raises:
            RuntimeError: If a process has had no batch at all.
        """
        if not self._ask_each_batch:
            return
        loop = trainer.fit_loop.epoch_loop
        if loop._num_ready_batches_reached():
            set_trigger(_EXHAUSTED)
        if self._ask()[_EXHAUSTED]:
            loop.batch_progress.is_last_batch = True

    def after_epoch(self, trainer: Trainer) -> None:
        """Tell the others, who wait in `before_batch`, that there was no batch here."""
        if self._ask_each_batch and trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            set_trigger(_EMPTY)
            self._ask()

    @staticmethod
    def _ask() -> dict[str, bool]:
        found = check_triggers(names=[_EXHAUSTED, _EMPTY])
        if found[_EMPTY]:
            raise RuntimeError(
                f"The training data of process {', '.join(map(str, triggered_by(_EMPTY)))} had no batch in this epoch. "
                "Each process needs at least one: give it data, or start fewer processes."
            )
        return found
