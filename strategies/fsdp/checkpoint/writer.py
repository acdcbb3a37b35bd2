"""Writing a sharded checkpoint: each rank its shards, rank 0 the rest.

Each rank writes by its own plan, and reports to rank 0 what and where, once; rank 0 completes the folder, and reports
to the others. Nobody waits for anybody before, and no Python object is sent in a collective.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from ....checkpoint.files import translate_full_disk
from ....checkpoint.formats.dcp_metadata import METADATA_NAME
from ....checkpoint.formats.torch_save import directory_digest
from ....checkpoint.manifest import MANIFEST_NAME, FileDigest, Manifest, manifest_text, save_manifest
from ....checkpoint.storage import ObjectFolder
from ....state.rendezvous import format_errors_by_rank, store_messages
from ...common.checkpoint_files import NewFolder, NewGeneration, ObjectStreams
from .planner import (
    CachedPlan,
    LocalSavePlanner,
    MergedPlan,
    PlanMessage,
    SavePlanCache,
    WriteLocations,
    Written,
)

METADATA_FILE = "meta.pt"
"""Everything beside weights and optimizer state, in a sharded checkpoint; Lightning's name for it."""


@dataclass
class _Report:
    """A rank's report of its part."""

    plan: PlanMessage | None = None
    places: WriteLocations | None = None
    error: str | None = None


def save_sharded(
    folder: NewFolder | NewGeneration,
    state: dict[str, Any],
    metadata: bytes,
    manifest: Manifest,
    plans: SavePlanCache,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write one folder, every rank its own shards; it has its name only when it is complete.

    Args:
        folder: Where; a checkpoint that is there already is replaced, last of all.
        state: Weights under the engine's key, and optimizer state under ``optimizer_0`` and so on.
        metadata: The file for everything else, written by rank 0.
        manifest: For the merger.
        plans: Of earlier saves, for states of the same form; a new one is kept.
        group: Through which the ranks notice who ends; the default group by default.

    Raises:
        RuntimeError: On every rank, if any rank failed; it names the rank.
    """
    path, messages, what = folder.path, plans.messages, f"saving {folder.path}"
    writer: FolderWriter

    def finish(reports: list[_Report]) -> list[str]:
        """Complete the folder; on rank 0, when all ranks have reported."""
        if problems := format_errors_by_rank([[one.error] if one.error else [] for one in reports]):
            folder.drop()  # before the others learn of it
            return problems
        merged = plans.merge([one.plan for one in reports if one.plan is not None])
        places = [one.places for one in reports if one.places is not None]
        finish_checkpoint(folder, writer, merged, places, metadata, manifest)
        return []

    made = messages.broadcast_from_rank_zero(folder.begin, f"preparing {folder.unfinished}")
    kept = error = None
    try:
        try:
            folder.check_shared(made)
            writer = ObjectWriter(folder) if isinstance(folder, NewGeneration) else FolderWriter(folder.unfinished)
            kept, report = _write(state, writer, plans)
        except Exception as caught:  # noqa: BLE001 (raised on all ranks when rank 0 has sent it)
            report, error = _Report(error=f"{type(caught).__name__}: {caught}"), caught
        problems = messages.gather_then_broadcast(report, finish, f"finishing {path}", group or dist.group.WORLD)
        if problems or kept is None:
            raise RuntimeError("\n".join([f"{what} failed.", *problems])) from error
        plans.keep(kept)
        folder.finish_own()
    except BaseException:
        folder.drop_own()
        raise


def _write(state: dict[str, Any], writer: FolderWriter, plans: SavePlanCache) -> tuple[CachedPlan, _Report]:
    """Write this rank's part."""
    rank, planner = dist.get_rank(), LocalSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=rank == 0)
    kept = plans.of(planner)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    plan = planner.finish_plan(kept.plan)
    return kept, _Report(plans.message(kept), WriteLocations.of(plan, writer.write_data(plan, planner).wait()))


