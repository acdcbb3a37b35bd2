"""Writing DeepSpeed's files so that a rank that cannot does not leave the others waiting for it.

DeepSpeed's ranks meet after each has written its files. One that raised on the way there would not come, and the others
would learn of it from a timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....checkpoint.disk_space import telling_full_disk
from ...common.agreed_outcome import failing_together
from ...common.torch_files import num_bytes_of, save_torch


@contextmanager
def guarded_files(engine: Any, path: Path) -> Iterator[None]:
    """Let an engine write a checkpoint; what fails on one rank is raised on all, when all have come to the end.

    Args:
        engine: DeepSpeed's.
        path: Names the checkpoint in errors.

    Raises:
        RuntimeError: On every rank, naming the ranks and files that failed.
    """
    files = _GuardedFiles(engine.checkpoint_engine)
    engine.checkpoint_engine = files
    engine._copy_recovery_script = files.guarded(engine._copy_recovery_script)
    try:
        yield
    finally:
        engine.checkpoint_engine = files.engine
        del engine._copy_recovery_script  # of the instance: the class has its own
    with failing_together(f"saving {path}"):
        if files.error is not None:
            raise files.error


class _GuardedFiles:
    """DeepSpeed's checkpoint engine for one save: after a failure, nothing more is written."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.error: Exception | None = None
        self.makedirs = self.guarded(engine.makedirs)
        self.commit = self.guarded(engine.commit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file as DeepSpeed does, or do nothing after a failure."""
        self.guarded(self._save)(state_dict, Path(path))

    def _save(self, state_dict: Any, path: Path) -> None:
        if type(self.engine).__name__ == "TorchCheckpointEngine" and getattr(
            self.engine, "zipfile_serialization", False
        ):
            save_torch(state_dict, path)  # what that engine does, with the system's error where it fails
            return
        with telling_full_disk(path, num_bytes_of(state_dict)):
            self.engine.save(state_dict, str(path))

    def guarded(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``action`` so that the first error is kept, and nothing done after it."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.error is not None:
                return None
            try:
                return action(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 (raised when all ranks have come to the end)
                self.error = error
                return None

        return guarded
