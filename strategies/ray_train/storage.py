"""Ray Train: the library, where a run keeps its checkpoints, and `reported_checkpoint`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ...state.rendezvous import raise_on_all_ranks, raise_together, run_on_rank_zero
from ..common.config import require_installed

CHECKPOINT_NAME = "checkpoint.ckpt"
"""Of the Trainer's checkpoint inside of a reported folder: the name that Ray's own callback gives it, too."""


class RunStorage:
    """``RunConfig(storage_path, name)``, seen from a worker.

    Args:
        who: Needs it, for errors.
        instead: What to use outside of a worker, for errors.

    Raises:
        RuntimeError: Outside of a Ray Train worker, or where Ray runs the function without workers.
    """

    def __init__(self, who: str, instead: str) -> None:
        context = worker_context(who, instead)
        self._train = ray_train(who)
        try:
            storage = context.get_storage()
        except NotImplementedError as error:
            raise RuntimeError(
                f"{who} needs the run's storage, which Ray's local mode (ScalingConfig(num_workers=0)) does not have. "
                "Use num_workers=1."
            ) from error
        self._filesystem: Any = storage.storage_filesystem
        self.folder: str = storage.experiment_fs_path
        """The run's, on its file system."""

    @property
    def is_local(self) -> bool:
        """Whether the folder is a path on the file system of this node (which other nodes may share)."""
        return is_local(self._filesystem)

    @property
    def kind(self) -> str:
        """The kind of storage, in pyarrow's words: ``local``, ``s3``."""
        return str(self._filesystem.type_name)

    def free_name(self, name: str) -> str:
        """Return ``name``, or with ``-v1`` and so on behind it where Ray keeps a checkpoint of that name.

        A folder of that name that was not reported to Ray was left by workers that ended early. A save to a
        path replaces it; elsewhere it is removed here, so that its files do not mix with what is uploaded.
        """
        if not self._exists(name):
            return name
        kept = {Path(reported.checkpoint.path).name for reported in self._train.get_all_reported_checkpoints()}
        free, version = name, 1
        while free in kept:
            free, version = f"{name}-v{version}", version + 1
        if not self.is_local and self._exists(free):
            self._filesystem.delete_dir(f"{self.folder}/{free}")
        return free

    def _exists(self, name: str) -> bool:
        return str(self._filesystem.get_file_info(f"{self.folder}/{name}").type.name) != "NotFound"

    def path(self, name: str) -> Path:
        """Return the present or future place of the Trainer's checkpoint; for a local storage."""
        return Path(self.folder, name, CHECKPOINT_NAME)

    def report_in_place(self, metrics: dict[str, Any], name: str) -> None:
        """Tell Ray of a folder that lies in the storage already; all workers must call it."""
        checkpoint = self._train.Checkpoint(f"{self.folder}/{name}", filesystem=self._filesystem)
        mode = self._train.CheckpointUploadMode.NO_UPLOAD
        self._train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name, checkpoint_upload_mode=mode)

    def report_uploading(self, metrics: dict[str, Any], name: str, folder: Path | None) -> None:
        """Make Ray copy a folder into the storage, and keep it; all workers must call it.

        Args:
            metrics: What Ray keeps with it.
            name: In the storage.
            folder: On this node; None on those that have nothing to copy.
        """
        checkpoint = None if folder is None else self._train.Checkpoint.from_directory(str(folder))
        self._train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name)


def is_local(filesystem: Any) -> bool:
    """Return whether a file system of pyarrow's is that of this node."""
    return str(filesystem.type_name) == "local"


# ------------------------------------------------------------------------------------------------
# `reported_checkpoint`: the checkpoint that a worker restarted by Ray Train resumes from.


_WHO = "reported_checkpoint()"
_downloaded: set[Path] = set()
"""Copies of checkpoints on this node, of which the Trainer needs nothing once it has begun."""


