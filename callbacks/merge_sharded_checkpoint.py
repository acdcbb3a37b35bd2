"""``MergeShardedCheckpoint``: what training saves in shards becomes safetensors by itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from ..checkpoint.errors import CheckpointError
from ..checkpoint.formats.dtypes import conversion_target
from ..checkpoint.names import checked_prefix
from ..checkpoint.processes import run_on_main
from ..checkpoint.writing.shards import parse_size
from ..state.arguments import named_arguments
from ..strategies.common.storage_paths import local_path
from ..strategies.upstream.lightning import AsyncCheckpointIO, Callback, LightningModule, ModelCheckpoint, Trainer
from .merge_queue import MergeJob, MergeOptions, MergeQueue, describe, identity_of
from .pretrained_check import check_complete, check_loadable
from .pretrained_files import PretrainedFiles, find_pretrained
from .trainer_package import check_trainer

if TYPE_CHECKING:
    import torch

_OWN_CHECKPOINT = ".unmerged.ckpt"


@named_arguments
class MergeShardedCheckpoint(Callback):
    """Merges checkpoints of ``trainer.fit`` into safetensors, in the background if wanted.

    Process 0 of all starts ``accelight merge-weights`` as a process of its own with low priority, one merge at a time.
    A checkpoint that is to be deleted or overwritten while a merge needs it waits for the merge. What goes wrong is
    raised on all processes when ``fit`` ends; an exception in training ends the merges, and nothing half-done stays.

    For a Hugging Face model, its configuration and the tokenizer or processor (attributes ``tokenizer``, ``processor``,
    ``image_processor``, ``feature_extractor`` of the module or the datamodule) are saved beside the weights. A model
    that ``from_pretrained`` would not build in this way (adapters of PEFT, layers added or replaced) is refused when
    fit starts; see ``pretrained_files``.

    Args:
        output_dir: Folder for ``model.safetensors``; with ``when="every_save"``, for one such folder for each
            checkpoint, under the checkpoint's name without its ending.
        when: ``"fit_end"`` merges one checkpoint after training: see ``which``. ``"every_save"`` merges each.
        safe_serialization: False writes ``pytorch_model.bin``.
        remove_checkpoint_dir: Remove each checkpoint that was merged, after the result was read back and compared.
            Training cannot be resumed from it then.
        max_shard_size: Split into files of at most this size.
        dtype: Convert floating-point tensors.
        strip_prefix: As in `merge_fsdp_weights`; None takes the attribute of the only Hugging Face model, if there is
            one, else keeps the names.
        background: False lets training wait for each merge, and raises at once if it fails.
        which: At the end of fit, the checkpoint saved last or the best one of the first `ModelCheckpoint` with a
            ``monitor``. If none was saved, the weights are saved for this alone.
        pretrained_files: False writes the weights alone, also of a Hugging Face model, under the LightningModule's
            names or without ``strip_prefix``.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        when: Literal["fit_end", "every_save"] = "fit_end",
        safe_serialization: bool = True,
        remove_checkpoint_dir: bool = False,
        max_shard_size: str | int | None = None,
        dtype: str | torch.dtype | None = None,
        strip_prefix: str | None = None,
        background: bool = True,
        *,
        which: Literal["last", "best"] = "last",
        pretrained_files: bool = True,
    ) -> None:
        if when not in ("fit_end", "every_save"):
            raise ValueError(f"when must be 'fit_end' or 'every_save', got {when!r}.")
        if which not in ("last", "best"):
            raise ValueError(f"which must be 'last' or 'best', got {which!r}.")
        if max_shard_size is not None:
            parse_size(max_shard_size)
        conversion_target(dtype)
        self.output_dir = local_path(os.fspath(output_dir), "merged weights")
        self.when, self.which, self.background = when, which, background
        self.safe_serialization, self.remove_checkpoint_dir = safe_serialization, remove_checkpoint_dir
        self.pretrained_files = pretrained_files
        self.max_shard_size, self.strip_prefix = max_shard_size, checked_prefix(strip_prefix)
        self.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        self.merged: dict[str, str] = {}
        """Checkpoints that have been merged, with the folders of the results; on process 0."""
        self._queue: MergeQueue | None = None
        self._patched: Any = None
        self._last_saved: Path | None = None
        self._num_saved = 0
        self._remove: Callable[[Any], None] = _no_strategy
        self._to_remove: list[Path] = []
        self._restored: list[str] | None = None
        self._files: PretrainedFiles | None = None

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(output_dir=str(self.output_dir))

    # ------------------------------------------------------------------ following the saves
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        if stage != "fit":
            return
        self._let_go()
        if self.which == "best" and self._best(trainer) is None:
            raise ValueError(
                "MergeShardedCheckpoint(which='best') needs a ModelCheckpoint(monitor=...) among the Trainer's "
                "callbacks, to know which checkpoint is the best. Add one, or use which='last'."
            )
        self._last_saved, self._num_saved = None, 0
        strategy = trainer.strategy
        self._patched = strategy
        strategy.__dict__["save_checkpoint"] = self._saving(trainer, strategy.save_checkpoint)
        self._remove = strategy.remove_checkpoint
        strategy.__dict__["remove_checkpoint"] = self._remove_or_spare

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        others = (trainer.datamodule,) if trainer.datamodule is not None else ()  # type: ignore[attr-defined]
        self._files = find_pretrained(pl_module, self.strip_prefix, others) if self.pretrained_files else None
        if self._files is not None:
            check_loadable(self._files, pl_module, trainer.strategy.model)  # each process by itself, to the same end
            if getattr(trainer.strategy, "exclude_frozen_parameters", False):  # DeepSpeed's
                check_complete(self._files, pl_module)
        if trainer.is_global_zero:
            self._queue = MergeQueue(MergeOptions(self._arguments(), self.remove_checkpoint_dir))

    def _arguments(self) -> tuple[str, ...]:
        strip_prefix = self.strip_prefix
        if strip_prefix is None and self._files is not None:
            strip_prefix = self._files.prefix or None
        options = {"max-shard-size": self.max_shard_size, "dtype": self.dtype, "strip-prefix": strip_prefix}
        arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return (*arguments, "--threads=1", *([] if self.safe_serialization else ["--unsafe-serialization"]))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up what an interrupted run has left unmerged."""
        restored, self._restored = self._restored, None
        if restored is None or self.when != "every_save" or self._queue is None:
            return
        if trainer.ckpt_path is not None:  # was being saved when its state was taken
            restored.append(str(trainer.ckpt_path))
        for checkpoint in map(Path, dict.fromkeys(restored)):
            if checkpoint.exists():
                self._submit(MergeJob(checkpoint, self._output_for(checkpoint)))

    def _saving(self, trainer: Trainer, save: Callable[..., None]) -> Callable[..., None]:
        """Return the strategy's ``save_checkpoint`` that tells of each checkpoint: the way that every save takes."""

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
            path = _file_system_path(filepath)
            if self.when == "every_save":
                run_on_main(partial(self._make_way, path))  # a merge may still read what is about to be overwritten
            before = identity_of(path)
            save(checkpoint, filepath, storage_options=storage_options)
            self._last_saved, self._num_saved = path, self._num_saved + 1
            if self.when == "every_save":
                self._merge_saved(trainer, path, before)

        return save_checkpoint

    def _make_way(self, path: Path) -> None:
        if self._queue is not None:
            self._queue.wait_for(path)
            self._remove_waiting()

    def _merge_saved(self, trainer: Trainer, path: Path, before: tuple[int, int] | None) -> None:
        if not self.background:
            wait_for_saves = getattr(trainer.strategy, "wait_for_saves", None)
            if wait_for_saves is not None:
                wait_for_saves()
            run_on_main(partial(self._merge_now, path))
        elif self._queue is not None:
            is_complete = partial(_has_appeared, path, before) if _saves_later(trainer) else path.exists
            self._submit(MergeJob(path, self._output_for(path), is_complete))

    def _merge_now(self, path: Path) -> None:
        if self._queue is not None:
            self._submit(MergeJob(path, self._output_for(path)))
            self._queue.wait_for(path)
            self._raise_failures()

    def _submit(self, job: MergeJob) -> None:
        if self._queue is None:
            return
        if self._files is not None:
            job.write_companions = partial(self._files.write, dtype=self.dtype)
        rank_zero_info(f"MergeShardedCheckpoint: {job.checkpoint} -> {job.output}")
        self._queue.submit(job)

    def _output_for(self, checkpoint: Path) -> Path:
        """Return a folder of its own for a checkpoint, the same each time."""
        name = checkpoint.name.removesuffix(".ckpt")
        jobs = self._queue.jobs if self._queue is not None else []
        taken = {Path(output): Path(source) for source, output in self.merged.items()}
        taken |= {job.output: job.checkpoint for job in jobs}
        output, version = self.output_dir / name, 1
        while taken.get(output, checkpoint) != checkpoint:
            output, version = self.output_dir / f"{name}-v{version}", version + 1
        return output

    def _remove_or_spare(self, filepath: Any) -> None:
        """Remove a checkpoint, but what a merge still needs only when it is merged. The strategy's, during fit."""
        path = _file_system_path(filepath)
        if self._queue is not None and self._queue.needs(path):
            self._to_remove.append(path)
        else:
            self._remove(filepath)

    def _remove_waiting(self) -> None:
        """Remove what was spared and is not needed any more."""
        if not self._to_remove or self._queue is None:
            return
        needed = [path for path in self._to_remove if self._queue.needs(path)]
        free, self._to_remove = [path for path in self._to_remove if path not in needed], needed
        for path in free:
            self._remove(path)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._remove_waiting()

    # ------------------------------------------------------------------ the end of fit
    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If nothing was saved, save the weights for the merge: in `on_fit_end` the strategy is gone."""
        if self.when == "fit_end" and self._num_saved == 0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(self.output_dir.parent / f".{self.output_dir.name}{_OWN_CHECKPOINT}", True)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge what is to be merged at the end, and raise what went wrong."""
        try:
            run_on_main(partial(self._finish, trainer))
        except BaseException:  # Ctrl-C, too
            if self._queue is not None:
                self._queue.cancel()
            raise
        finally:
            self._let_go()

    def _finish(self, trainer: Trainer) -> None:
        if self._queue is None:
            return
        if self.when == "fit_end":
            self._submit_final(trainer)
        self._queue.drain()
        self._remove_waiting()
        self._raise_failures()

    def _submit_final(self, trainer: Trainer) -> None:
        best = self._best(trainer) if self.which == "best" else None
        chosen = _file_system_path(best) if best else self._last_saved
        if chosen is None and trainer.ckpt_path is not None:  # resumed where training had ended already
            chosen = Path(trainer.ckpt_path)
        if chosen is None:
            rank_zero_warn("MergeShardedCheckpoint: no checkpoint was saved, nothing is merged.")
            return
        self._submit(MergeJob(chosen, self.output_dir, temporary=chosen.name.endswith(_OWN_CHECKPOINT)))

    @staticmethod
    def _best(trainer: Trainer) -> str | None:
        """Return the best checkpoint's path, empty while there is none; None where nobody compares."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
                return callback.best_model_path
        return None

    def _raise_failures(self) -> None:
        """Note what has been merged.

        Raises:
            CheckpointError: If something has not.
        """
        jobs = [] if self._queue is None else self._queue.jobs
        self._note_merged()
        failed = [describe(job) for job in jobs if job.error is not None]
        if failed:
            what = f"{len(failed)} of {len(jobs)} merges failed"
            raise CheckpointError("\n".join([f"MergeShardedCheckpoint: {what}.", *failed]))

    def _note_merged(self) -> None:
        for job in [] if self._queue is None else self._queue.jobs:
            if job.future is not None and job.future.done() and not job.future.cancelled() and job.error is None:
                self.merged[str(job.checkpoint)] = str(job.output)

    # ------------------------------------------------------------------ interruptions
    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the merges; what they began is removed, and checkpoints that were to be removed are."""
        if self._queue is not None:
            self._queue.cancel()
            self._remove_waiting()
        self._let_go()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._patched is not None:
            for name in ("save_checkpoint", "remove_checkpoint"):
                self._patched.__dict__.pop(name, None)
        self._patched = self._queue = self._files = None
        self._remove = _no_strategy
        self._to_remove = []

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what has been merged, and what is still to be."""
        self._note_merged()
        jobs = [] if self._queue is None else self._queue.jobs
        pending = [str(job.checkpoint) for job in jobs if job.future is not None and not job.future.done()]
        return {"merged": dict(self.merged), "pending": pending}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.merged, self._restored = dict(state_dict["merged"]), list(state_dict["pending"])


def _file_system_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Return a checkpoint's path, the same whatever way it was given; ValueError for a URL of a storage."""
    return Path(os.path.abspath(local_path(os.fspath(checkpoint), "checkpoints that MergeShardedCheckpoint merges")))


def _no_strategy(filepath: Any) -> None:
    raise RuntimeError("MergeShardedCheckpoint follows a strategy during fit alone.")


def _saves_later(trainer: Trainer) -> bool:
    """Whether the strategy may go on writing after ``save_checkpoint``, and gives the final name at the end only."""
    strategy = trainer.strategy
    return hasattr(strategy, "wait_for_saves") or isinstance(strategy.checkpoint_io, AsyncCheckpointIO)


def _has_appeared(path: Path, before: tuple[int, int] | None) -> bool:
    now = identity_of(path)
    return now is not None and now != before
