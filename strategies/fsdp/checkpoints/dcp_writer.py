"""Writing DCP folders through torch, with errors that say what the disk lacks."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from ....checkpoint.disk_space import telling_full_disk


class _TellingFileSystem(FileSystem):
    """Files whose errors name them."""

    num_bytes: int | None = None
    """Of the file that is written next, where that is known."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with telling_full_disk(Path(path), self.num_bytes), super().create_stream(path, mode) as stream:
            yield stream


class FolderWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that tells of a full disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self._files = _TellingFileSystem()

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._files.num_bytes = sum(map(_num_bytes, plan.items))
        try:
            return super().write_data(plan, planner)
        finally:
            self._files.num_bytes = None


_RECORD_BYTES = 1200  # what torch puts around a tensor, about


def _num_bytes(item: WriteItem) -> int:
    """Return the size of what is to be written, about."""
    if item.tensor_data is None:
        return _RECORD_BYTES
    sizes = item.tensor_data.chunk.sizes if item.tensor_data.chunk is not None else item.tensor_data.size
    return sizes.numel() * item.tensor_data.properties.dtype.itemsize + _RECORD_BYTES
