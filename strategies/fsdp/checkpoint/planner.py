"""Plans of sharded saves, cached: which rank writes what stays the same while names, shapes and meshes do.

torch's planning sends rank 0 a description of each piece of each rank, and all of them back, at each save, in
collectives of objects. Here each rank plans its own part, and reports to rank 0 once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from typing_extensions import Self, override

from ....state.rendezvous import StoreMessages, store_messages
from ...sharded_tensors.shards import FlatShard, copies_of
from ...upstream.torch_core import ShardedTensor, _StorageInfo, _StoragePrefix

_MOST_PLANS = 2  # with and without optimizers, as a rule


@dataclass(frozen=True)
class PlanMessage:
    """A rank's message to rank 0 about the plan that it writes by."""

    number: int
    plan: SavePlan | None
    """None if rank 0 has it from an earlier save."""
    kept: tuple[int, ...]
    """Numbers of the rank's plans that may come again."""


@dataclass
class CachedPlan:
    """A rank's plan for states of one form."""

    number: int
    """No other plan of this rank has it."""
    form: Any
    """Equal for states to which the plan fits."""
    plan: SavePlan
    is_sent: bool = False
    """Whether rank 0 has it."""


class SavePlanCache:
    """The last plans of one model; on rank 0 also the other ranks' plans."""

    def __init__(self) -> None:
        self.number = 0
        """Of the model, the same on all ranks; 0 before that is agreed on."""
        self._plans: list[CachedPlan] = []
        self._group: dist.ProcessGroup | None = None
        self._num_plans = 0
        self._received: dict[int, dict[int, SavePlan]] = {}
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
        paths = {item.index.fqn: local.planner_data[item.index.fqn] for item in local.items}
        plan = SavePlan(local.items, storage_data=_StoragePrefix(f"__{dist.get_rank()}_"), planner_data=paths)
        return CachedPlan(self._num_plans, form, plan)

    def message(self, plan: CachedPlan) -> PlanMessage:
        """Return the message to rank 0 about a plan."""
        return PlanMessage(
            plan.number, None if plan.is_sent else plan.plan, tuple(one.number for one in self._with(plan))
        )

    def keep(self, plan: CachedPlan) -> None:
        """Keep a plan by which a checkpoint was saved; every rank calls it."""
        plan.is_sent = True
        self._plans = self._with(plan)

    def _with(self, plan: CachedPlan) -> list[CachedPlan]:
        return [plan, *(one for one in self._plans if one is not plan)][:_MOST_PLANS]

    def merge(self, messages: Sequence[PlanMessage]) -> MergedPlan:
        """Return the plan of all ranks; on rank 0.

        Args:
            messages: By each rank.

        Raises:
            ValueError: If it is not one whole.
        """
        for rank, one in enumerate(messages):
            plans = self._received.setdefault(rank, {})
            if one.plan is not None:
                plans[one.number] = one.plan
            self._received[rank] = {number: plan for number, plan in plans.items() if number in one.kept}
        key = tuple(one.number for one in messages)
        merged = self._merged.pop(key, None)
        if merged is None or any(one.plan is not None for one in messages):
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
    """Return a plan's key: of each entry its name, its place in the state, and its sharding.

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
# The local part of a sharded checkpoint: each rank plans it without communication.


def replica_of(tensor: DTensor | FlatShard) -> tuple[int, int]:
    """Return which of how many equal copies of its shard this rank holds."""
    if isinstance(tensor, FlatShard):
        return tensor.place.replica, tensor.place.num_replicas
    mesh = tensor.device_mesh
    index, count = copies_of(mesh)
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
                if not data.size.numel() and dist.get_rank() == _first_rank(value) and not _copy_of(value):
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


def _copy_of(value: DTensor | ShardedTensor | FlatShard) -> int:
    return copies_of(value.device_mesh)[0] if isinstance(value, DTensor) else 0


def _first_rank(value: DTensor | ShardedTensor | FlatShard) -> int:
    return int(value.device_mesh.mesh.min()) if isinstance(value, DTensor) else 0


def _replicas(tensor: DTensor | FlatShard) -> Any:
    """Return a key that is the same for tensors of which the same ranks hold equal copies."""
    if isinstance(tensor, FlatShard):
        return tensor.place.num_replicas
    return tensor.device_mesh, tuple(dim for dim, one in enumerate(tensor.placements) if one.is_replicate())


# ------------------------------------------------------------------------------------------------
# The metadata of the whole checkpoint, which rank 0 merges from all ranks' plans.


_MOST_NAMED = 10
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@dataclass(frozen=True)
class MergedPlan:
    """The plan of all ranks together."""

    number: int
    """No other one of this model has it."""
    metadata: Metadata
    """Of the whole checkpoint, without the places of its pieces."""
    indices: Sequence[Sequence[MetadataIndex]]
    """The items of each rank, in its plan's order."""