def write_metadata(folder: Path, metadata: bytes) -> None:
    """Write the file for everything beside weights and optimizer state."""
    path = folder / METADATA_FILE
    with translate_full_disk(path, len(metadata)):
        path.write_bytes(metadata)


def finish_checkpoint(
    folder: NewFolder | NewGeneration,
    writer: FolderWriter,
    merged: MergedPlan,
    places: Sequence[WriteLocations],
    metadata: bytes,
    manifest: Manifest,
) -> None:
    """Write the description of all ranks' parts, when they are written, and give the folder its name; on one process.

    Args:
        folder: Where they are.
        writer: Into it.
        merged: What all ranks were to write.
        places: Where each rank wrote its part.
        metadata: The file for everything else.
        manifest: For the merger.
    """
    results = [own.results(indices) for indices, own in zip(merged.indices, places, strict=True)]
    writer.finish(merged.metadata, results)
    if isinstance(folder, NewFolder):
        folder.finish(partial(_complete, writer, metadata, manifest))
        return
    digests = {METADATA_FILE: FileDigest.of(metadata), **writer.digests}
    text = manifest_text(replace(manifest, digests=digests))
    contents = {METADATA_FILE: metadata, MANIFEST_NAME: text.encode()}
    folder.commit(contents, METADATA_NAME, cast("ObjectWriter", writer).description)


def _complete(writer: FolderWriter, metadata: bytes, manifest: Manifest, unfinished: Path) -> None:
    write_metadata(unfinished, metadata)
    digests = {METADATA_FILE: FileDigest.of(metadata), **writer.digests}
    save_manifest(unfinished, replace(manifest, digests=digests))


def serialised_on_rank_zero(metadata: Mapping[str, Any], what: str) -> bytes:
    """Return the metadata file's content, which rank 0 alone needs: a snapshot, whatever is changed afterwards.

    Raises:
        RuntimeError: On every rank, if something cannot be pickled.
    """
    buffer = io.BytesIO()
    store_messages().broadcast_from_rank_zero(lambda: torch.save(dict(metadata), buffer), what)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------
# Writing DCP folders through torch, with digests, and with errors that name the missing disk space.


