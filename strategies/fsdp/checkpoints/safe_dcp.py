"""Reading DCP folders through torch without running what their pickles say.

torch 2.13 unpickles ``.metadata`` and non-tensor entries without restriction; a checkpoint from elsewhere could run
code in every process. Here both go through allow-lists.
"""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from ....checkpoint.digests import Digests, RecordDigests
from ....checkpoint.errors import CheckpointError
from ....checkpoint.files import open_regular, read_regular
from ....checkpoint.formats.dcp.metadata import MAX_METADATA_BYTES, METADATA_NAME, read_dcp_metadata
from ....checkpoint.formats.dcp.records import RecordReader
from ....checkpoint.formats.torch_save.unpickler import load_restricted
from ...common.checked_bytes import bytes_are_checked
from ...upstream.torch_core import _StorageInfo
from .dcp_metadata import torch_metadata

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
    """A ``FileSystemReader`` whose metadata comes through the restricted unpickler, and whose bytes are checked.

    Args:
        path: The folder.
        digests: Of its files, where they are known.
    """

    def __init__(self, path: pathlib.Path, digests: Digests | None = None) -> None:
        super().__init__(path)
        self.fs = _RegularFiles()
        self._digests = digests or {}
        self._metadata: Metadata | None = None
        self._places: Mapping[str, Sequence[int]] = {}
        """Where in each file its records begin, when the description was read."""

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._check(plan)
        return super().read_data(plan, planner)

    def _check(self, plan: LoadPlan) -> None:
        """Compare the records that are about to be read with the checksums in them."""
        digests = RecordDigests(self._digests, self._places, f"{self.path}/{METADATA_NAME}")
        bytes_too = bytes_are_checked()
        wanted: dict[str, dict[tuple[int, int], str]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if not info.transform_descriptors:
                name = item.storage_index.fqn
                wanted.setdefault(info.relative_path, {}).setdefault((info.offset, info.length), name)
        for relative, records in wanted.items():
            path = pathlib.Path(self.path) / relative
            with os.fdopen(open_regular(path), "rb") as stream:
                reader = RecordReader(stream.fileno(), str(path), os.fstat(stream.fileno()).st_size)
                for (offset, length), name in sorted(records.items()):
                    reader.check(name, offset, length, digests.of(relative, offset), bytes_too=bytes_too)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the folder's metadata, read once."""
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def read_paths(self) -> Mapping[str, tuple[str | int, ...]]:
        """Return where in nested states the folder's entries were; nothing if they were in none."""
        paths = self._read_objects(pathlib.Path(self.path) / METADATA_NAME).planner_data
        return paths if isinstance(paths, Mapping) else {}

    def _read_metadata(self) -> Metadata:
        path = pathlib.Path(self.path) / METADATA_NAME
        try:
            content = read_dcp_metadata(path, self._digests.get(METADATA_NAME))
        except CheckpointError:  # what no merge can read: of a dtype that safetensors does not have, say
            return self._read_objects(path)
        for name in content.offsets:
            _check_inside(path, name)
        self._places = content.offsets
        loaded = torch_metadata(content)
        cast("dcp.StorageMeta", loaded.storage_meta).load_id = self.load_id
        return loaded

    def _read_objects(self, path: pathlib.Path) -> Metadata:
        """Return torch's objects as the pickle describes them."""
        content = read_regular(path, MAX_METADATA_BYTES, "a description")
        if METADATA_NAME in self._digests:
            self._digests[METADATA_NAME].check(path, content)
        loaded = load_restricted(content, _allowed(), str(path))
        if not isinstance(loaded, Metadata) or not isinstance(loaded.storage_data, dict):
            raise CheckpointError(f"{path}: holds no DCP metadata.")
        offsets: dict[str, set[int]] = {}
        for info in loaded.storage_data.values():
            _check_inside(path, info.relative_path)
            offsets.setdefault(info.relative_path, set()).add(info.offset)
        self._places = {name: sorted(own) for name, own in offsets.items()}
        # Indices are compared by class, too: torch looks them up as its own.
        loaded.storage_data = {
            MetadataIndex(index.fqn, index.offset, index.index): info for index, info in loaded.storage_data.items()
        }
        if loaded.storage_meta is None:
            loaded.storage_meta = dcp.StorageMeta()
        loaded.storage_meta.load_id = self.load_id
        return loaded


def _check_inside(path: pathlib.Path, name: str) -> None:
    relative = pathlib.PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(f"{path}: points to {name!r}, outside its folder.")


class SafePlanner(DefaultLoadPlanner):
    """A ``DefaultLoadPlanner`` whose non-tensor entries are read with ``weights_only=True``."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
