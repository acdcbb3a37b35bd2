"""`reported_checkpoint`: what a worker that Ray Train has started again goes on from."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from ..common.agreed_outcome import failing_together, num_ranks, raise_together, run_on_rank_zero
from .library import ray_train, worker_context
from .storage import CHECKPOINT_NAME, is_local

_WHO = "reported_checkpoint()"
_downloaded: set[Path] = set()
"""Copies of checkpoints on this node, of which the Trainer needs nothing once it has begun."""


def reported_checkpoint() -> str | None:
    """Return the checkpoint that Ray Train goes on from, or None where there is none: training begins then.

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
    raise_together(f"Going on from {checkpoint.path}", _problems(folder))
    return str(folder / CHECKPOINT_NAME)


def _download(checkpoint: Any, context: Any) -> Path:
    """Copy a checkpoint to each node once, under one path on all of them: the strategies read that of process 0."""
    what = f"Downloading {checkpoint.path}"

    def place() -> Path:
        return Path(tempfile.gettempdir(), f"accelight-{Path(checkpoint.path).name}-{uuid.uuid4().hex}")

    folder = place() if num_ranks() == 1 else run_on_rank_zero(place, what)
    with failing_together(what):
        if context.get_local_rank() == 0:
            _downloaded.add(folder)
            checkpoint.to_directory(str(folder))
    return folder


def _problems(folder: Path) -> list[str]:
    if (folder / CHECKPOINT_NAME).exists():
        return []
    if folder.is_dir():
        what = (
            f"{folder} holds no {CHECKPOINT_NAME}, so it was not RayReportCheckpoint that wrote it. Load by hand what "
            "was reported, or give RunConfig another name to begin anew."
        )
    else:
        what = (
            f"{folder} is not there. RunConfig(storage_path=...) must be a folder that all nodes see, under the same "
            "absolute path, or a URL."
        )
    return [what]


def remove_downloaded() -> None:
    """Remove what this process has downloaded, when the others on its node have read it, too."""
    while _downloaded:
        shutil.rmtree(_downloaded.pop(), ignore_errors=True)
