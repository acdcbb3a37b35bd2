"""Plans of sharded saves, cached: which rank writes what stays the same while names, shapes and meshes do.

torch's planning sends rank 0 a description of each piece of each rank, and all of them back, at each save, in
collectives of objects. Here each rank plans its own part, and reports to rank 0 once.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from math import prod
from typing import Any, BinaryIO, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from typing_extensions import Self, override

from ...common.rendezvous import StoreMessages, store_messages
from ...common.sharded_tensors import FlatShard
from ...upstream.torch_core import ShardedTensor, _StorageInfo, _StoragePrefix

_MOST_PLANS = 2  # with and without optimizers, as a rule


@dataclass(frozen=True)
class PlanMessage:
    """A rank's message to rank 0 about the plan that it writes by."""

    number: int
    packed: PackedPlan | None
    """None if rank 0 has it from an earlier save."""
    kept: tuple[int, ...]
    """Numbers of the rank's plans that may come again."""


@dataclass
class CachedPlan:
    """What a rank writes of states of one form."""

    number: int
    """No other plan of this rank has it."""
    form: Any
    """Equal for states to which the plan fits."""
    plan: SavePlan
    packed: PackedPlan | None
    """Until rank 0 has it."""


class SavePlanCache:
    """The last plans of one model; on rank 0 also the other ranks' plans."""

    def __init__(self) -> None:
        self.number = 0
        """Of the model, the same on all ranks; 0 before that is agreed on."""
        self._plans: list[CachedPlan] = []
        self._group: dist.ProcessGroup | None = None
        self._num_plans = 0
        self._received: dict[int, dict[int, PackedPlan]] = {}
        self._merged: dict[tuple[int, ...], MergedPlan] = {}
        self._num_merged = 0

    @property
    def messages(self) -> StoreMessages:
        """Of whichever thread writes this model's checkpoints; another model's may write at the same time."""
        return store_messages(f"the saves of model {self.number}")

    def of(self, planner: LocalSavePlanner) -> CachedPlan:
        """Return the plan for the state that ``planner`` was given: one that is kept, or a new one."""
        if self._group is not dist.group.WORLD:
            self._group = dist.group.WORLD
            self._plans.clear()
            self._received.clear()
            self._merged.clear()
        form = form_of(planner)
        found = next((one for one in self._plans if one.form == form), None)
        if found is not None:
            return found
        local = planner.create_local_plan()
        self._num_plans += 1
        plan = SavePlan(local.items, storage_data=_StoragePrefix(f"__{dist.get_rank()}_"))
        return CachedPlan(self._num_plans, form, plan, PackedPlan.of(local))

    def message(self, plan: CachedPlan) -> PlanMessage:
        """Return the message to rank 0 about a plan."""
        return PlanMessage(plan.number, plan.packed, tuple(one.number for one in self._with(plan)))

    def keep(self, plan: CachedPlan) -> None:
        """Keep a plan by which a checkpoint was saved; every rank calls it."""
        plan.packed = None
        self._plans = self._with(plan)

    def _with(self, plan: CachedPlan) -> list[CachedPlan]:
        return [plan, *(one for one in self._plans if one is not plan)][:_MOST_PLANS]

    def merge(self, messages: Sequence[PlanMessage]) -> MergedPlan:
        """Return what all ranks write together; on rank 0.

        Args:
            messages: By each rank.

        Raises:
            ValueError: If it is not one whole.
        """
        for rank, one in enumerate(messages):
            plans = self._received.setdefault(rank, {})
            if one.packed is not None:
                plans[one.number] = one.packed
            self._received[rank] = {number: plan for number, plan in plans.items() if number in one.kept}
        key = tuple(one.number for one in messages)
        merged = self._merged.pop(key, None)
        if merged is None or any(one.packed is not None for one in messages):
            self._num_merged += 1
            merged = merge_plans(
                self._num_merged, [self._received[rank][one.number] for rank, one in enumerate(messages)]
            )
        self._merged = dict(list({key: merged, **self._merged}.items())[:_MOST_PLANS])
        return merged

    @property
    def merged_numbers(self) -> list[int]:
        """Of what was merged and may come again; on rank 0."""
        return [one.number for one in self._merged.values()]


def form_of(planner: LocalSavePlanner) -> Any:
    """Return what decides a plan: of each entry its name, its place in the state, and how it is sharded.

    Args:
        planner: Which was given the state.
    """
    return dict(planner.mappings), {name: _form(value) for name, value in planner.state_dict.items()}


