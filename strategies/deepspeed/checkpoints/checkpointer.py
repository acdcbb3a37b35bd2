"""What the strategy has for saving and loading what its engine trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ....state.same_call import meet
from ...common import loader_places
from ...common.held_weights import STORED_WEIGHTS
from ...common.loader_places import LoaderPlaces
from ...common.own_folders import writes_own_folders
from ...common.plain_modules import plain_modules
from ...common.random_states import CHECKPOINT_KEY, ResumedRandomState, random_state
from ...common.storage_paths import local_path
from ...common.store_messages import store_messages
from ...upstream.lightning import LightningModule, RunningStage, TrainerFn
from ..config.plugin import DeepSpeedPlugin
from ..config.settings import DeepSpeedSettings
from . import engine_checkpoints
from .full_checkpoints import is_full, load_full, read_full
from .plain_modules import TRACES

_WHAT = "sharded checkpoints"


class Saved(Protocol):
    """What a checkpointer asks of the strategy that has it."""

    load_universal: bool
    weights_only: bool
    exclude_frozen_parameters: bool

    @property
    def deepspeed_engine(self) -> Any:
        """DeepSpeed's engine."""

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin:
        """The plugin that trains the Trainer's module."""

    @property
    def settings(self) -> DeepSpeedSettings:
        """Of the engine."""

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes."""

    @property
    def loader_places(self) -> LoaderPlaces:
        """Of the running fit."""

    @property
    def lightning_module(self) -> LightningModule | None:
        """Connected to the Trainer, or None."""

    def broadcast(self, obj: str, src: int = 0) -> str:
        """Return what the rank ``src`` has."""


class Checkpointer:
    """Saves and loads the engine of a strategy; every rank must call it.

    Args:
        strategy: Whose engine.
    """

    def __init__(self, strategy: Saved) -> None:
        self._strategy = strategy
        self._random_state = ResumedRandomState()

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        """Write one folder.

        Args:
            checkpoint: The Trainer's; the engine itself knows the weights and the optimizer's state.
            path: The folder, on a file system.
            storage_options: Must be None.

        Raises:
            TypeError: If there are storage options.
            ValueError: If the path is a URL, the checkpoint has a key that DeepSpeed uses itself, or a module in it
                has parameters that ZeRO-3 has partitioned.
        """
        if storage_options is not None:
            raise TypeError("storage_options is for a CheckpointIO, which DeepSpeed does not use. Leave it out.")
        engine = self._strategy.deepspeed_engine  # else an error: before the setup there may be no process group
        meet("trainer.save_checkpoint")  # alone, a rank would hang in the collectives that follow
        places, module = self._strategy.loader_places, self._strategy.lightning_module
        own = places.own(None if module is None else module._trainer, checkpoint)
        random = random_state(self._strategy.root_device)
        of_all: list[Any] = [None] * dist.get_world_size()  # rank 0's file has them; stage 3 writes one for each rank
        of_all[dist.get_rank()] = random

        def on_rank_zero(told: list[tuple[Any, Any]]) -> tuple[str, list[Any]]:
            of_all[:] = [each for each, _ in told]
            return str(path), [places for _, places in told]

        common, states = store_messages().through_rank_zero((random, own), on_rank_zero, f"saving {path}")
        if "optimizer_states" in checkpoint:  # not one of weights alone
            checkpoint[CHECKPOINT_KEY] = of_all
        loader_places.keep(states, checkpoint)
        folder = local_path(str(path) if writes_own_folders() else common, _WHAT)
        state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        plugin = self._strategy.deepspeed_plugin
        write_16bit = self._strategy.settings.zero_stage == 3 and bool(plugin.zero3_save_16bit_model)
        with plain_modules(state, TRACES):
            engine_checkpoints.save(
                engine,
                folder,
                state,
                write_16bit=write_16bit,
                exclude_frozen=self._strategy.exclude_frozen_parameters,
            )

    def read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Return the Trainer's checkpoint; what the engine takes of it is loaded later.

        Args:
            path: The folder, or the file of a full checkpoint.
            weights_only: Whether it may hold tensors and plain values only; None takes the strategy's.

        Raises:
            RuntimeError: If no module is connected.
        """
        module = self._strategy.lightning_module
        if module is None:
            raise RuntimeError("load_checkpoint() is called by the Trainer, with a module connected.")
        place = local_path(self._strategy.broadcast(str(path)), _WHAT)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        weights_only = self._strategy.weights_only if weights_only is None else weights_only
        if is_full(place):
            checkpoint = read_full(place, weights_only=weights_only, fitting=fitting)
        else:
            checkpoint = engine_checkpoints.read(
                place,
                with_optimizer=fitting,
                stage=int(self._strategy.deepspeed_plugin.zero_stage or 0),
                any_number=self._strategy.load_universal,
                weights_only=weights_only,
            )
        self._strategy.loader_places.load(checkpoint)
        random_states = checkpoint.pop(CHECKPOINT_KEY, None)
        if fitting and random_states:
            self._random_state.load(random_states, self._strategy.root_device)
        return checkpoint

    def before_iterating(self) -> None:
        """Restore random states where an epoch of training begins."""
        module = self._strategy.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.state.stage == RunningStage.TRAINING:
            self._random_state.before_iterating()

    def before_batch(self, batch_idx: int) -> None:
        """Restore random states before a batch of training."""
        self._random_state.before_batch(in_epoch=batch_idx > 0)

    def load(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load what `read` has returned into the engine, with the optimizer's state when fitting.

        Args:
            checkpoint: The Trainer's.
            strict: Whether every weight has to be there, and no other.
        """
        if STORED_WEIGHTS not in checkpoint:
            load_full(self._strategy.deepspeed_engine, checkpoint["state_dict"], strict=strict)
            return
        engine_checkpoints.load(
            self._strategy.deepspeed_engine,
            checkpoint[STORED_WEIGHTS],
            strict=strict,
            load_universal=self._strategy.load_universal,
        )
