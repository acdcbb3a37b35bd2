"""The random generators of each process in a checkpoint, so that dropout goes on after a resume as it would have."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import torch
import torch.distributed as dist

_log = logging.getLogger(__name__)

CHECKPOINT_KEY = "accelight_random_states"
"""Where a checkpoint holds one state for each process, in rank order."""


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


def _restore(state: dict[str, Any], device: torch.device) -> None:
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

    What Lightning does between loading and training draws numbers, too: a checkpoint of an epoch's end goes on with
    the iterator over the next epoch's data, one from the middle of an epoch with a batch.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None
        self._device = torch.device("cpu")

    def load(self, states: list[dict[str, Any]], device: torch.device) -> None:
        """Take this rank's state out of a checkpoint, unless that was saved on another number of processes."""
        self._state, self._device = None, device
        if len(states) == dist.get_world_size():
            self._state = states[dist.get_rank()]
        elif dist.get_rank() == 0:
            _log.warning(
                "The checkpoint holds the random states of %d processes, %d resume: they start from new ones. Its "
                "counts of batches stay; ElasticTraining counts samples.",
                len(states),
                dist.get_world_size(),
            )

    def before_iterating(self) -> None:
        """Put the state back before training's data is iterated over."""
        if self._state is not None:
            _restore(self._state, self._device)

    def before_batch(self, *, in_epoch: bool) -> None:
        """Put the state back before the first batch, if that is one ``in_epoch`` and not an epoch's first."""
        if self._state is not None and in_epoch:
            _restore(self._state, self._device)
        self._state = None
