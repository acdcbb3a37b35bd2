"""Where a run of Ray Train keeps its checkpoints, and how Ray is told of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .library import ray_train, worker_context

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
                f"{who} needs the run's storage, which Ray's local mode (ScalingConfig(num_workers=0)) has not got. "
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
        """What it is, in pyarrow's words: ``local``, ``s3``."""
        return str(self._filesystem.type_name)

    def free_name(self, name: str) -> str:
        """Return ``name``, or with ``-v1`` and so on behind it where Ray keeps a checkpoint of that name.

        A folder of that name of which Ray was not told is what workers have left that were ended before. A save to a
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
        """Return where the Trainer's checkpoint lies, or is to lie; for a local storage."""
        return Path(self.folder, name, CHECKPOINT_NAME)

    def report_in_place(self, metrics: dict[str, Any], name: str) -> None:
        """Tell Ray of a folder that lies in the storage already; all workers must call it."""
        checkpoint = self._train.Checkpoint(f"{self.folder}/{name}", filesystem=self._filesystem)
        mode = self._train.CheckpointUploadMode.NO_UPLOAD
        self._train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name, checkpoint_upload_mode=mode)

    def report_uploading(self, metrics: dict[str, Any], name: str, folder: Path | None) -> None:
        """Let Ray copy a folder into the storage, and keep it; all workers must call it.

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
