"""`RayReportCheckpoint`: checkpoints of a sharded model where Ray Train keeps them."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..state.rendezvous import run_on_rank_zero
from ..state.utils import check_count, named_arguments
from ..strategies.common.checkpoint_files import in_own_folders
from ..strategies.ray_train.storage import CHECKPOINT_NAME, RunStorage, remove_downloaded
from ..strategies.upstream.lightning import Checkpoint, LightningModule, Trainer, check_trainer
from .elastic_training import skip_used_batches
from .merge_sharded_checkpoint import MergeShardedCheckpoint

_WHO = "RayReportCheckpoint"


@named_arguments
class RayReportCheckpoint(Checkpoint):
    """Saves checkpoints into the storage of a Ray Train run, and reports them to Ray with the metrics.

    ::

        def train(config):
            trainer = Trainer(
                strategy=RayAccelFSDPStrategy(fsdp_version=2), plugins=[RayLightningEnvironment()],
                devices="auto", accelerator="auto", callbacks=[RayReportCheckpoint()],
            )
            prepare_trainer(trainer).fit(module, loader, ckpt_path=reported_checkpoint())

    All workers write one checkpoint, each its own shards, directly into the folder of the run,
    ``RunConfig(storage_path)/name/checkpoint_epoch=0-step=10/checkpoint.ckpt``; Ray copies nothing. So the storage must
    be a file system that all nodes see; one that they do not share is an error at the first save, which names the
    nodes. Where it is none (``s3://...``), each worker writes its own shards into a temporary folder of its own node,
    and Ray uploads the folders into one.

    A checkpoint is reported to Ray once it is whole on disk: Ray deletes old ones (``CheckpointConfig(num_to_keep)``),
    and after a failure starts the workers again, where `reported_checkpoint` gives the newest. What was done after that
    is done again: from the end of an epoch, or from within one (``every_n_train_steps``), where batches that were used
    are skipped as `TriggerEarlyStopping` does it.

    Reported are ``trainer.callback_metrics`` with ``epoch`` and ``step``, as by Ray's own callback. Other than that,
    this is a checkpoint callback of Lightning's, which sees what the module does and logs in ``on_train_epoch_end``,
    and the Trainer adds no ``ModelCheckpoint`` beside it; ``enable_checkpointing=False`` refuses it.

    Args:
        every_n_epochs: Epochs between two checkpoints, at their ends; 0 saves at none. Default 1.
        every_n_train_steps: Optimizer steps between two checkpoints within epochs; 0 (default) saves at none.

    Raises:
        ValueError: If an argument is negative, no int, or both are 0.
        ModuleNotFoundError: When training starts, if Ray Train is not installed.
        RuntimeError: When training starts, outside of a Ray Train worker, or with `MergeShardedCheckpoint` beside it
            where the storage is no file system.

    Source: ray 2.60 ``train/lightning/_lightning_utils.py`` (``RayTrainReportCallback``); lightning 2.6
    ``ModelCheckpoint``.
    """

    def __init__(self, every_n_epochs: int = 1, every_n_train_steps: int = 0) -> None:
        check_count("every_n_epochs", every_n_epochs, 0)
        check_count("every_n_train_steps", every_n_train_steps, 0)
        if not (every_n_epochs or every_n_train_steps):
            raise ValueError(
                "every_n_epochs and every_n_train_steps are both 0: nothing would be saved. Set one of them."
            )
        self.every_n_epochs = every_n_epochs
        self.every_n_train_steps = every_n_train_steps
        self.last_reported: str | None = None
        """Name of the checkpoint that was reported last, in the run's folder."""
        self._storage: RunStorage | None = None
        self._step_before = 0
        self._is_saving = self._resume_within_epoch = False

    # ------------------------------------------------------------------ hooks
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        if stage != "fit":
            return
        storage = RunStorage(_WHO, "ModelCheckpoint")
        others: Any = trainer  # a connector gives it its callbacks, which type checkers do not see
        if not storage.is_local and any(isinstance(one, MergeShardedCheckpoint) for one in others.callbacks):
            raise RuntimeError(
                f"RunConfig(storage_path=...) is of kind {storage.kind!r}, but MergeShardedCheckpoint merges only on "
                "a file system that all processes share. Remove it, and merge a copy of the checkpoint: `accelight "
                "merge-weights`."
            )
        self._storage = storage

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.barrier("RayReportCheckpoint.on_train_start")
        remove_downloaded()
        self._step_before = trainer.global_step
        if self._resume_within_epoch:
            self._resume_within_epoch = False
            skip_used_batches(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._step_before = self._step_before, trainer.global_step
        every = self.every_n_train_steps
        if every and before // every < trainer.global_step // every:
            if trainer.is_last_batch and self._is_due(trainer.current_epoch):
                return  # the end of the epoch, which is next, has all that is to be saved
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due(trainer.current_epoch):
            self._save(trainer)

    def _is_due(self, epoch: int) -> bool:
        return self.every_n_epochs > 0 and (epoch + 1) % self.every_n_epochs == 0

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._storage = None

    # ------------------------------------------------------------------ saving
    def _save(self, trainer: Trainer) -> None:
        """Save and report; all workers must call it."""
        storage = self._storage
        if storage is None:
            raise RuntimeError("RayReportCheckpoint saves only while the Trainer fits.")
        metrics: dict[str, Any] = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics.update(epoch=trainer.current_epoch, step=trainer.global_step)
        wanted = f"checkpoint_epoch={trainer.current_epoch}-step={trainer.global_step}"
        name = run_on_rank_zero(partial(storage.free_name, wanted), "Naming a checkpoint for Ray Train")
        if storage.is_local:
            self._write(trainer, storage.path(name))
            storage.report_in_place(metrics, name)
        else:
            self._upload(trainer, storage, metrics, name)
        self.last_reported = name

    def _write(self, trainer: Trainer, path: Path) -> None:
        self._is_saving = True
        try:
            trainer.save_checkpoint(path)
        finally:
            self._is_saving = False
        wait = getattr(trainer.strategy, "wait_for_saves", None)
        if wait is not None:  # with async_save: only a whole checkpoint is reported to Ray
            wait()

    def _upload(self, trainer: Trainer, storage: RunStorage, metrics: dict[str, Any], name: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="accelight-ray-"))
        try:
            with in_own_folders():
                self._write(trainer, folder / CHECKPOINT_NAME)
            storage.report_uploading(metrics, name, folder if (folder / CHECKPOINT_NAME).exists() else None)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------------ checkpoints
    @override
    def state_dict(self) -> dict[str, Any]:
        # Only of its own checkpoints: who resumes from another's knows best which batches were used.
        return {"last_reported": self.last_reported, "resume_within_epoch": self._is_saving}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_reported = state_dict["last_reported"]
        self._resume_within_epoch = state_dict["resume_within_epoch"]
