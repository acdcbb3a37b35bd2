"""Writing DCP folders through torch: with digests of what was written, and errors that say what the disk lacks."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, cast

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from ....checkpoint.digests import FileDigest
from ....checkpoint.disk_space import telling_full_disk
from ....checkpoint.formats.dcp.metadata import METADATA_NAME
from ....checkpoint.formats.torch_save.zip_file import directory_digest
from .aligned_file import AlignedFile, Place, in_writing_order, places
from .metadata_writer import can_write, write_metadata
from .packed_plans import in_torchs_form
from .written_parts import Written, parts_of


class _TellingFileSystem(FileSystem):
    """Files whose errors name them."""

    num_bytes: int | None = None
    """Of the file that is written next, where that is known."""
    wanted: Sequence[Place | None] = ()
    """Where the records of the file that is written next are to lie, if that matters for any of them."""
    gaps: Mapping[int, int] = MappingProxyType({})
    """Before the records of the last file, see `AlignedFile`."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with telling_full_disk(Path(path), self.num_bytes):
            if any(self.wanted) and mode == "wb":
                with AlignedFile(Path(path), self.wanted) as aligned:
                    self.gaps = aligned.gaps
                    yield cast("io.IOBase", aligned)
            else:
                with super().create_stream(path, mode) as stream:
                    yield stream


class FolderWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that tells of a full disk, and knows afterwards what it has written.

    Args:
        folder: Where to write.
        known_as: What ``.metadata`` says of where that was; the folder by default.
    """

    def __init__(self, folder: Path, known_as: Path | None = None) -> None:
        super().__init__(folder)
        self._known_as = known_as or folder
        self.fs = self._files = _TellingFileSystem()
        self.digests: dict[str, FileDigest] = {}
        """On rank 0, of all ranks' files, when they are written; of ``.metadata``, too."""

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files, items = self._files, in_writing_order(plan.items)
        files.num_bytes, files.wanted, files.gaps = sum(map(_num_bytes, items)), places(items), {}
        try:
            results = super().write_data(replace(plan, items=items), planner).wait()
        finally:
            files.num_bytes, files.wanted = None, ()
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._with_digests([_without_gap(one, files.gaps) for one in results]))
        return written

    def _with_digests(self, results: list[WriteResult]) -> list[WriteResult]:
        """Look at the ends of the records, which the system has in memory still."""
        by_file: dict[str, list[WriteResult]] = {}
        for one in results:
            by_file.setdefault(one.storage_data.relative_path, []).append(one)
        written: list[WriteResult] = []
        for name, own in by_file.items():
            path = Path(self.path) / name
            with path.open("rb") as stream:
                fd, what = stream.fileno(), str(path)
                for one in own:
                    place = one.storage_data
                    digest = directory_digest(fd, place.offset, place.length, what)
                    written.append(Written(one.index, one.size_in_bytes, place, digest))
        return written

    def _write(self, metadata: Metadata, results: Sequence[Iterable[WriteResult]]) -> None:
        """Do as torch does, with a pickle that is written piece by piece."""
        if _VERSION is not None:
            metadata.version = _VERSION
        metadata.storage_meta = self.storage_meta()
        path = Path(self.path) / METADATA_NAME
        temporary = path.with_name(f"{METADATA_NAME}.tmp")
        with self._files.create_stream(temporary, "wb") as stream:
            write_metadata(cast("BinaryIO", stream), metadata, results)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._known_as, save_id=self.save_id)

    @override
    def finish(self, metadata: Metadata, results: Sequence[Iterable[WriteResult]]) -> None:
        if can_write(metadata):
            self._write(metadata, results)
        else:
            super().finish(in_torchs_form(metadata), [list(own) for own in results])
        records: dict[str, list[tuple[int, int, int]]] = {}
        for part in parts_of(results):
            for file, offset, length, digest in part.digests():
                records.setdefault(file, []).append((offset, length, digest))
        for name, own in records.items():
            own.sort()
            end = own[-1][0] + own[-1][1]
            self.digests[name] = FileDigest.of_records(end, [digest for _, _, digest in own])
        with (Path(self.path) / METADATA_NAME).open("rb") as stream:
            self.digests[METADATA_NAME] = FileDigest.of_stream(stream)


def _without_gap(result: WriteResult, gaps: Mapping[int, int]) -> WriteResult:
    """Return a record as it lies in its file: torch took the gap before it for its beginning."""
    place = result.storage_data
    gap = gaps.get(place.offset, 0)
    place = replace(place, offset=place.offset + gap, length=place.length - gap)
    return replace(result, size_in_bytes=place.length, storage_data=place)


_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # none in older versions of torch
_RECORD_BYTES = 1200  # what torch puts around a tensor, about


def _num_bytes(item: WriteItem) -> int:
    """Return the size of what is to be written, about."""
    if item.tensor_data is None:
        return _RECORD_BYTES
    sizes = item.tensor_data.chunk.sizes if item.tensor_data.chunk is not None else item.tensor_data.size
    return sizes.numel() * item.tensor_data.properties.dtype.itemsize + _RECORD_BYTES