class _TellingFileSystem(FileSystem):
    """Files whose errors name them."""

    num_bytes: int | None = None
    """Of the file that is written next, where that is known."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with translate_full_disk(Path(path), self.num_bytes), super().create_stream(path, mode) as stream:
            yield stream


class FolderWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that reports a full disk, and knows afterwards what it has written.

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
        self._files.num_bytes = sum(map(_num_bytes, plan.items))
        try:
            results = super().write_data(plan, planner).wait()
        finally:
            self._files.num_bytes = None
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._with_digests(results))
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
                    digest = directory_digest(partial(os.pread, fd), place.offset, place.length, what)
                    written.append(Written(one.index, one.size_in_bytes, place, digest))
        return written

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._known_as, save_id=self.save_id)

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(replace(metadata), results)  # which puts the places into it
        self._digest_records(results)
        with (Path(self.path) / METADATA_NAME).open("rb") as stream:
            self.digests[METADATA_NAME] = FileDigest.of_stream(stream)

    def _digest_records(self, results: list[list[WriteResult]]) -> None:
        records: dict[str, list[tuple[int, int, int]]] = {}
        for one in chain.from_iterable(results):
            if isinstance(one, Written):
                place = one.storage_data
                records.setdefault(place.relative_path, []).append((place.offset, place.length, one.digest))
        for name, own in records.items():
            own.sort()
            end = own[-1][0] + own[-1][1]
            self.digests[name] = FileDigest.of_records(end, [digest for _, _, digest in own])


_RECORD_BYTES = 1200  # what torch puts around a tensor, about


def _num_bytes(item: WriteItem) -> int:
    """Return the size of what is to be written, about."""
    if item.tensor_data is None:
        return _RECORD_BYTES
    sizes = item.tensor_data.chunk.sizes if item.tensor_data.chunk is not None else item.tensor_data.size
    return sizes.numel() * item.tensor_data.properties.dtype.itemsize + _RECORD_BYTES


# ------------------------------------------------------------------------------------------------
# The same into an object store: streams in parts, several at once, and nothing is read back.


_NUM_STREAMS = 4
"""Of a rank. A stream sends one part after the other, and holds two of 8 MiB at most."""
_END_BYTES = 64 * 1024


class ObjectWriter(FolderWriter):
    """Writes a rank's part into a generation; see [Note: generations] in ``checkpoint/storage.py``.

    Args:
        folder: Begun.
    """

    def __init__(self, folder: NewGeneration) -> None:
        FileSystemWriter.__init__(self, ".", sync_files=False, thread_count=_NUM_STREAMS)
        self._generation, self._objects = folder.generation, folder.objects
        self.fs = self._streams = _DigestedStreams(folder.objects)
        self.path = folder.generation
        self.digests = {}
        self.description = b""
        """On rank 0: ``.metadata``, when all is written."""

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        results = FileSystemWriter.write_data(self, plan, planner).wait()
        if self._streams.error is not None:
            raise self._streams.error
        written.set_result(self._with_digests(results))
        return written

    @override
    def _with_digests(self, results: list[WriteResult]) -> list[WriteResult]:
        written: list[WriteResult] = []
        for one in results:
            place, name = one.storage_data, f"{self._generation}/{one.storage_data.relative_path}"
            digest = self._streams.digests.get((name, place.offset))
            if digest is None:  # its directory is longer than what was kept of it
                digest = directory_digest(partial(self._read, name), place.offset, place.length, self._objects / name)
            written.append(Written(one.index, one.size_in_bytes, replace(place, relative_path=name), digest))
        return written

    def _read(self, name: str, num_bytes: int, offset: int) -> bytes:
        return self._objects.read(name, offset, offset + num_bytes)

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._objects.url, save_id=self.save_id)

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        described = replace(metadata, storage_meta=self.storage_meta())
        described.version = CURRENT_DCP_VERSION
        described.storage_data = {one.index: one.storage_data for one in chain.from_iterable(results)}
        self.description = pickle.dumps(described)
        self._digest_records(results)
        self.digests[METADATA_NAME] = FileDigest.of(self.description)


class _DigestedStreams(ObjectStreams):
    """Streams into a generation's objects, and digests of the records in them."""

    def __init__(self, objects: ObjectFolder) -> None:
        super().__init__(objects)
        self.digests: dict[tuple[str, int], int] = {}
        """By object and offset."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            records = _RecordStream(cast("IO[bytes]", stream), str(path), self.digests)
            yield records
            records.end_record()


class _RecordStream(io.RawIOBase):
    """Passes on what torch writes, and digests each record: torch asks for the position between them."""

    def __init__(self, stream: IO[bytes], name: str, digests: dict[tuple[str, int], int]) -> None:
        super().__init__()
        self._stream, self._name, self._digests = stream, name, digests
        self._position = self._begin = 0
        self._end = b""
        """The last bytes that were written."""

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._end = (self._end + bytes(view[-_END_BYTES:]))[-_END_BYTES:]
        self._position += len(view)
        return len(view)

    @override
    def tell(self) -> int:
        self.end_record()
        return self._position

    def end_record(self) -> None:
        """Take the digest of what was written since the last record."""
        if self._position == self._begin:
            return
        begins = self._position - len(self._end)

        def read(num_bytes: int, offset: int) -> bytes:
            if offset < begins:
                raise EOFError
            return self._end[offset - begins : offset - begins + num_bytes]

        with suppress(EOFError):
            length = self._position - self._begin
            self._digests[self._name, self._begin] = directory_digest(read, self._begin, length, self._name)
        self._begin = self._position
