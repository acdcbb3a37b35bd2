"""State of a resume besides weights: the positions of stateful data loaders, and random generators, of each process.

Lightning 2.6 saves process 0's states and gives them to all processes; reads loaders without a length one batch ahead,
which the states count then; loads no states into loaders that were set up before the checkpoint was read; takes the
state of a loader at an epoch's end for a place in the next one; and lets samplers draw their order before they know the
epoch. Each of these leaves samples out of training, or repeats them.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ..upstream.lightning import (
    DistributedSamplerWrapper,
    Trainer,
    _set_sampler_epoch,
    _update_dataloader,
    pl_worker_init_function,
)
from ..upstream.patches import Patches

LOADERS_KEY = "accelight_loader_states"
"""A checkpoint's key for the states of each process's loaders, in rank order."""
_LIGHTNINGS_KEY = "combined_loader"
_TORCHDATA = "torchdata.stateful_dataloader"


class DataLoaderStates:
    """Follows the training loaders of one fit after the other."""

    def __init__(self) -> None:
        self._saved: list[list[Any]] | None = None
        self._states: list[Any] = []
        """The states that this process's loaders load."""
        self._num_others = 0
        """The number of processes that saved, if it is another one."""
        self._before_fetch: list[Any] = []
        """The loaders' states before the last batch was read."""
        self._patches = Patches("trainer")
        self.group_size = 1
        """Processes that see the same batches; they have consecutive ranks."""

    def _num_parts(self) -> int:
        return dist.get_world_size() // self.group_size

    # ------------------------------------------------------------------ saving
    def attach(self, trainer: Trainer) -> None:
        """Begin a fit, whose data is set up: loaders go to where the checkpoint says.

        Args:
            trainer: Its callbacks have seen the start of training; no epoch has begun.

        Raises:
            ValueError: If another number of processes has saved, and a loader's place means nothing for this one.
        """
        loop: Any = trainer.fit_loop
        self._patches.remove()
        self.take(trainer)
        self._check_number(loop)
        if self._states:
            _seek(loop, self._states)
        else:
            _redraw_order(loop)
        self._states, self._before_fetch = [], []
        if any(isinstance(one, Stateful) for one in loop._combined_loader.flattened):
            self._patches.put(loop.epoch_loop, "_on_before_fetch", partial(self._note, loop))

    def detach(self) -> None:
        """End the fit."""
        self._patches.remove()
        self._before_fetch = []

    def _note(self, loop: Any) -> None:
        type(loop.epoch_loop)._on_before_fetch(loop.epoch_loop)
        if _reads_ahead(loop):
            self._before_fetch = copy.deepcopy(loop._combined_loader._state_dicts())

    def own(self, trainer: Trainer | None, checkpoint: MutableMapping[str, Any]) -> list[Any]:
        """Return the states of this process's loaders, empty where none has one.

        Args:
            trainer: That saves.
            checkpoint: Its checkpoint, which gets the same states in Lightning's place.
        """
        loops = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if _LIGHTNINGS_KEY not in loops:
            return []
        loop: Any = None if trainer is None else trainer.fit_loop
        if loop is not None and self._before_fetch and getattr(loop._data_fetcher, "batches", None):
            loops[_LIGHTNINGS_KEY] = self._before_fetch
        found: list[Any] = loops[_LIGHTNINGS_KEY]
        return found

    # ------------------------------------------------------------------ loading
    def load(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Take all processes' states out of a checkpoint; Lightning's place keeps process 0's until `take`."""
        self._saved, self._states, self._num_others = checkpoint.pop(LOADERS_KEY, None), [], 0

    def take(self, trainer: Trainer) -> None:
        """Take the states that Lightning is about to load: `attach` loads those of this process.

        Args:
            trainer: Callbacks have changed of the checkpoint what they change.
        """
        loop: Any = trainer.fit_loop
        theirs, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
        if not theirs:
            return
        saved, self._saved = self._saved, None
        if saved is None:  # by a strategy of Lightning's
            self._states = theirs
        elif len(saved) == self._num_parts():
            self._states = saved[dist.get_rank() // self.group_size]
        else:
            self._num_others = len(saved)

    def _check_number(self, loop: Any) -> None:
        """Check that loaders may begin anew, if another number of processes has saved where they were."""
        saved, self._num_others, now = self._num_others, 0, self._num_parts()
        # Elsewhere Lightning compares counts of batches.
        within = loop.restarting and not loop.restarted_on_epoch_end
        if not saved or (not within and _begin_anew(loop)):
            return
        instead = "from a checkpoint of on_train_epoch_end" if within else "use a loader over a map-style dataset"
        raise ValueError(
            f"The checkpoint was saved {'before' if within else 'at'} the end of an epoch, and holds the positions "
            f"of the training loaders of {saved} processes; {now} {'resumes' if now == 1 else 'resume'}. Resume on "
            f"{saved}, or {instead}, or train with ElasticTraining, which counts samples over all processes."
        )


def _seek(loop: Any, states: list[Any]) -> None:
    """Begin to read where ``states`` say, or the next epoch.

    torchdata's samplers draw an epoch's order when the loader is iterated over, and not with its first batch.
    """
    at_end, loaders = is_at_end(loop), loop._combined_loader.flattened
    epochs = loop.epoch_progress.current
    for loader in loaders:
        _set_sampler_epoch(loader, epochs.ready if at_end else epochs.processed)
    if not (at_end and _begin_anew(loop)):
        loop._combined_loader._load_state_dicts(states)
        for loader in loaders if at_end else []:
            if _is_torchdatas(loader):
                iter(loader)  # its data knows its place then; the epoch itself begins with another iterator
    ends_first = at_end and loop.restarted_mid_epoch and not loop.epoch_loop.restarted_on_train_batch_end
    if not ends_first:  # else Lightning ends that epoch, and iterates over the loaders for the next one
        iter(loop._data_fetcher)


def set_epoch(loader: object, trainer: Trainer) -> None:
    """Tell a training loader's sampler which epoch comes first, before its workers draw the order.

    Lightning 2.6 does so when they have begun to read.

    Args:
        loader: As the Trainer is about to iterate it.
        trainer: Its loops are restored, but have not begun.
    """
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.current
    at_end = loop.epoch_loop.batch_progress.is_last_batch
    _set_sampler_epoch(loader, epochs.started if at_end else epochs.processed)


def _redraw_order(loop: Any) -> None:
    """Restart workers that have drawn the order of another epoch, as before the checkpoint was read."""
    epoch = loop.epoch_progress.current.processed
    late = [
        loader
        for loader in loop._combined_loader.flattened
        if getattr(loader, "num_workers", 0)
        and isinstance(sampler := getattr(loader, "sampler", None), DistributedSampler)
        and sampler.epoch != epoch
    ]
    for loader in late:
        _set_sampler_epoch(loader, epoch)
    if late:
        iter(loop._data_fetcher)


def is_at_end(loop: Any) -> bool:
    """Return whether the checkpoint is of an epoch's end, or of the next one's begin.

    An epoch may end before its last batch; Lightning does not continue it then.
    """
    return not loop.restarting or bool(loop.epoch_loop.batch_progress.is_last_batch)


def _begin_anew(loop: Any) -> bool:
    """Return whether each epoch of the loaders begins at their data's begin, so that they have no place to go to."""
    stateful = [loader for loader in loop._combined_loader.flattened if isinstance(loader, Stateful)]
    return all(
        _is_torchdatas(loader) and not isinstance(getattr(loader, "dataset", None), (IterableDataset, Stateful))
        for loader in stateful
    )


def _is_torchdatas(loader: object) -> bool:
    return any(one.__module__.startswith(_TORCHDATA) for one in type(loader).__mro__)


def keep(states: list[list[Any]], checkpoint: MutableMapping[str, Any], group_size: int = 1) -> None:
    """Put the states of loaders into a checkpoint, if there are any.

    Args:
        states: Of each process, in rank order.
        checkpoint: Gets one of each group.
        group_size: Processes that see the same batches.
    """
    if any(states):
        checkpoint[LOADERS_KEY] = states[::group_size]


def _reads_ahead(loop: Any) -> bool:
    fetcher = loop._data_fetcher
    return fetcher is not None and fetcher.length is None and bool(getattr(fetcher, "prefetch_batches", 0))


def with_shared_order(loader: object, kwargs: dict[str, Any]) -> object:
    """Return a shuffling `StatefulDataLoader` whose processes deal one order of samples among them.

    Lightning 2.6 does not take torchdata's sampler for one that shuffles: each process would draw an order of its own,
    and another one after a resume.

    Args:
        loader: A training loader as Lightning has prepared it.
        kwargs: How samples are dealt, for `DistributedSampler`.
    """
    if not isinstance(loader, DataLoader) or not _is_torchdatas(loader):
        return loader
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if not isinstance(sampler, DistributedSamplerWrapper):
        return loader
    order: Any = sampler.dataset
    drawn = order._sampler
    if type(drawn).__name__ != "RandomSampler" or drawn.replacement or len(drawn) != len(loader.dataset):  # type: ignore[arg-type]
        return loader
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    shared: Any = DistributedSampler(loader.dataset, shuffle=True, seed=seed, **kwargs)
    return _update_dataloader(loader, shared)


def seed_workers(loader: object, rank: int, patches: Patches) -> None:
    """Seed a loader's workers by ``rank`` after ``seed_everything(workers=True)``: Lightning 2.6 takes the global rank.

    Args:
        loader: As the Trainer iterates it.
        rank: Of the processes that see the same batches.
        patches: Remove it.
    """
    if isinstance(loader, DataLoader) and loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        patches.put(loader, "worker_init_fn", partial(pl_worker_init_function, rank=rank))


def dataset_indices(loader: object, batch_idx: int, epoch: int) -> list[int] | None:
    """Return the dataset's indices in one batch of this process, or None where its sampler does not give them.

    Samplers that draw from a generator do not: the generator's state has changed since.

    Args:
        loader: As the Trainer iterates it, from the beginning of the epoch.
        batch_idx: The batch, counted from 0.
        epoch: That the sampler had when it drew its order.
    """
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler: Any = copy.copy(loader.batch_sampler.sampler)
    if type(sampler) is DistributedSampler:
        sampler.set_epoch(epoch)
    elif type(sampler) is not SequentialSampler:
        return None
    size = loader.batch_sampler.batch_size
    return list(itertools.islice(sampler, batch_idx * size, (batch_idx + 1) * size))


def tensors_in(batch: object) -> Iterator[torch.Tensor]:
    """Yield a batch's tensors, wherever they are: in mappings (those of Hugging Face, too), sequences, dataclasses."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    parts: Iterable[object] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif is_dataclass(batch):
        parts = (getattr(batch, one.name) for one in fields(batch))
    for part in parts:
        yield from tensors_in(part)


# ------------------------------------------------------------------------------------------------
# Random states of each process in a checkpoint, so that dropout continues after a resume.


_log = logging.getLogger(__name__)

RANDOM_STATES_KEY = "accelight_random_states"
"""A checkpoint's key for one state of each process, or group that sees the same batches, in rank order."""


def random_state(device: torch.device) -> dict[str, Any]:
    """Return this process's state, of nothing but what ``torch.load(weights_only=True)`` reads."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words), gauss),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:  # who has not imported it draws no numbers from it
        name, words, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.tensor(words.tolist()), *rest)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue this process's random numbers from a `random_state`."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
    if "numpy" in state and "numpy" in sys.modules:
        name, words, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, words.tolist(), *rest))


class ResumedRandomState:
    """Puts a loaded state back at the moment at which uninterrupted training had it.

    What Lightning does between loading and training draws numbers, too: a checkpoint of an epoch's end continues with
    the iterator over the next epoch's data, one from the middle of an epoch with a batch.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None
        self._device = torch.device("cpu")

    def load(self, states: list[dict[str, Any]], device: torch.device, group_size: int = 1) -> None:
        """Take this rank's state out of a checkpoint, unless that was saved on another number of processes.

        Args:
            states: Of each process, or of each group that sees the same batches, in rank order.
            device: Of this process.
            group_size: Processes that see the same batches; they have consecutive ranks.
        """
        self._state, self._device = None, device
        if len(states) == dist.get_world_size() // group_size:
            self._state = states[dist.get_rank() // group_size]
        elif dist.get_rank() == 0:
            _log.warning(
                "The checkpoint holds the random states of %d processes with batches of their own, but %d resume: they "
                "start from new states. The batch counts of the checkpoint are kept; ElasticTraining counts samples.",
                len(states),
                dist.get_world_size() // group_size,
            )

    def before_iterating(self) -> None:
        """Put the state back before training's data is iterated over."""
        if self._state is not None:
            set_random_state(self._state, self._device)

    def before_batch(self, *, in_epoch: bool) -> None:
        """Put the state back before the first batch, if that is one ``in_epoch`` and not an epoch's first."""
        if self._state is not None and in_epoch:
            set_random_state(self._state, self._device)
        self._state = None
