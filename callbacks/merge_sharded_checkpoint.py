"""`MergeShardedCheckpoint`: merges the sharded checkpoints of a run into safetensors, in the background if asked.

Merges run one after another in processes of their own. The files of a ``from_pretrained`` folder, and the check that
transformers can load it, are below.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from ..checkpoint.files import CheckpointError, listed
from ..checkpoint.formats.base import conversion_target
from ..checkpoint.formats.dcp_metadata import METADATA_NAME
from ..checkpoint.merge import run_on_main
from ..checkpoint.names import checked_prefix, clean_name
from ..checkpoint.object_path import ObjectPath
from ..checkpoint.storage import ObjectFolder, has_checkpoint, is_remote, without_credentials
from ..checkpoint.writing.plan import parse_size
from ..state.utils import named_arguments
from ..strategies.common.checkpoint_files import local_path
from ..strategies.upstream.lightning import (
    AsyncCheckpointIO,
    Callback,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    check_trainer,
)
from ..strategies.upstream.patches import Patches
from .sharded_ema import ShardedEMA

_OWN_CHECKPOINT = ".unmerged.ckpt"


@named_arguments
class MergeShardedCheckpoint(Callback):
    """Merges checkpoints of ``trainer.fit`` into safetensors, in the background if wanted.

    Process 0 of all starts ``accelight merge-weights`` as a separate process, one merge at a time, at low priority
    (niceness 10) unless training waits for it. A checkpoint that is to be deleted or overwritten while a merge needs it
    waits for the merge. Errors are raised on all processes when ``fit`` ends; an exception in training ends the merges,
    which leave nothing unfinished.

    For a Hugging Face model, its configuration and the tokenizer or processor (attributes ``tokenizer``, ``processor``,
    ``image_processor``, ``feature_extractor`` of the module or the datamodule) are saved beside the weights. A model
    that ``from_pretrained`` would not build in this way (adapters of PEFT, layers added or replaced) is refused when
    fit starts; see ``pretrained_files``.

    Args:
        output_dir: Folder for ``model.safetensors``; with ``when="every_save"``, for one such folder for each
            checkpoint, under the checkpoint's name without its ending. It may be a URL of an object store, and so may
            sharded checkpoints be; credentials come from the environment.
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
        weights: ``"ema"`` merges the averages that ``ShardedEMA`` has added to the checkpoints.
        adapter: Write the folders that ``peft.PeftModel.from_pretrained`` loads, of this adapter or (True) of the only
            one; the checkpoints must be sharded.
        merge_adapter: Write the base with this adapter, or (True) the only one, merged into it, and the base's
            configuration; the checkpoints must be sharded and hold the base.
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
        weights: Literal["model", "ema"] = "model",
        adapter: str | bool = False,
        merge_adapter: str | bool = False,
        pretrained_files: bool = True,
    ) -> None:
        if when not in ("fit_end", "every_save"):
            raise ValueError(f"when must be 'fit_end' or 'every_save', got {when!r}.")
        if which not in ("last", "best"):
            raise ValueError(f"which must be 'last' or 'best', got {which!r}.")
        if weights not in ("model", "ema"):
            raise ValueError(f"weights must be 'model' or 'ema', got {weights!r}.")
        if max_shard_size is not None:
            parse_size(max_shard_size)
        if adapter and merge_adapter:
            raise ValueError("adapter and merge_adapter were both given: one folder is an adapter's or a model's.")
        if (adapter or merge_adapter) and strip_prefix is not None:
            raise ValueError("adapter and merge_adapter write PEFT's or the base's names: omit strip_prefix.")
        conversion_target(dtype)
        self.output_dir = _place(output_dir) if is_remote(output_dir) else local_path(os.fspath(output_dir), "results")
        self.when, self.which, self.background = when, which, background
        self.safe_serialization, self.remove_checkpoint_dir = safe_serialization, remove_checkpoint_dir
        self.weights, self.adapter, self.merge_adapter = weights, adapter, merge_adapter
        self.pretrained_files = pretrained_files and not adapter
        self.max_shard_size, self.strip_prefix = max_shard_size, checked_prefix(strip_prefix)
        self.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        self.merged: dict[str, str] = {}
        """Checkpoints that have been merged, with the folders of the results; on process 0."""
        self._queue: MergeQueue | None = None
        self._patches = Patches("callbacks")
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
        self._close()
        if self.which == "best" and self._best(trainer) is None:
            raise ValueError(
                "MergeShardedCheckpoint(which='best') needs a ModelCheckpoint(monitor=...) among the Trainer's "
                "callbacks to determine the best checkpoint. Add one, or use which='last'."
            )
        if self.weights == "ema" and not any(isinstance(one, ShardedEMA) for one in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError("MergeShardedCheckpoint(weights='ema') needs ShardedEMA among the Trainer's callbacks.")
        if not self._weights_suffice(trainer) and any(one.save_weights_only for one in _savers(trainer)):
            raise ValueError(
                f"MergeShardedCheckpoint(weights='ema') with {type(trainer.strategy).__name__}: "
                "ModelCheckpoint(save_weights_only=True) leaves the averages out of its checkpoints there. Remove "
                "save_weights_only, or use AccelFSDPStrategy or AccelDeepSpeedStrategy."
            )
        self._last_saved, self._num_saved = None, 0
        strategy = trainer.strategy
        self._patches.put(strategy, "save_checkpoint", self._saving(trainer, strategy.save_checkpoint))
        self._remove = strategy.remove_checkpoint
        self._patches.put(strategy, "remove_checkpoint", self._remove_or_spare)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        others = (trainer.datamodule,) if trainer.datamodule is not None else ()  # type: ignore[attr-defined]
        self._files = find_pretrained(pl_module, self.strip_prefix, others) if self.pretrained_files else None
        if self.merge_adapter and getattr(trainer.strategy, "save_trainable_only", False):
            raise ValueError(
                "MergeShardedCheckpoint(merge_adapter=...) needs the base, which save_trainable_only=True leaves out "
                "of checkpoints. Remove save_trainable_only, or use adapter= and PEFT's merge_and_unload()."
            )
        if self._files is not None and not self.merge_adapter:
            check_loadable(self._files, pl_module, trainer.strategy.model)  # each process by itself, to the same end
            if getattr(trainer.strategy, "save_trainable_only", False):
                check_complete(self._files, pl_module)
        if trainer.is_global_zero:
            self._queue = MergeQueue(MergeOptions(self._arguments(), self.remove_checkpoint_dir))

    def _arguments(self) -> tuple[str, ...]:
        strip_prefix = self.strip_prefix
        if strip_prefix is None and self._files is not None and not self.merge_adapter:
            strip_prefix = self._files.prefix or None
        options = {"max-shard-size": self.max_shard_size, "dtype": self.dtype, "strip-prefix": strip_prefix}
        arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
        for option, value in (("--adapter", self.adapter), ("--merge-adapter", self.merge_adapter)):
            if value:
                arguments.append(option if value is True else f"{option}={value}")
        if not self.adapter and not self.merge_adapter and self._files is None:  # no from_pretrained misses a name
            arguments.append("--no-adapter")
        arguments += [f"--weights={self.weights}"] if self.weights != "model" else []
        return (*arguments, "--threads=1", *([] if self.safe_serialization else ["--unsafe-serialization"]))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up what an interrupted run has left unmerged."""
        restored, self._restored = self._restored, None
        if restored is None or self.when != "every_save" or self._queue is None:
            return
        if trainer.ckpt_path is not None:  # was being saved when its state was taken
            restored.append(str(trainer.ckpt_path))
        for checkpoint in map(_place, dict.fromkeys(restored)):
            if _exists(checkpoint):
                self._submit(MergeJob(checkpoint, self._output_for(checkpoint)))

    def _saving(self, trainer: Trainer, save: Callable[..., None]) -> Callable[..., None]:
        """Return the strategy's ``save_checkpoint`` that reports each checkpoint: every save goes through it."""

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
            path = _place(filepath)
            if isinstance(path, ObjectPath):
                _check_sharded(path, trainer)
            if self.when == "every_save":
                _wait_for_saves(trainer)  # one that has failed says so, and no merge waits for it
                run_on_main(partial(self._wait_for_merge, path))  # one may still read what is about to be overwritten
            before = identity_of(path) if self._queue is not None else None
            save(checkpoint, filepath, storage_options=storage_options)
            self._last_saved, self._num_saved = path, self._num_saved + 1
            if self.when == "every_save":
                self._merge_saved(trainer, path, before)

        return save_checkpoint

    def _wait_for_merge(self, path: Path) -> None:
        if self._queue is not None:
            self._queue.wait_for(path)
            self._remove_waiting()

    def _merge_saved(self, trainer: Trainer, path: Path, before: object) -> None:
        if not self.background:
            _wait_for_saves(trainer)
            run_on_main(partial(self._merge_now, path))
        elif self._queue is not None:
            is_complete = partial(_has_appeared, path, before) if _saves_later(trainer) else partial(_exists, path)
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
        taken = {_place(output): _place(source) for source, output in self.merged.items()}
        taken |= {_place(job.output): job.checkpoint for job in jobs}
        output, version = self.output_dir / name, 1
        while taken.get(_place(output), checkpoint) != checkpoint:
            output, version = self.output_dir / f"{name}-v{version}", version + 1
        return output

    def _remove_or_spare(self, filepath: Any) -> None:
        """Remove a checkpoint, but what a merge still needs only when it is merged. The strategy's, during fit."""
        path = _place(filepath)
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
            self._remove(str(path) if isinstance(path, ObjectPath) else path)

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
            weights_only = self._weights_suffice(trainer)
            if isinstance(self.output_dir, ObjectPath):
                trainer.save_checkpoint(str(self.output_dir / _OWN_CHECKPOINT), weights_only)
                return
            path = self.output_dir.parent / f".{self.output_dir.name}{_OWN_CHECKPOINT}"
            trainer.save_checkpoint(path, weights_only)

    def _weights_suffice(self, trainer: Trainer) -> bool:
        """Whether checkpoints of weights alone have what is merged: Lightning asks no callback for them."""
        return self.weights == "model" or hasattr(trainer.strategy, "averages")

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
            self._close()

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
        chosen = _place(best) if best else self._last_saved
        if chosen is None and trainer.ckpt_path is not None:  # resumed where training had ended already
            chosen = _place(trainer.ckpt_path)
        if chosen is None:
            rank_zero_warn("MergeShardedCheckpoint: no checkpoint was saved, so nothing is merged.")
            return
        self._submit(MergeJob(chosen, self.output_dir, temporary=chosen.name.endswith(_OWN_CHECKPOINT)))

    @staticmethod
    def _best(trainer: Trainer) -> str | None:
        """Return the best checkpoint's path, empty while there is none; None where nobody compares."""
        return next((one.best_model_path for one in _savers(trainer) if one.monitor is not None), None)

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
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._patches.remove()
        self._queue = self._files = None
        self._remove = _no_strategy
        self._to_remove = []

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the finished merges, and those to come."""
        self._note_merged()
        jobs = [] if self._queue is None else self._queue.jobs
        pending = [str(job.checkpoint) for job in jobs if job.future is not None and not job.future.done()]
        return {"merged": dict(self.merged), "pending": pending}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.merged, self._restored = dict(state_dict["merged"]), list(state_dict["pending"])


def _place(path: str | os.PathLike[str]) -> Path:
    """Return the place of a checkpoint or a result, the same whatever way it was given.

    Raises:
        ValueError: For a URL with a password, which the command line of a merge would show.
    """
    if isinstance(path, ObjectPath):
        return path
    url = os.fspath(path)
    if not is_remote(url):
        return Path(os.path.abspath(local_path(url, "merged weights")))
    if without_credentials(url) != url:
        raise ValueError(
            f"{without_credentials(url)}: MergeShardedCheckpoint takes no password in a URL, since each merge has a "
            "command line. Set credentials in the environment, or in fsspec's configuration."
        )
    return ObjectPath(ObjectFolder(url), "", {})


def _check_sharded(place: Path, trainer: Trainer) -> None:
    """Check that a checkpoint in an object store will be sharded: one object is not merged.

    Raises:
        ValueError: If not.
    """
    settings = getattr(getattr(trainer.strategy, "engine", None), "settings", None)
    if getattr(settings, "state_dict_type", None) != "sharded_state_dict":
        raise ValueError(
            f"{place}: MergeShardedCheckpoint merges sharded checkpoints from object stores, and a checkpoint in one "
            "file from a disk alone. Use AccelFSDPStrategy(state_dict_type='sharded_state_dict'), or save to a disk."
        )


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]


def _wait_for_saves(trainer: Trainer) -> None:
    """Wait for saves in the background, where the strategy has any; every process calls it."""
    if (wait := getattr(trainer.strategy, "wait_for_saves", None)) is not None:
        wait()


def _exists(place: Path) -> bool:
    return identity_of(place) is not None if isinstance(place, ObjectPath) else place.exists()


def _is_sharded(place: Path) -> bool:
    return has_checkpoint(ObjectFolder.of(place)) if isinstance(place, ObjectPath) else place.is_dir()


def _no_strategy(filepath: Any) -> None:
    raise RuntimeError("MergeShardedCheckpoint has a strategy only during fit.")


def _saves_later(trainer: Trainer) -> bool:
    """Whether the strategy may continue writing after ``save_checkpoint``, and gives the final name at the end only."""
    strategy = trainer.strategy
    return hasattr(strategy, "wait_for_saves") or isinstance(strategy.checkpoint_io, AsyncCheckpointIO)


def _has_appeared(path: Path, before: object) -> bool:
    now = identity_of(path)
    return now is not None and now != before


# ------------------------------------------------------------------------------------------------
# Merges in processes of their own, one after the other; beside training, with low priority.


_LOW_PRIORITY = 10
"""About a tenth of what training gets of a core that both want. At 19, the lowest, busy cores would let a merge, and so
the removal of what it reads, wait for good."""
_POLL_S, _POLL_STORE_S = 0.1, 1.0
_GRACE_S = 5.0
# A process that works alone needs no launcher's variables; and a training job's GPU memory is full.
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class MergeOptions:
    """Options of the merge, as of ``accelight merge-weights``."""

    arguments: tuple[str, ...] = ()
    """Further options, as on the command line."""
    remove: bool = False
    """Whether the checkpoint goes when its merged form has been read back and compared."""


@dataclass
class MergeJob:
    """One checkpoint to be merged."""

    checkpoint: Path
    output: Path
    is_complete: Callable[[], bool] = lambda: True
    """Whether the checkpoint has been written."""
    write_companions: Callable[[Path], None] | None = None
    """Writes what belongs beside the weights."""
    temporary: bool = False
    """Whether the checkpoint was made for this merge alone, and goes with it."""
    future: Future[None] | None = field(default=None, repr=False)

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it is done."""
        if self.future is None or not self.future.done() or self.future.cancelled():
            return None
        return self.future.exception()


class MergeQueue:
    """Merges checkpoints one after the other while this process does other things.

    A thread starts one process at a time and waits for it, asleep. The processes are fresh interpreters: forks of a
    process in which gloo or CUDA threads live could deadlock.
    """

    def __init__(self, options: MergeOptions) -> None:
        self.options = options
        self.jobs: list[MergeJob] = []
        self._pool = ThreadPoolExecutor(1, "accelight-merge")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = threading.Event()
        self._all_saved = threading.Event()
        self._training_waits = threading.Event()
        """Whether nothing trains until the merges are done."""

    def submit(self, job: MergeJob) -> None:
        """Merge a checkpoint when those before are done."""
        self.jobs.append(job)
        job.future = self._pool.submit(self._run, job)

    def needs(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is being merged or is yet to be."""
        return any(job.checkpoint == checkpoint and not _done(job) for job in self.jobs)

    def wait_for(self, checkpoint: Path) -> None:
        """Return when a checkpoint is no longer needed."""
        with self._in_haste():
            for job in self.jobs:
                if job.checkpoint == checkpoint and job.future is not None:
                    _wait(job.future)

    def drain(self) -> None:
        """Return when all merges are done; every checkpoint has been written by now."""
        self._all_saved.set()
        with self._in_haste():
            for job in self.jobs:
                if job.future is not None:
                    _wait(job.future)
        self._pool.shutdown()

    @contextlib.contextmanager
    def _in_haste(self) -> Iterator[None]:
        """Give merges the priority of training, which waits for them."""
        self._training_waits.set()
        with self._lock:
            if self._process is not None:
                _set_priority(self._process.pid, 0)
        try:
            yield
        finally:
            self._training_waits.clear()

    def cancel(self) -> None:
        """End the running merge, forget the others, and leave nothing unfinished."""
        self._cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()  # the command then removes what it began; SIGINT is ignored below nohup and `&`
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._pool.shutdown()

    def _run(self, job: MergeJob) -> None:
        while not job.is_complete():
            if self._cancelled.is_set() or self._all_saved.is_set():
                break
            time.sleep(_POLL_STORE_S if isinstance(job.checkpoint, ObjectPath) else _POLL_S)
        if not job.is_complete():
            raise RuntimeError("it was never complete")
        is_new = not _has_content(job.output)
        written: list[str] = []
        try:
            if job.write_companions is not None:
                written = _write_companions(job.write_companions, job.output)
            self._merge(job)
        except BaseException:
            if is_new:  # with weights missing, a configuration is no model
                _remove_result(job.output, written)
            raise

    def _merge(self, job: MergeJob) -> None:
        remove = self.options.remove or job.temporary
        if _is_sharded(job.checkpoint):
            self._command(["accelight.checkpoint", *self._merge_arguments(job, job.checkpoint, remove)])
            return
        if isinstance(job.checkpoint, ObjectPath):  # restored from the state of a run that saved elsewhere
            raise CheckpointError("it is not a sharded checkpoint; one object is not merged")
        beside = job.checkpoint if isinstance(job.output, ObjectPath) else job.output
        folder = beside.with_name(f".{beside.name}.unpacked")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            self._command(["accelight.callbacks.single_file", str(job.checkpoint), str(folder)])
            self._command(["accelight.checkpoint", *self._merge_arguments(job, folder, remove)])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if remove:
            job.checkpoint.unlink()

    def _merge_arguments(self, job: MergeJob, checkpoint: Path, remove: bool) -> list[str]:
        arguments = ["merge-weights", str(checkpoint), str(job.output), "--quiet", *self.options.arguments]
        return [*arguments, "--remove-checkpoint-dir"] if remove else arguments

    def _command(self, module_and_arguments: Sequence[str]) -> None:
        """Run ``python -m``.

        Raises:
            RuntimeError: With what it said, if it failed.
        """
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONSAFEPATH="1")
        with self._lock:
            if self._cancelled.is_set():
                raise RuntimeError("it was canceled: training was interrupted")
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", *module_and_arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the training, which then ends this in order
            )
            if not self._training_waits.is_set():
                _set_priority(process.pid, _LOW_PRIORITY)
        _, said = process.communicate()
        with self._lock:
            self._process = None
        if process.returncode:
            text = said.strip().removeprefix("accelight: error: ")
            raise RuntimeError(text or f"its process ended with status {process.returncode} and no message")


def _set_priority(pid: int, niceness: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # ended already, not permitted; Windows
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
        # On Linux priorities may count inside a session only, and this one is new.
        Path(f"/proc/{pid}/autogroup").write_text(f"{niceness}", encoding="ascii")


def _done(job: MergeJob) -> bool:
    return job.future is None or job.future.done()


def _wait(future: Future[None]) -> None:
    with contextlib.suppress(CancelledError):
        future.exception()


def identity_of(place: Path) -> object:
    """Return an identity that a later checkpoint of the same name does not have; None while there is none."""
    if isinstance(place, ObjectPath):
        folder = ObjectFolder.of(place)
        return folder.identity(METADATA_NAME) or folder.identity("")
    try:
        status = place.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _has_content(output: Path) -> bool:
    return bool(ObjectFolder.of(output).names()) if isinstance(output, ObjectPath) else output.exists()


def _write_companions(write: Callable[[Path], None], output: Path) -> list[str]:
    """Write what belongs next to the weights; return the objects' names, for a store."""
    if not isinstance(output, ObjectPath):
        write(output)
        return []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        store = ObjectFolder.of(output)
        for name, path in zip(names, files, strict=True):
            store.put(name, path.read_bytes())
    return names


def _remove_result(output: Path, names: list[str]) -> None:
    if isinstance(output, ObjectPath):
        with contextlib.suppress(OSError):
            ObjectFolder.of(output).remove(names)
    else:
        shutil.rmtree(output, ignore_errors=True)


def describe(job: MergeJob) -> str:
    """Return a failed job in one line."""
    return f"{job.checkpoint} -> {job.output}: {json.dumps(str(job.error))[1:-1]}"


# ------------------------------------------------------------------------------------------------
# Checks before training that ``from_pretrained`` will build the model whose weights are written.


_INSTEAD = (
    "For adapters of PEFT, MergeShardedCheckpoint(adapter=True) writes what PeftModel.from_pretrained loads, and "
    "merge_adapter=True the base with the adapter merged into it; "
    "MergeShardedCheckpoint(pretrained_files=False) writes only the weights, for load_state_dict of a model that is "
    "built in the same way"
)


def check_loadable(files: PretrainedFiles, module: nn.Module, trained: nn.Module | None = None) -> None:
    """Check that the model's class, built from its configuration, has the parameters that the trained one has.

    ``from_pretrained`` builds just that, initialises what it does not find and leaves out what it does not know, with
    no more than a warning. Buffers and shapes are not compared: nothing of them is lost silently.

    Args:
        files: The model and where it is.
        module: The LightningModule, sharded or not.
        trained: What the strategy has made of it, if it has.

    Raises:
        ValueError: If it has others.
    """
    model: nn.Module = files.model
    what = f"{files.prefix or 'the module'} ({own_class(model).__name__})"
    if _has_peft_around(files.prefix, module):
        raise ValueError(
            f"{what} is trained through PEFT, whose own parameters from_pretrained would not load. {_INSTEAD}; "
            "its save_pretrained then writes the adapter."
        )
    built = _built_anew(model, what)
    if built is None:
        return
    prefix = f"{files.prefix}." if files.prefix else ""
    names = [*_parameter_names(module), *(_flat_names(trained) if trained is not None else ())]
    found = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    ties: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in built.named_parameters(remove_duplicate=False):
        ties[parameter].append(name)
    tied = {name: names for names in ties.values() for name in names}
    missing = [name for name in tied if not found & set(tied[name])]
    unknown = sorted(found - set(tied))
    if getattr(model.config, "quantization_config", None) is not None:  # its layers are put in after the model is built
        missing, unknown = [], [name for name in unknown if "base_layer" in name.split(".")]
    if missing or unknown:
        raise ValueError(
            f"from_pretrained could not load {what} as it is trained: built from its configuration, it has no "
            f"{listed(unknown, 4) or 'further parameters'}, and "
            f"{f'would initialize {listed(missing, 4)} from scratch' if missing else 'all others'}. Were layers "
            f"replaced or added (adapters such as LoRA), or removed? {_INSTEAD}."
        )


def check_complete(files: PretrainedFiles, module: nn.Module) -> None:
    """Check that nothing of the model is frozen, for a strategy that leaves what is frozen out of its checkpoints.

    Raises:
        ValueError: If something is.
    """
    prefix = f"{files.prefix}." if files.prefix else ""
    named = [(clean_name(name), parameter) for name, parameter in module.named_parameters()]
    frozen = [name for name, one in named if name.startswith(prefix) and not one.requires_grad]
    if frozen:
        raise ValueError(
            f"save_trainable_only=True leaves {listed(frozen, 4)} out of checkpoints, and so of the merged "
            "weights: from_pretrained would initialize them from scratch. Remove save_trainable_only; or "
            f"{_INSTEAD}, with strict=False."
        )


def _has_peft_around(prefix: str, module: nn.Module) -> bool:
    """Whether a module around the model has PEFT's configuration; layers inside of it show by their names."""
    around: list[Any] = []
    for attribute in prefix.split(".")[:-1]:
        inner: Any = getattr(around[-1] if around else module, attribute, None)
        if inner is None:  # hidden by a wrapper
            break
        around.append(inner)
    return any(getattr(one, "peft_config", None) is not None for one in around)


def _built_anew(model: Any, what: str) -> nn.Module | None:
    """Return the model as ``from_pretrained`` builds it, without memory; None, said so, where its class needs more."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return own_class(model)(copy.deepcopy(model.config))
    except Exception as error:  # noqa: BLE001 (a class of one's own may do anything; then nothing is checked)
        rank_zero_warn(
            f"Could not check before training whether from_pretrained can load {what}: built from its "
            f"configuration on the meta device, it raises {type(error).__name__}: {error}"
        )
        return None


def _parameter_names(model: nn.Module) -> Iterator[str]:
    """Yield all names of all parameters, sharded or not, tied ones under each."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not hasattr(parameter, "_fqns"):
            yield clean_name(name)
    yield from _flat_names(model)


def _flat_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters in FSDP1's flat ones; that of the root is outside of the LightningModule."""
    for name, parameter in model.named_parameters():
        prefix, _, _ = name.rpartition(".")
        for inside in getattr(parameter, "_fqns", ()):
            yield clean_name(f"{prefix}.{inside}" if prefix else inside)


# ------------------------------------------------------------------------------------------------
# Files next to the weights of a Hugging Face model: configuration, tokenizer, processors.


_COMPANIONS = ("tokenizer", "processor", "image_processor", "feature_extractor")


@dataclass(frozen=True)
class PretrainedFiles:
    """A Hugging Face model inside a LightningModule, and what is saved with it."""

    prefix: str
    """The attribute that holds it; empty if it is the module itself."""
    model: Any
    companions: tuple[Any, ...]

    def write(self, folder: Path, dtype: str | None) -> None:
        """Save everything but the weights.

        Args:
            folder: Where; made where missing.
            dtype: What the weights are converted to, if they are.
        """
        config = copy.deepcopy(self.model.config)
        config.architectures = [own_class(self.model).__name__]
        if dtype is not None:
            setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
        config.save_pretrained(folder)
        if getattr(self.model, "generation_config", None) is not None:
            self.model.generation_config.save_pretrained(folder)
        for companion in self.companions:
            companion.save_pretrained(folder)


def find_pretrained(
    module: nn.Module, strip_prefix: str | None, others: tuple[Any, ...] = ()
) -> PretrainedFiles | None:
    """Find the Hugging Face model that is to be saved.

    Args:
        module: The LightningModule.
        strip_prefix: Where the user says that it is; None or ``"auto"`` takes the only one there is.
        others: Where to look for a tokenizer beside ``module`` (a datamodule).
    """
    modeling = sys.modules.get("transformers.modeling_utils")  # imported by whoever made such a model
    if modeling is None:
        return None
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        name = clean_name(name)
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found if outer != name)
        if isinstance(child, modeling.PreTrainedModel) and not inside:
            found[name] = child
    if strip_prefix not in (None, "auto"):
        found = {name: child for name, child in found.items() if name == strip_prefix}
    if len(found) != 1:
        return None
    [(prefix, model)] = found.items()
    companions: dict[str, Any] = {}
    for owner in (module, *others):
        for attribute in _COMPANIONS:
            companion = getattr(owner, attribute, None)
            if hasattr(companion, "save_pretrained"):
                companions.setdefault(attribute, companion)
    return PretrainedFiles(prefix, model, tuple(companions.values()))


def own_class(model: nn.Module) -> Any:
    """Return the model's class before FSDP2 made a class of its own of it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