def _form(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.metadata()
    if isinstance(value, FlatShard):
        return value.dtype, value.place
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value.requires_grad, value.placements, value.device_mesh
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, value.layout
    return None


# ------------------------------------------------------------------------------------------------
# Who writes what of a sharded checkpoint: each rank knows its own part, and asks nobody.


def replica_of(tensor: DTensor | FlatShard) -> tuple[int, int]:
    """Return which of how many equal copies of its shard this rank holds."""
    if isinstance(tensor, FlatShard):
        return tensor.place.replica, tensor.place.num_replicas
    mesh, index, count = tensor.device_mesh, 0, 1
    place = mesh.get_coordinate() or [0] * mesh.ndim  # not get_local_rank(), which asks the groups
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            index, count = index * mesh.size(dim) + place[dim], count * mesh.size(dim)
    return index, count


class LocalSavePlanner(DefaultSavePlanner):
    """Plans a rank's part so that all parts are the whole, each piece once.

    Rank 0 writes whatever is unsharded: buffers and metrics may differ, and must fit each other. (torch 2.13 takes each
    such tensor from the rank that has the least to write, BatchNorm's mean from one and its variance from another.)
    Where several ranks hold equal copies of a shard, they share its group's shards by their sizes: each of them knows
    all sizes, and comes to the same result.
    """

    @override
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = plan = dataclasses.replace(plan, items=self._own(plan.items))
        return plan

    def _own(self, items: Sequence[WriteItem]) -> list[WriteItem]:
        own: list[WriteItem] = []
        planned: dict[Any, list[int]] = {}
        for item in items:
            value, data = self.state_dict[item.index.fqn], item.tensor_data
            if not isinstance(value, DTensor | ShardedTensor | FlatShard) or data is None:
                if self.is_coordinator:
                    own.append(item)
                continue
            num_elements = data.chunk.sizes.numel()
            if not num_elements:
                if not data.size.numel() and dist.get_rank() == _first_rank(value):
                    own.append(item)  # else it would be nobody's
                continue
            if isinstance(value, ShardedTensor):
                own.append(item)
                continue
            replica, num_replicas = replica_of(value)
            loads = planned.setdefault(_replicas(value), [0] * num_replicas)
            writer = loads.index(min(loads))
            loads[writer] += num_elements * data.properties.dtype.itemsize
            if writer == replica:
                own.append(item)
        return own


def _first_rank(value: DTensor | ShardedTensor | FlatShard) -> int:
    return int(value.device_mesh.mesh.min()) if isinstance(value, DTensor) else 0


def _replicas(tensor: DTensor | FlatShard) -> Any:
    """Return what is the same for tensors that the same ranks hold equal copies of."""
    if isinstance(tensor, FlatShard):
        return tensor.place.num_replicas
    return tensor.device_mesh, tuple(dim for dim, one in enumerate(tensor.placements) if one.is_replicate())


# ------------------------------------------------------------------------------------------------
# The reports of ranks about their parts, and the description of the whole checkpoint that rank 0 makes of them.
#
# torch's own objects take about 1 KB a piece, in the process that has those of all ranks. Here numbers stay numbers,
# and objects are made when something is written.


_BYTES = -1
"""Stands for the form of what is no tensor."""
_MOST_NAMED = 10
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@dataclass
class PackedPlan:
    """What one rank writes."""

    names: list[str] = field(default_factory=list)
    paths: list[tuple[str | int, ...]] = field(default_factory=list)
    """Of the names: where in the state their entries are."""
    forms: list[tuple[TensorProperties, torch.Size]] = field(default_factory=list)
    """Of tensors: properties, and the size of the whole."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Of each item: the numbers of its name and form, and a tensor's offsets and sizes."""
    num_items: int = 0

    @classmethod
    def of(cls, plan: SavePlan) -> Self:
        """Pack a plan, with the paths of its entries as ``planner_data``."""
        packed = cls()
        names: dict[str, int] = {}
        forms: dict[Any, int] = {}
        for item in plan.items:
            fqn, data = item.index.fqn, item.tensor_data
            if fqn not in names:
                names[fqn] = len(names)
                packed.names.append(fqn)
                packed.paths.append(tuple(plan.planner_data[fqn]))
            packed.num_items += 1
            if data is None:
                packed.numbers.extend((names[fqn], _BYTES))
                continue
            like = data.properties
            key = like.dtype, like.layout, like.requires_grad, like.memory_format, like.pin_memory, data.size
            if key not in forms:
                forms[key] = len(forms)
                packed.forms.append((like, data.size))
            packed.numbers.extend((names[fqn], forms[key], *data.chunk.offsets, *data.chunk.sizes))
        return packed

    def items(self) -> Iterator[tuple[str, int, Box | None]]:
        """Yield of each item its name, its form's number, and its box; None for what is no tensor."""
        numbers, at = self.numbers, 0
        num_dims = [len(size) for _, size in self.forms]
        for _ in range(self.num_items):
            name, form = numbers[at : at + 2]
            at += 2
            if form == _BYTES:
                yield self.names[name], form, None
                continue
            between, end = at + num_dims[form], at + 2 * num_dims[form]
            yield self.names[name], form, (tuple(numbers[at:between]), tuple(numbers[between:end]))
            at = end


class Chunks(Sequence[ChunkStorageMetadata]):
    """A tensor's boxes."""

    def __init__(self, num_dims: int) -> None:
        self._num_dims, self._numbers, self._num = num_dims, array("q"), 0

    def append(self, box: Box) -> None:
        """Add one."""
        for part in box:
            self._numbers.extend(part)
        self._num += 1

    def boxes(self) -> Iterator[Box]:
        """Yield all."""
        step, numbers = self._num_dims, self._numbers
        for number in range(self._num):
            at = 2 * number * step
            yield tuple(numbers[at : at + step]), tuple(numbers[at + step : at + 2 * step])

    def __len__(self) -> int:
        """Return how many there are."""
        return self._num

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        """Yield all, as torch has them."""
        for offsets, sizes in self.boxes():
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...

    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        """Return one, or some."""
        return list(self)[index]


class Indices:
    """What a rank writes, as torch names it."""

    def __init__(self, plan: PackedPlan, hints: array[int]) -> None:
        self._plan, self._hints = plan, hints

    def __len__(self) -> int:
        """Return how many there are."""
        return self._plan.num_items

    def rows(self) -> Iterator[tuple[str, tuple[int, ...] | None, int | None]]:
        """Yield of each its name, and of a tensor's part where it begins and its number among all parts."""
        for (name, _, box), hint in zip(self._plan.items(), self._hints, strict=True):
            yield (name, None, None) if box is None else (name, box[0], hint)

    def __iter__(self) -> Iterator[MetadataIndex]:
        """Yield all."""
        for name, offsets, hint in self.rows():
            yield MetadataIndex(name) if offsets is None else MetadataIndex(name, torch.Size(offsets), hint)


@dataclass(frozen=True)
class MergedPlan:
    """What all ranks write together."""

    number: int
    """No other one of this model has it."""
    metadata: Metadata
    """Of the whole checkpoint, without the places of its pieces."""
    indices: Sequence[Indices]
    """What each rank writes, in its plan's order."""


def merge_plans(number: int, plans: Sequence[PackedPlan]) -> MergedPlan:
    """Put together what all ranks write, in their order.

    Raises:
        ValueError: If a tensor is not whole then, or has a part twice; it names the first ones.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    boxes: dict[str, Chunks] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    indices: list[Indices] = []
    problems: list[str] = []
    for rank, plan in enumerate(plans):
        hints = array("q")
        for name, path in zip(plan.names, plan.paths, strict=True):
            paths.setdefault(name, path)
        for name, form, box in plan.items():
            entry = entries.get(name)
            if box is None:
                if entry is not None:
                    problems.append(f"{name!r} is written twice, the second time by process {rank}")
                entries[name] = BytesStorageMetadata()
                hints.append(0)
                continue
            like, size = plan.forms[form]
            if entry is None:
                boxes[name] = chunks = Chunks(len(size))
                entry = entries[name] = TensorStorageMetadata(like, size, cast("list[ChunkStorageMetadata]", chunks))
            if isinstance(entry, BytesStorageMetadata) or (entry.size, entry.properties.dtype) != (size, like.dtype):
                problems.append(f"{name!r} is {like.dtype} {tuple(size)} on process {rank}, and another before")
                hints.append(0)
                continue
            hints.append(len(boxes[name]))
            boxes[name].append(box)
        indices.append(Indices(plan, hints))
    for name, chunks in boxes.items():
        problems += _problems(name, tuple(cast("TensorStorageMetadata", entries[name]).size), list(chunks.boxes()))
    if problems:
        more = f" (and {len(problems) - _MOST_NAMED} more)" if len(problems) > _MOST_NAMED else ""
        raise ValueError(f"the processes' parts are not one whole: {'; '.join(problems[:_MOST_NAMED])}{more}")
    return MergedPlan(number, Metadata(entries, paths), indices)


def in_torchs_form(metadata: Metadata) -> Metadata:
    """Return a description of torch's own classes alone, to be pickled."""
    entries = {
        name: dataclasses.replace(entry, chunks=list(entry.chunks))
        if isinstance(entry, TensorStorageMetadata)
        else entry
        for name, entry in metadata.state_dict_metadata.items()
    }
    return dataclasses.replace(metadata, state_dict_metadata=entries)


def _problems(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> list[str]:
    """Return what keeps boxes from filling a tensor, each element once."""
    for offsets, sizes in boxes:
        if any(at < 0 or at + size > full for at, size, full in zip(offsets, sizes, shape, strict=True)):
            return [f"{name!r} has the shape {shape}, and a part at {offsets} with {sizes}"]
    volume = sum(prod(sizes) for _, sizes in boxes)
    if volume != prod(shape):
        return [f"{name!r} has {prod(shape)} elements, and parts of {volume}"]
    if len(boxes) > 1 and (both := _overlapping(boxes)):
        return [f"{name!r} has parts that overlap, at {both[0]} and at {both[1]}"]
    return []


def _overlapping(boxes: Sequence[Box]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return where two boxes that overlap begin; None if no two do."""
    dims = range(len(boxes[0][0]))
    sweep = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in boxes}), default=0)
    active: list[Box] = []
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][sweep]):
        active = [one for one in active if one[0][sweep] + one[1][sweep] > offsets[sweep]]
        for others_offsets, others_sizes in active:
            if all(
                max(offsets[dim], others_offsets[dim])
                < min(offsets[dim] + sizes[dim], others_offsets[dim] + others_sizes[dim])
                for dim in dims
            ):
                return others_offsets, offsets
        active.append((offsets, sizes))
    return None


# ------------------------------------------------------------------------------------------------
# Where the ranks wrote their parts of a sharded checkpoint, in as few bytes as possible.


_NUM_NUMBERS = 5
Record = tuple[str, "tuple[int, ...] | None", "int | None", str, int, int, Any]
"""Name, beginning in the tensor, hint; file, offset and length there, transforms."""


@dataclass(frozen=True)
class Written(WriteResult):
    """torch's report of a record to rank 0, with its digest."""

    digest: int


@dataclass
class WriteLocations:
    """Where a rank wrote what its plan says."""

    files: list[str]
    numbers: array[int]
    """Of each item of the plan: size of its content, the file's number, offset and length there, digest."""

    @classmethod
    def of(cls, plan: SavePlan, results: Sequence[WriteResult]) -> Self:
        """Pack what ``write_data`` returned for ``plan``."""
        by_index = {one.index: one for one in results if isinstance(one, Written)}  # FolderWriter's all are
        files: dict[str, int] = {}
        numbers = array("q")
        for item in plan.items:
            one = by_index[item.index]
            place = one.storage_data
            number = files.setdefault(place.relative_path, len(files))
            numbers.extend((one.size_in_bytes, number, place.offset, place.length, one.digest))
        return cls(list(files), numbers)

    def __len__(self) -> int:
        """Return how many items there are."""
        return len(self.numbers) // _NUM_NUMBERS

    def rows(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield of each item the size of its content, its file, offset and length there, and digest."""
        numbers, files = self.numbers, self.files
        for at in range(0, len(numbers), _NUM_NUMBERS):
            size, file, offset, length, digest = numbers[at : at + _NUM_NUMBERS]
            yield size, files[file], offset, length, digest


class RankResults(Iterable[WriteResult]):
    """What a rank has written, made of its places whenever it is asked for.

    Args:
        indices: What it was to write.
        places: Where that is, in the same order.

    Raises:
        ValueError: If there are more of one than of the other.
    """

    def __init__(self, indices: Indices, places: WriteLocations) -> None:
        if len(indices) != len(places):
            raise ValueError(f"A process was to write {len(indices)} pieces, and tells of {len(places)}.")
        self.indices, self.places = indices, places

    def __iter__(self) -> Iterator[Written]:
        """Yield what ``write_data`` returned."""
        for index, (size, file, offset, length, digest) in zip(self.indices, self.places.rows(), strict=True):
            yield Written(index, size, _StorageInfo(file, offset, length), digest)

    def files(self) -> Iterable[str]:
        """Return the files that it has written, each at least once."""
        return self.places.files

    def records(self) -> Iterator[Record]:
        """Yield what lies where."""
        for index, (_, file, offset, length, _) in zip(self.indices.rows(), self.places.rows(), strict=True):
            yield (*index, file, offset, length, None)

    def digests(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield file, offset, length and digest of each record."""
        for _, file, offset, length, digest in self.places.rows():
            yield file, offset, length, digest


class TorchsResults:
    """The same of the reports of torch's own planning.

    Args:
        results: What ``write_data`` returned.
    """

    def __init__(self, results: Iterable[WriteResult]) -> None:
        self._results = results

    def files(self) -> Iterable[str]:
        """Return the files that it has written, each at least once."""
        return (one.storage_data.relative_path for one in self._results)

    def records(self) -> Iterator[Record]:
        """Yield what lies where."""
        for one in self._results:
            index, place = one.index, one.storage_data
            where = place.relative_path, place.offset, place.length, place.transform_descriptors
            yield index.fqn, index.offset, index.index, *where

    def digests(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield file, offset, length and digest of each record that has one."""
        for one in self._results:
            if isinstance(one, Written):
                place = one.storage_data
                yield place.relative_path, place.offset, place.length, one.digest


def parts_of(results: Iterable[Iterable[WriteResult]]) -> list[RankResults | TorchsResults]:
    """Return all ranks' parts, whichever rank reports them."""
    return [own if isinstance(own, RankResults) else TorchsResults(own) for own in results]


# ------------------------------------------------------------------------------------------------
# Writing ``.metadata`` piece by piece: the pickle that torch writes, in less time and without its memory.
#
# `pickle.dump` remembers every object until its end: for 640,000 chunks 770 MB and 10 s of the processor, here a few MB
# and 1.4 s. Only what is fetched again has a number: classes, fields, names and files, all of them at the beginning.
# Every reader of the format reads it.
#
# Source: CPython 3.11 ``pickletools.py``; torch 2.13 ``distributed/checkpoint/filesystem.py`` (``FileSystemWriter``).


_FIELDS: dict[type, tuple[str, ...]] = {
    TensorStorageMetadata: ("properties", "size", "chunks"),
    ChunkStorageMetadata: ("offsets", "sizes"),
    MetadataIndex: ("fqn", "index", "offset"),
    _StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
}
"""What is written here, of each class: a torch with other fields has its own pickle written."""
_NEW = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_MEMOIZE, _POP = b"\x94", b"0"
_BATCH = 1000
_INT, _LONG = struct.Struct("<i"), struct.Struct("<I")
_FRAME = b"\x95"


def can_write(metadata: Metadata) -> bool:
    """Whether torch's classes are those that are known here, and names are text."""
    known = all({one.name for one in fields(cls)} == set(names) for cls, names in _FIELDS.items())
    return known and all(type(fqn) is str for fqn in metadata.state_dict_metadata)


def pickle_metadata(stream: BinaryIO, metadata: Metadata, results: Sequence[Iterable[WriteResult]]) -> None:
    """Write a description.

    Args:
        stream: Of the file.
        metadata: As torch plans it, without ``storage_data``.
        results: Where all ranks wrote what; used as ``storage_data``.
    """
    _Writer(stream, metadata, results).write()


class _Writer:
    def __init__(self, stream: BinaryIO, metadata: Metadata, results: Sequence[Iterable[WriteResult]]):
        self._stream = stream
        self._metadata = metadata
        self._parts = parts_of(results)
        self._gets: dict[object, bytes] = {}
        """Opcodes that fetch a class or a text."""
        self._num_memo = 0
        self._fragments: dict[object, bytes] = {}

    def write(self) -> None:
        self._stream.write(b"\x80\x04")
        self._write_memo()
        content = {**vars(self._metadata), "storage_data": None}
        self._stream.write(_global(Metadata) + b")\x81}(")
        for name, value in content.items():
            self._stream.write(_text(name))
            if name == "state_dict_metadata":
                self._write_items(self._gets[fqn] + self._entry(entry) for fqn, entry in value.items())
            elif name == "storage_data":
                self._write_items(self._storage())
            elif name == "planner_data" and isinstance(value, Mapping):
                self._write_items(self._key(fqn) + _pickled(path) for fqn, path in value.items())
            else:
                self._stream.write(_pickled(value))
        self._stream.write(b"ub.")

    def _write_memo(self) -> None:
        """Give a number to all that is fetched."""
        for cls in (*_FIELDS, torch.Size):
            self._remember(cls, _global(cls))
        names = dict.fromkeys(name for own in _FIELDS.values() for name in own)
        files = dict.fromkeys(file for part in self._parts for file in part.files())
        for text in (*names, *self._metadata.state_dict_metadata, *files):
            self._remember(text, _text(text))

    def _remember(self, what: object, pickled: bytes) -> None:
        if what not in self._gets:
            number = self._num_memo
            self._gets[what] = b"h%c" % number if number < 256 else b"j" + _LONG.pack(number)
            self._num_memo += 1
            self._stream.write(pickled + _MEMOIZE + _POP)

    def _key(self, text: str) -> bytes:
        return self._gets.get(text) or _text(text)

    def _write_items(self, items: Iterator[bytes]) -> None:
        """Write a dict of pickled keys with their values."""
        self._stream.write(b"}")
        while batch := b"".join(islice(items, _BATCH)):
            self._stream.write(b"(" + batch + b"u")

    def _entry(self, entry: object) -> bytes:
        """Return an entry of ``state_dict_metadata``."""
        if type(entry) is not TensorStorageMetadata:
            return _pickled(entry)
        gets, chunks = self._gets, cast("Any", entry.chunks)
        boxes = chunks.boxes() if isinstance(chunks, Chunks) else ((one.offsets, one.sizes) for one in chunks)
        chunk = gets[ChunkStorageMetadata] + _NEW + gets["offsets"]
        return b"".join(
            (
                gets[TensorStorageMetadata] + _NEW + gets["properties"] + _pickled(entry.properties),
                gets["size"] + self._size(entry.size) + gets["chunks"] + b"](",
                *(chunk + self._size(offsets) + gets["sizes"] + self._size(sizes) + b"ub" for offsets, sizes in boxes),
                b"eub",
            )
        )

    def _storage(self) -> Iterator[bytes]:
        """Yield the items of ``storage_data``."""
        gets = self._gets
        index_begin = gets[MetadataIndex] + _NEW + gets["fqn"]
        info_begin = gets[_StorageInfo] + _NEW + gets["relative_path"]
        for part in self._parts:
            for fqn, begin, hint, file, offset, length, transforms in part.records():
                key = index_begin + self._key(fqn) + gets["index"] + (b"N" if hint is None else _number(hint))
                if begin is not None:
                    key += gets["offset"] + self._size(begin)
                value = info_begin + gets[file] + gets["offset"] + _number(offset)
                value += gets["length"] + _number(length)
                if transforms is not None:
                    value += gets["transform_descriptors"] + _pickled(transforms)
                yield key + b"ub" + value + b"ub"

    def _size(self, size: tuple[int, ...]) -> bytes:
        """Return a ``torch.Size``; few differ."""
        found = self._fragments.get(size)
        if found is None:
            numbers = b"".join(map(_number, size))
            if not size:
                made = b")"
            elif len(size) <= 3:
                made = numbers + (b"\x85", b"\x86", b"\x87")[len(size) - 1] + _MEMOIZE
            else:
                made = b"(" + numbers + b"t" + _MEMOIZE
            found = self._gets[torch.Size] + made + b"\x85\x94R\x94"
            if len(self._fragments) < 100_000:
                self._fragments[size] = found
        return found


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"\x8c%c" % len(data) + data if len(data) < 256 else b"X" + _LONG.pack(len(data)) + data


def _global(cls: type) -> bytes:
    return _text(cls.__module__) + _text(cls.__qualname__) + b"\x93"


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65_536:
        return b"M%c%c" % (value & 255, value >> 8)
    if -(2**31) <= value < 2**31:
        return b"J" + _INT.pack(value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(data) + data


def _pickled(value: object) -> bytes:
    """Return what puts a value on the stack, whatever the memo holds."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 4)
    pickler.fast = True  # remembers nothing
    pickler.dump(value)
    data = buffer.getvalue()
    return data[11 if data[2:3] == _FRAME else 2 : -1]
