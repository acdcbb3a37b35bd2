"""Going on within an epoch: data that was used before the stop is not used again."""

from __future__ import annotations

from typing import Any

from ..strategies.upstream.lightning import (
    Trainer,
    _DataLoaderIterDataFetcher,
    _set_sampler_epoch,
    _Stateful,
    rank_zero_info,
    rank_zero_warn,
)
from .elastic_batches import GlobalBatches


def _knows_its_place(loader: Any) -> bool:
    """Return whether `ElasticTraining` deals the loader's samples, and has left out those that were used."""
    return isinstance(getattr(loader, "batch_sampler", None), GlobalBatches)


def skip_used_batches(trainer: Trainer) -> None:
    """Move the training loaders to where the checkpoint's epoch was left; call when training starts.

    Lightning 2.6 counts on from there, but begins with the loader's first batch, unless the loader has ``state_dict``
    and ``load_state_dict``. Those are left to Lightning.

    Raises:
        RuntimeError: If the data ends before that place.

    Source of the semantics: accelerate 1.15 ``data_loader.py`` (``skip_first_batches``).
    """
    loop: Any = trainer.fit_loop
    num_used = loop.epoch_loop.batch_progress.current.processed
    if not 0 < num_used < trainer.num_training_batches:  # at an epoch's end Lightning begins the next one
        return
    loaders = loop._combined_loader.flattened
    if all(isinstance(loader, _Stateful) or _knows_its_place(loader) for loader in loaders):
        return
    fetcher = loop._data_fetcher
    if isinstance(fetcher, _DataLoaderIterDataFetcher) or any(isinstance(loader, _Stateful) for loader in loaders):
        rank_zero_warn(
            f"The first {num_used} batches of this epoch have been used before the stop, and are used again: they "
            "cannot be skipped with training_step(dataloader_iter), nor where some loaders have a state_dict. Give all "
            "loaders a state_dict and load_state_dict."
        )
        return
    for loader in loaders:
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    iter(fetcher)  # again: its first order was drawn before the sampler knew the epoch
    for number in range(num_used):
        try:
            next(fetcher)
        except StopIteration:
            raise RuntimeError(
                f"The checkpoint was saved after batch {num_used} of its epoch, but the data ends after {number}. "
                "Resume with the same data and batch size, or from the checkpoint of an epoch's end."
            ) from None
    fetcher.fetched -= num_used  # the loop adds them once more
    rank_zero_info(f"Skipped the {num_used} batches of this epoch that were used before the stop.")
