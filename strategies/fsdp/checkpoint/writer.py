"""Writing a sharded checkpoint: each rank its shards, rank 0 the rest.

Each rank writes by its own plan, and reports to rank 0 what and where, once; rank 0 completes the folder, and reports
to the others. Nobody waits for anybody before, and no Python object is sent in a collective.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import Buffer, override

from ....checkpoint.files import telling_full_disk
from ....checkpoint.formats.base import is_optimizer_key
from ....checkpoint.formats.dcp_metadata import METADATA_NAME
from ....checkpoint.formats.torch_save import directory_digest
from ....checkpoint.manifest import FileDigest, Manifest, write_manifest
from ....checkpoint.writing.plan import LINK_BYTES, first_element, middle
from ...common.checkpoint_files import NewFolder
from ...common.rendezvous import format_errors_by_rank, store_messages
from .planner import (
    CachedPlan,
    LocalSavePlanner,
    MergedPlan,
    PlanMessage,
    RankResults,
    SavePlanCache,
    WriteLocations,
    Written,
    can_write,
    in_torchs_form,
    parts_of,
    pickle_metadata,
)

METADATA_FILE = "meta.pt"
"""Everything beside weights and optimizer state, in a sharded checkpoint; Lightning's name for it."""


@dataclass
class _Report:
    """What a rank has to say of its part."""

    plan: PlanMessage | None = None
    places: WriteLocations | None = None
    error: str | None = None


