"""What a rank holds of a parameter of FSDP1, as it lies in memory: a range of elements, which DCP takes as boxes.

FSDP1 cuts flat parameters, and not rows of the original ones. Rows, which DTensors have, would have to be gathered
from the other ranks first. DCP asks for no rows: a range of a matrix is a part of a row, whole rows, and a part of a
row, and each of them is a box like any other rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import Self

from ..upstream.torch_core import tree_leaves, tree_map_only

_aten: Any = torch.ops.aten
_ELEMENT_BY_ELEMENT = frozenset(
    {
        *(_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.copy_.default),
        *(_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.masked_fill_.Scalar),
        *(_aten.masked_fill_.Tensor, _aten.masked_fill.Tensor, _aten.where.ScalarOther, _aten.where.ScalarSelf),
        *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    }
)
"""What has not torch's tag for it."""


class Box(NamedTuple):
    """A part of a full tensor whose elements follow each other in memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """Its first element, counted from the range's first."""


def boxes_of(shape: Sequence[int], start: int, count: int) -> list[Box]:
    """Cut ``count`` elements from ``start`` on, of a contiguous tensor, into boxes."""
    if not count:
        return []
    if len(shape) < 2:
        return [Box((start,), (count,), 0)] if shape else [Box((), (), 0)]
    inner, found = tuple(shape[1:]), []
    row, at, end = prod(inner), start, start + count
    while at < end:
        index, inside = divmod(at, row)
        num_rows = 0 if inside else (end - at) // row
        if num_rows:
            found.append(Box((index, *(0 for _ in inner)), (num_rows, *inner), at - start))
            at += num_rows * row
        else:
            stop = min(end, (index + 1) * row)
            parts = boxes_of(inner, inside, stop - at)
            found += [Box((index, *one.offsets), (1, *one.sizes), at - start + one.begin) for one in parts]
            at = stop
    return found


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions of a dense tensor from the outermost in memory to the innermost; None if it has gaps."""
    order = tuple(sorted(range(len(shape)), key=lambda dim: (shape[dim] != 1, -strides[dim])))
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != step:
            return None
        step *= shape[dim]
    return order


@dataclass(frozen=True)
class FlatLayout:
    """Where in a parameter a rank's range lies."""

    shape: torch.Size
    """Of the parameter, with elements."""
    strides: tuple[int, ...]
    order: tuple[int, ...]
    """As `memory_order` returns it."""
    start: int
    """The range's first element, in memory order."""
    count: int
    replica: int
    """Which of several equal copies of the model this rank has a part of (hybrid sharding)."""
    num_replicas: int
    group: dist.ProcessGroup = field(repr=False)
    """Of the ranks that hold the other ranges."""
    device: torch.device
    """Where ``group`` communicates."""
    cut: tuple[int, int] | None = None
    """What is the same on all ranks: where the parameter begins in what the ranks have cut, and the size of a rank's
    part of that."""

    def is_alike(self, other: FlatLayout) -> bool:
        """Return whether every rank has the same range of both; all ranks get the same answer."""
        if self.cut is None or other.cut is None:
            return self == other
        own, others = (self.shape, self.strides, self.cut), (other.shape, other.strides, other.cut)
        return own == others and self.group is other.group

    @cached_property
    def _places(self) -> list[int]:
        """Of each dimension, where in ``order`` it is."""
        return [self.order.index(dim) for dim in range(len(self.order))]

    @cached_property
    def boxes(self) -> list[Box]:
        """The range's, in memory order."""
        return [
            Box(tuple(one.offsets[at] for at in self._places), tuple(one.sizes[at] for at in self._places), one.begin)
            for one in boxes_of([self.shape[dim] for dim in self.order], self.start, self.count)
        ]

    def view(self, values: Tensor, box: Box) -> Tensor:
        """Return the box's elements, out of all of the range's, in the parameter's order of dimensions."""
        inside = values.narrow(0, box.begin, prod(box.sizes)).view([box.sizes[dim] for dim in self.order])
        return inside.permute(self._places)

    def own_range(self, full: Tensor) -> Tensor:
        """Return this rank's range of a full tensor."""
        return full.reshape(self.shape).permute(self.order).reshape(-1).narrow(0, self.start, self.count)


class FlatShard(Tensor):
    """A parameter of FSDP1, or a state of its shape, of which this rank holds a range.

    Shape and dtype are the full tensor's. What works element by element works on the range (``shard.half()``); for
    anything else, and for the values themselves, there is `full_tensor`.

    Args:
        held: The elements of the range, with one dimension; they are kept and not copied.
        place: Where they lie.
    """

    held: Tensor
    place: FlatLayout

    @staticmethod
    def __new__(cls, held: Tensor, place: FlatLayout) -> Self:
        """Make a tensor without memory of its own."""
        shard: Self = Tensor._make_wrapper_subclass(
            cls, place.shape, strides=place.strides, dtype=held.dtype, device=held.device
        )
        shard.held, shard.place = held, place
        return shard

    def __init__(self, held: Tensor, place: FlatLayout) -> None:
        super().__init__()

    def full_tensor(self) -> Tensor:
        """Return the full tensor; every rank that holds a range of it calls it."""
        place = self.place
        full = torch.zeros(place.shape.numel(), dtype=self.dtype, device=place.device)
        full.narrow(0, place.start, place.count).copy_(self.held)
        dist.all_reduce(full.view(torch.uint8), group=place.group)  # each byte is zero on all ranks but one
        return full.as_strided(place.shape, place.strides).to(self.device)

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """Return what this rank holds; each box with its elements."""
        return [(box, self.place.view(self.held, box)) for box in self.place.boxes]

    # What torch.distributed.checkpoint asks of tensors that are cut in another way than it knows.
    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """Return what this rank is to write."""
        properties = TensorProperties.create_from_tensor(self.held)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.place.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what this rank holds."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in self.place.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return one of the boxes, to be read or written."""
        for box in self.place.boxes:
            if box.offsets == index.offset:
                return self.place.view(self.held, box)
        raise ValueError(f"This process holds no part of {index.fqn} at {index.offset}.")

    # What torch asks of a subclass of its tensors.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do element by element what can be done so.

        Raises:
            RuntimeError: For anything else.
        """
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "memory_format"}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        tensors = [one for one in tensors if one.dim() or isinstance(one, cls)]
        shards = [one for one in tensors if isinstance(one, cls)]
        place = shards[0].place
        fits = all(isinstance(one, cls) and one.place.is_alike(place) for one in tensors)
        if fits and (func in _ELEMENT_BY_ELEMENT or torch.Tag.pointwise in func.tags):
            result = func(*tree_map_only(cls, _held, args), **tree_map_only(cls, _held, kwargs))
            if isinstance(result, Tensor):
                own = [shard for shard in shards if result is shard.held]  # changed in place
                return own[0] if own else cls(result, place)
        raise RuntimeError(
            f"{func} of a sharded tensor: this process has {place.count} of {place.shape.numel()} elements. Call "
            "full_tensor() first, on all processes, or 'with strategy.full_parameters(module):'."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "A shard cannot be pickled by itself: this process has a part of the tensor. Save what "
            "strategy.full_state_dict() or tensor.full_tensor() returns (all processes call it), or save with "
            "torch.distributed.checkpoint."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        """Return a copy of the range."""
        copied = memo[id(self)] = FlatShard(self.held.detach().clone(), self.place)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Tell what is held here."""
        return f"FlatShard({self.held}, shape={tuple(self.shape)}, start={self.place.start})"


def _held(shard: FlatShard) -> Tensor:
    return shard.held