def reported_checkpoint() -> str | None:
    """Return the checkpoint that Ray Train continues from, or None where there is none: training begins then.

    For ``trainer.fit(..., ckpt_path=reported_checkpoint())`` in the function that ``TorchTrainer`` is given: the newest
    that `RayReportCheckpoint` (or Ray's own callback) has reported, in this run or in an earlier one of the same
    ``RunConfig(storage_path, name)``. All workers must call it. Where the storage is no file system, each node gets a
    copy in its folder for temporary files, which `RayReportCheckpoint` removes when training has begun.

    Raises:
        ModuleNotFoundError: If Ray Train is not installed.
        RuntimeError: Outside of a Ray Train worker; on every worker, if some do not see the checkpoint, naming them.
    """
    context = worker_context(_WHO, "newest_checkpoint(folder)")
    checkpoint = ray_train(_WHO).get_checkpoint()
    if checkpoint is None:
        return None
    folder = Path(checkpoint.path) if is_local(checkpoint.filesystem) else _download(checkpoint, context)
    raise_together(f"Resuming from {checkpoint.path}", _problems(folder))
    return str(folder / CHECKPOINT_NAME)


def _download(checkpoint: Any, context: Any) -> Path:
    """Copy a checkpoint to each node once, under one path on all of them: the strategies read that of process 0."""
    what = f"Downloading {checkpoint.path}"

    def place() -> Path:  # the same again for workers of this run that replace some that died with their copies
        run = hashlib.sha256(f"{context.get_experiment_name()} {checkpoint.path}".encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir(), f"accelight-{Path(checkpoint.path).name}-{run}")

    folder = run_on_rank_zero(place, what)
    is_first_of_node = context.get_local_rank() == 0
    with raise_on_all_ranks(what):  # before any download: two nodes may be on one machine
        if is_first_of_node:
            shutil.rmtree(folder, ignore_errors=True)
    with raise_on_all_ranks(what):
        if is_first_of_node:
            try:
                checkpoint.to_directory(str(folder))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            _downloaded.add(folder)
    return folder


def _problems(folder: Path) -> list[str]:
    if (folder / CHECKPOINT_NAME).exists():
        return []
    if folder.is_dir():
        what = (
            f"{folder} holds no {CHECKPOINT_NAME}, so RayReportCheckpoint did not write it. Load the reported "
            "checkpoint manually, or use another name in RunConfig to start from scratch."
        )
    else:
        what = (
            f"{folder} does not exist. RunConfig(storage_path=...) must be a folder that all nodes share, under the "
            "same absolute path, or a URL."
        )
    return [what]


def remove_downloaded() -> None:
    """Remove what this process has downloaded, when the others on its node have read it, too."""
    while _downloaded:
        shutil.rmtree(_downloaded.pop(), ignore_errors=True)


# ------------------------------------------------------------------------------------------------
# Ray itself: imported when it is used, and asked which worker this process is.


OLDEST = "2.51"
"""The first with Ray Train v2 as what it is without being asked: reports of what is in the run's storage already."""


@functools.cache
def ray_train(who: str) -> Any:
    """Import ``ray.train``; what is installed is looked up once.

    Raises:
        ModuleNotFoundError: If Ray, or what its extra ``train`` brings, is not installed.
        RuntimeError: If Ray Train is to be its first version.
    """
    require_installed(who, "Ray Train", "ray", OLDEST)
    try:
        module = importlib.import_module("ray.train")
    except ImportError as error:  # Ray without what its extra brings
        raise ModuleNotFoundError(f"{who} needs Ray Train: pip install 'accelight[ray]'. {error}") from error
    if not hasattr(module, "CheckpointUploadMode"):
        value = os.environ.get("RAY_TRAIN_V2_ENABLED")
        raise RuntimeError(
            f"{who} needs the second version of Ray Train, but RAY_TRAIN_V2_ENABLED={value} selects the first. Unset "
            "the variable."
        )
    return module


def worker_context(who: str, instead: str) -> Any:
    """Return Ray's ``TrainContext`` of this worker.

    Args:
        who: Needs a worker.
        instead: What to use elsewhere.

    Raises:
        RuntimeError: Outside of a Ray Train worker.
    """
    train = ray_train(who)
    try:
        context = train.get_context()
        context.get_world_size()
    except (RuntimeError, DeprecationWarning) as error:  # the second is what Ray raises inside of Ray Tune
        raise RuntimeError(
            f"{who} works only inside a Ray Train worker: in the function that is passed to TorchTrainer(...), or in "
            f"functions that it calls. Elsewhere, use {instead}."
        ) from error
    return context