def save_sharded(
    folder: NewFolder,
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
    writer = FolderWriter(folder.unfinished)

    def finish(reports: list[_Report]) -> list[str]:
        """What rank 0 does when it knows what all have done."""
        if problems := format_errors_by_rank([[one.error] if one.error else [] for one in reports]):
            folder.drop()  # before the others learn of it
            return problems
        merged = plans.merge([one.plan for one in reports if one.plan is not None])
        places = [one.places for one in reports if one.places is not None]
        finish_folder(folder, writer, merged, places, metadata, manifest)
        return []

    made = messages.broadcast_from_rank_zero(folder.begin, f"preparing {folder.unfinished}")
    kept = error = None
    try:
        try:
            folder.check_shared(made)
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
    with telling_full_disk(path, len(metadata)):
        path.write_bytes(metadata)


def finish_folder(
    folder: NewFolder,
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
    results = [RankResults(indices, own) for indices, own in zip(merged.indices, places, strict=True)]
    writer.finish(merged.metadata, results)
    folder.finish(partial(_complete, writer, metadata, manifest))


def _complete(writer: FolderWriter, metadata: bytes, manifest: Manifest, unfinished: Path) -> None:
    write_metadata(unfinished, metadata)
    write_manifest(
        unfinished,
        ties=manifest.ties,
        model_prefix=manifest.model_prefix,
        module_attribute=manifest.module_attribute,
        digests={METADATA_FILE: FileDigest.of(metadata), **writer.digests},
    )


def serialised_on_rank_zero(metadata: Mapping[str, Any], what: str) -> bytes:
    """Return the metadata file's content, which rank 0 alone needs: a snapshot, whatever is changed afterwards.

    Raises:
        RuntimeError: On every rank, if something cannot be pickled.
    """
    buffer = io.BytesIO()
    store_messages().broadcast_from_rank_zero(lambda: torch.save(dict(metadata), buffer), what)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------
# Writing DCP folders through torch: with digests of what was written, and errors that say what the disk lacks.


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
            pickle_metadata(cast("BinaryIO", stream), metadata, results)
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


# ------------------------------------------------------------------------------------------------
# A file of DCP whose large tensors lie so that a merge can link them into its output instead of copying them.
#
# File systems link whole blocks. A piece of a tensor is moved to the place within a block that it has in the tensor; a
# merged file lets the tensor begin with a block (`checkpoint/writing/plan.py`). What was in between is a gap between
# two records, which readers skip: each record is found by its offset.
#
# torch's ``torch.utils.serialization.config.save.storage_alignment`` is one for all threads of a process, and counts
# from the record's beginning. So where in its record a tensor lies is seen when torch writes it.


_SHARE = 1000  # of a file's bytes, at most one in this many is in a gap
_HEAD_BYTES = 64 * 1024  # what comes before a tensor in its record; torch 2.13 writes less than 1 KB


@dataclass(frozen=True)
class Place:
    """Where a record's tensor is to lie."""

    phase: int
    """Within a block."""
    num_bytes: int
    """Of the tensor."""


def in_writing_order(items: Sequence[WriteItem]) -> list[WriteItem]:
    """Return a file's items in the order in which torch writes them with a GPU; without one it keeps any order.

    Source: torch 2.13 ``distributed/checkpoint/filesystem.py`` (``_OverlappingCpuLoader``).
    """
    return sorted(items, key=_full_bytes)


def _full_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return -1 if data is None else data.size.numel() * data.properties.dtype.itemsize


def places(items: Sequence[WriteItem]) -> list[Place | None]:
    """Return the places of a file's records, None where any will do.

    As many are chosen as gaps of one block fit into a thousandth of the file: weights first, since they are what is
    merged, and the largest of them.
    """
    found = [_place(item) for item in items]
    most = sum(place.num_bytes for place in found if place is not None) // (_SHARE * LINK_BYTES)
    large = [
        (is_optimizer_key(items[number].index.fqn.split(".")[0]), -place.num_bytes, number)
        for number, place in enumerate(found)
        if place is not None and middle(place.phase, place.phase, place.num_bytes) != (0, 0)
    ]
    chosen = {number for _, _, number in sorted(large)[:most]}
    return [place if number in chosen else None for number, place in enumerate(found)]


def _place(item: WriteItem) -> Place | None:
    data = item.tensor_data
    if data is None:
        return None
    itemsize = data.properties.dtype.itemsize
    first = first_element(data.size, data.chunk.offsets, data.chunk.sizes)
    return None if first is None else Place(first * itemsize % LINK_BYTES, data.chunk.sizes.numel() * itemsize)


class AlignedFile(io.BufferedWriter):
    """A file into which torch writes records, asking for the position before and after each of them.

    A record's first bytes are held back until its tensor comes, and then begin where the tensor gets to its place. So
    torch takes the gap for the record's first bytes; see `gaps`.

    Args:
        path: Is written anew.
        wanted: The places of the records, in their order.
    """

    def __init__(self, path: Path, wanted: Sequence[Place | None]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._wanted = iter(wanted)
        self._place: Place | None = None
        self._held: list[bytes] = []
        self._num_held = 0
        self._start = 0
        self._is_between = True
        self.gaps: dict[int, int] = {}
        """Where a record was begun, as torch has it, and how many bytes of nothing came first."""

    @override
    def tell(self) -> int:
        self._is_between = True
        return super().tell() + self._num_held

    @override
    def write(self, data: Buffer, /) -> int:
        if self._is_between:
            self._begin()
        place = self._place
        if place is None:
            return super().write(data)
        num_bytes = memoryview(data).nbytes
        if num_bytes == place.num_bytes:
            gap = (place.phase - super().tell() - self._num_held) % LINK_BYTES
            super().write(bytes(gap))
            self.gaps[self._start] = gap
        elif self._num_held + num_bytes <= _HEAD_BYTES:
            self._held.append(bytes(data))
            self._num_held += num_bytes
            return num_bytes
        self._release()
        return super().write(data)

    def _begin(self) -> None:
        self._release()
        self._is_between = False
        self._place = next(self._wanted, None)
        self._start = super().tell()

    def _release(self) -> None:
        """Write what was held back; the record goes on without further looks."""
        held, self._held, self._num_held, self._place = self._held, [], 0, None
        for data in held:
            super().write(data)

    @override
    def flush(self) -> None:
        if not self.closed:
            self._release()
        super().flush()