def merge_plans(number: int, plans: Sequence[SavePlan]) -> MergedPlan:
    """Put together what all ranks write, in their order.

    As torch's ``create_default_global_save_plan`` does, which takes parts of different dtypes, sizes and coverage.

    Raises:
        ValueError: If a tensor is not whole then, or has a part twice; it names the first ones.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, Any] = {}
    indices: list[list[MetadataIndex]] = []
    problems: list[str] = []
    for rank, plan in enumerate(plans):
        paths = {**plan.planner_data, **paths}
        own: list[MetadataIndex] = []
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if data is None:
                if name in entries:
                    problems.append(f"{name!r} is written twice, the second time by process {rank}")
                entries[name] = BytesStorageMetadata()
                own.append(item.index)
                continue
            like, size = data.properties, data.size
            entry = entries.setdefault(name, TensorStorageMetadata(like, size, []))
            if isinstance(entry, BytesStorageMetadata) or (entry.size, entry.properties.dtype) != (size, like.dtype):
                problems.append(
                    f"{name!r} is {like.dtype} {tuple(size)} on process {rank}, unlike on earlier processes"
                )
                continue
            own.append(dataclasses.replace(item.index, index=len(entry.chunks)))
            entry.chunks.append(data.chunk)
        indices.append(own)
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            problems += _problems(name, entry.size, [(one.offsets, one.sizes) for one in entry.chunks])
    if problems:
        more = f" (and {len(problems) - _MOST_NAMED} more)" if len(problems) > _MOST_NAMED else ""
        raise ValueError(f"the parts of all processes do not fit together: {'; '.join(problems[:_MOST_NAMED])}{more}")
    return MergedPlan(number, Metadata(entries, paths), indices)


def _problems(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """Return the problem of boxes that do not fill a tensor, each element once."""
    for offsets, sizes in boxes:
        if any(at < 0 or at + size > full for at, size, full in zip(offsets, sizes, shape, strict=True)):
            return [f"{name!r} has the shape {tuple(shape)}, but a part at {tuple(offsets)} of shape {tuple(sizes)}"]
    volume = sum(prod(sizes) for _, sizes in boxes)
    if volume != prod(shape):
        return [f"{name!r} has {prod(shape)} elements, but its parts have {volume}"]
    if len(boxes) > 1 and (both := _overlapping(boxes)):
        return [f"{name!r} has overlapping parts, at {tuple(both[0])} and at {tuple(both[1])}"]
    return []


def _overlapping(boxes: Sequence[Box]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offsets of two overlapping boxes; None if no two do."""
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
# The places at which ranks wrote their parts, as plain numbers that processes leave in the checkpoint's folder.


@dataclass(frozen=True)
class Written(WriteResult):
    """torch's report of a record, with its digest."""

    digest: int


@dataclass
class WriteLocations:
    """The places of the items of a rank's plan."""

    files: list[str]
    rows: list[tuple[int, int, int, int, int]]
    """Of each item of the plan: size of its content, the file's number, offset and length there, digest."""

    @classmethod
    def of(cls, plan: SavePlan, results: Sequence[WriteResult]) -> Self:
        """Take them from what ``write_data`` of a `FolderWriter` returned for ``plan``."""
        by_index = {one.index: one for one in results if isinstance(one, Written)}
        files: dict[str, int] = {}
        rows = []
        for item in plan.items:
            one = by_index[item.index]
            place = one.storage_data
            file = files.setdefault(place.relative_path, len(files))
            rows.append((one.size_in_bytes, file, place.offset, place.length, one.digest))
        return cls(list(files), rows)

    def results(self, indices: Sequence[MetadataIndex]) -> list[WriteResult]:
        """Return the results of ``write_data`` for the items of these indices.

        Raises:
            ValueError: If there are more of one than of the other.
        """
        if len(indices) != len(self.rows):
            raise ValueError(
                f"A process reports the wrong number of pieces: expected {len(indices)}, got {len(self.rows)}."
            )
        return [
            Written(index, size, _StorageInfo(self.files[file], offset, length), digest)
            for index, (size, file, offset, length, digest) in zip(indices, self.rows, strict=True)
        ]
