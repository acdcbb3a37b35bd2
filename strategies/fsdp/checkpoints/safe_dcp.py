"""Reading DCP folders through torch without running what their pickles say.

torch 2.13 unpickles ``.metadata`` and non-tensor entries without restriction; a checkpoint from elsewhere could run
code in every process. Here both go through allow-lists.
"""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from ....checkpoint.errors import CheckpointError
from ....checkpoint.files import open_regular, read_regular
from ....checkpoint.formats.dcp.metadata import MAX_METADATA_BYTES
from ....checkpoint.formats.torch_save.unpickler import load_restricted
from ...upstream.torch_core import _StorageInfo

_DTYPES = tuple(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_CLASSES = (
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.ChunkStorageMetadata,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.TensorProperties,
    dcp.StorageMeta,
)


def _allowed() -> dict[tuple[str, str], object]:
    """Return what ``.metadata`` may name, made anew for each load.

    Classes are throw-away subclasses and functions throw-away ones, because a pickle can set attributes on what it
    names: never on torch's own.
    """
    here = dcp.__name__
    table: dict[tuple[str, str], object] = {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES}
    for original in _CLASSES:
        table[(here, original.__name__)] = type(original.__name__, (original,), {"__module__": here})
    table[(_StorageInfo.__module__, "_StorageInfo")] = type("_StorageInfo", (_StorageInfo,), {})
    table[("torch", "Size")] = torch.Size
    table[("torch.serialization", "_get_layout")] = lambda name: torch.strided
    for name in ("_MEM_FORMAT_ENCODING", "TensorProperties._MEM_FORMAT_ENCODING"):
        table[(here, name)] = lambda value: dcp._MEM_FORMAT_ENCODING(value)
    for name in ("PosixPath", "WindowsPath", "PurePosixPath"):
        for module in ("pathlib", "pathlib._local"):  # Python 3.13 pickles paths under the second
            table[(module, name)] = lambda *parts: pathlib.PurePosixPath(*parts)
    return table


class _RegularFiles(FileSystem):
    """Opens regular files alone: a FIFO in the place of a shard would be waited for."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with os.fdopen(open_regular(pathlib.Path(path)), mode) as stream:
            yield cast("io.IOBase", stream)


class SafeReader(FileSystemReader):
    """A ``FileSystemReader`` whose metadata comes through the restricted unpickler."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self.fs = _RegularFiles()

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = pathlib.Path(self.path) / ".metadata"
        content = read_regular(path, MAX_METADATA_BYTES, "a description")
        loaded = load_restricted(content, _allowed(), str(path))
        if not isinstance(loaded, Metadata) or not isinstance(loaded.storage_data, dict):
            raise CheckpointError(f"{path}: holds no DCP metadata.")
        for info in loaded.storage_data.values():
            relative = pathlib.PurePosixPath(info.relative_path)
            if relative.is_absolute() or ".." in relative.parts:
                raise CheckpointError(f"{path}: points to {info.relative_path!r}, outside its folder.")
        # Indices are compared by class, too: torch looks them up as its own.
        loaded.storage_data = {
            MetadataIndex(index.fqn, index.offset, index.index): info for index, info in loaded.storage_data.items()
        }
        if loaded.storage_meta is None:
            loaded.storage_meta = dcp.StorageMeta()
        loaded.storage_meta.load_id = self.load_id
        return loaded


class SafePlanner(DefaultLoadPlanner):
    """A ``DefaultLoadPlanner`` whose non-tensor entries are read with ``weights_only=True``."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
