"""The part of the strategy that saves and loads a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ....checkpoint.manifest import Manifest
from ....checkpoint.report import MergeReport
from ....state.same_call import meet
from ...common.agreed_outcome import run_on_rank_zero
from ...common.atomic_folders import remove_folder
from ...common.storage_paths import is_remote, local_path
from ..engines.base import Engine
from ..precision import share_scaler_state
from ..steps.outside_calls import is_inside
from ..units.sharded_root import ShardedForm
from . import local_state
from . import sharded_checkpoints as checkpointing
from .background_saves import BackgroundSaves
from .optimizer_states import optimizer_state
from .random_states import CHECKPOINT_KEY, ResumedRandomState, gather_random_states
from .safetensors_saving import save_safetensors

_Stage = Callable[[dict[str, Any]], dict[str, Any]]
"""Copies a state that training goes on to change; or returns it as it is, where nothing changes."""
_Write = Callable[[dist.ProcessGroup | None], None]
"""Writes a checkpoint, with a group for its collectives."""


class CheckpointingStrategy(FSDPStrategy):
    """Knows the engine and the model it sharded, saves them and loads them; `AccelFSDPStrategy` is the whole."""

    _engine: Engine[Any] | None = None
    _form: ShardedForm | None = None
    _saves: BackgroundSaves | None = None
    """With ``async_save=True``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random_state = ResumedRandomState()

    @property
    def engine(self) -> Engine[Any]:
        """The FSDP1 or FSDP2 engine.

        Raises:
            RuntimeError: Before the processes are connected.
        """
        if self._engine is None:
            raise RuntimeError("The engine exists once the Trainer has connected the processes: in setup() and later.")
        return self._engine

    @property
    def form(self) -> ShardedForm:
        """The sharded model and what sharding hid of it.

        Raises:
            RuntimeError: Before the model is sharded.
        """
        if self._form is None:
            raise RuntimeError("There is no sharded model yet: it exists from the strategy's setup on.")
        return self._form

    @property
    def _full(self) -> bool:
        return self.engine.settings.state_dict_type == "full_state_dict"

    @property
    def _local(self) -> bool:
        return self.engine.settings.state_dict_type == "local_state_dict"

    def _state_dict_module(self) -> nn.Module:
        if is_inside():
            raise RuntimeError(
                "The model cannot be saved or loaded while one of its steps runs: parameters are gathered. Do it in a "
                "hook, such as on_train_batch_end() or on_validation_end()."
            )
        self.engine.reshard(self.form.root)
        return self.engine.state_dict_module(self.form.root)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        meet("trainer.save_checkpoint")  # its first step; alone, a process would hang in the collectives that follow
        if self._local:
            return local_state.local_model_state(self.form)
        whole = self.engine.settings.whole_weights if self._full else None
        return checkpointing.model_state(self._state_dict_module(), whole)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._local:
            return plain.state_dict()
        whole = self.engine.settings.whole_optimizer if self._full else None
        return optimizer_state(self._state_dict_module(), plain, self.form.order, whole)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        path = self.broadcast(str(filepath))
        self.wait_for_saves()
        if "optimizer_states" in checkpoint:  # not one of weights alone
            checkpoint[CHECKPOINT_KEY] = gather_random_states(self.root_device)
        share_scaler_state(checkpoint)
        save, saves = self._full_save if self._full else self._folder_save, self._saves
        if saves is None or not self._is_fitting:  # after the loop there is nothing to go on with
            save(checkpoint, path, storage_options, lambda state: state)(None)
        else:
            saves.start(f"Saving {path}", save(checkpoint, path, storage_options, saves.stage))

    @property
    def _trainer_state(self) -> TrainerState | None:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return None if trainer is None else trainer.state

    @property
    def _is_fitting(self) -> bool:
        state = self._trainer_state
        return state is not None and state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    def _full_save(self, checkpoint: dict[str, Any], path: str, storage_options: Any, stage: _Stage) -> _Write:
        staged = stage(checkpoint)

        def write(where: Path | str) -> None:
            self.checkpoint_io.save_checkpoint(staged, where, storage_options=storage_options)

        if is_remote(path):
            return lambda group: run_on_rank_zero(partial(write, path), f"saving {path}", group)
        file = local_path(path, "checkpoints")
        # Another CheckpointIO than Lightning's own may write later, or elsewhere: what it wrote is not ours to rename.
        beside = type(self.checkpoint_io) is TorchCheckpointIO
        return lambda group: checkpointing.save_full(file, write, group, beside=beside)

    def _folder_save(self, checkpoint: dict[str, Any], path: str, storage_options: Any, stage: _Stage) -> _Write:
        if storage_options is not None:
            raise TypeError(
                "storage_options is for a CheckpointIO, which sharded checkpoints do not use. Leave it out."
            )
        folder = local_path(path, "sharded checkpoints", "save in one file (state_dict_type='full_state_dict')")
        weights, optimizer_states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        if self._local:
            local, metadata = local_state.local_state(weights, optimizer_states), checkpointing.serialised(checkpoint)
            return partial(local_state.save_local, folder, stage(local), metadata)
        key, form = self.engine.model_key, self.form
        state = checkpointing.sharded_state(key, weights, optimizer_states)
        staged, metadata = stage(state), checkpointing.serialised(checkpoint)
        manifest = Manifest(key, form.ties, form.module_attribute)
        return lambda group: checkpointing.save_sharded(folder, staged, metadata, manifest, group)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        remove: Callable[[], None] = partial(super().remove_checkpoint, filepath)
        if self.is_global_zero and Path(filepath).is_dir():
            remove = partial(remove_folder, Path(filepath))
        if self._saves is None:
            remove()
        else:  # the older checkpoint is the only one until the newer one is complete
            self._saves.afterwards(remove)

    def wait_for_saves(self) -> None:
        """Return when no checkpoint is being written any more; all processes must call it.

        With ``async_save=True``, a callback that needs a checkpoint just saved calls this first.

        Raises:
            RuntimeError: If the checkpoint could not be saved; on all processes.
        """
        if self._saves is not None:
            self._saves.wait()

    def save_safetensors(
        self,
        path: _PATH,
        max_shard_size: str | int | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        strip_prefix: str | None = None,
    ) -> MergeReport:
        """Save the weights as safetensors; each process writes its own bytes and none gathers them. All must call it.

        The files are those that ``merge_fsdp_weights`` makes of a sharded checkpoint, and appear when complete.

        Args:
            path: A file ``NAME.safetensors``, or a folder for ``model.safetensors``, which all processes see.
            max_shard_size: Split into files of at most this size (``"5GB"``, bytes), with Hugging Face's index.
            dtype: Convert floating-point tensors (``"bf16"``, ``"float16"``, a ``torch.dtype``).
            strip_prefix: Keep what lies under this attribute of the LightningModule, named as in the inner model;
                ``"auto"`` finds it.

        Raises:
            RuntimeError: On every process, naming the one that failed; or if some processes do not call it.
        """
        meet("strategy.save_safetensors")
        module, file = self._state_dict_module(), local_path(self.broadcast(str(path)), "weights")
        return save_safetensors(
            file,
            checkpointing.model_state(module, None),
            module,
            self.form,
            max_shard_size=max_shard_size,
            dtype=dtype,
            strip_prefix=strip_prefix,
        )

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(str(checkpoint_path))
        module = self.lightning_module
        if module is None:
            raise RuntimeError("load_checkpoint() is called by the Trainer, with a module connected.")
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else []
        checkpoint = self._read_checkpoint(path, optimizers, strict=module.strict_loading, weights_only=weights_only)
        share_scaler_state(checkpoint)
        if fitting and checkpoint.get(CHECKPOINT_KEY):
            self._random_state.load(checkpoint[CHECKPOINT_KEY], self.root_device)
        return checkpoint

    def _read_checkpoint(
        self, path: str, optimizers: Sequence[Optimizer], *, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load weights and optimizer states, and return the rest."""
        module, order = self._state_dict_module(), self.form.order
        if is_remote(path):
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            return checkpointing.load_full(checkpoint, path, module, optimizers, order, strict=strict)
        place = local_path(path, "checkpoints")
        if local_state.is_local(place):
            if self.engine.version != 1:
                raise ValueError(f"{place} holds a local_state_dict of FSDP1. Load it with fsdp_version=1.")
            return local_state.load_local(place, self.form, optimizers, weights_only=weights_only)
        if checkpointing.is_sharded(place):
            return checkpointing.load_sharded(place, module, optimizers, strict=strict, weights_only=weights_only)
        checkpoint = checkpointing.read_file(place, weights_only)
        return checkpointing.load_full(checkpoint, path, module, optimizers, order, strict=strict)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        pass  # load_checkpoint() has done it

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pass  # load_checkpoint() has done it

    # ------------------------------------------------------------------ beside the loop
    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._trainer_state is not None and self._trainer_state.stage == RunningStage.TRAINING:
            self._random_state.before_iterating()
        return super().process_dataloader(dataloader)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._random_state.before_batch(in_epoch=batch_idx > 0)
        module = self.lightning_module
        if self._saves is not None and module is not None:
            self._saves.check(module.trainer.global_step)

    @override
    def on_train_end(self) -> None:
        self.wait_for_saves()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._saves is not None:  # what is being written is a good checkpoint of what was before
            self._saves.close(exception)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._saves is not None:
            self._saves.close()
