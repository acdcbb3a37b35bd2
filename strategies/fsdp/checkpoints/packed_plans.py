"""What ranks write, as they tell rank 0, and what rank 0 makes of it: the description of the whole checkpoint.

torch's own objects take about 1 KB a piece, in the process that has those of all ranks. Here numbers stay numbers, and
objects are made when something is written.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast, overload

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from typing_extensions import Self

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
