"""A rank's part of a sharded tensor: a DTensor's local part, or a range of elements of an FSDP1 parameter.

FSDP1 cuts flat parameters, and not rows of the original ones. Rows, which DTensors have, would have to be gathered from
the other ranks first. torch.distributed.checkpoint asks for boxes and not for rows: a range of a matrix is a part of a
row, whole rows, and a part of a row, and each of them is a box like any other rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.optim import Optimizer
from typing_extensions import Self

from ..upstream.torch_core import tree_leaves, tree_map_only

_aten: Any = torch.ops.aten


_ELEMENT_WISE_OPS = frozenset(
    {
        *(_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.copy_.default),
        *(_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.masked_fill_.Scalar),
        *(_aten.masked_fill_.Tensor, _aten.masked_fill.Tensor, _aten.where.ScalarOther, _aten.where.ScalarSelf),
        *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    }
)
"""Operations without torch's tag for it."""


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
    """The place of a rank's range in a parameter."""

    shape: torch.Size
    """Of the parameter, with elements."""
    strides: tuple[int, ...]
    order: tuple[int, ...]
    """As `memory_order` returns it."""
    start: int
    """The range's first element, in memory order."""
    count: int
    replica: int
    """The number of the model's copy that this rank belongs to (hybrid sharding)."""
    num_replicas: int
    group: dist.ProcessGroup = field(repr=False)
    """Of the ranks that hold the other ranges."""
    device: torch.device
    """The device on which ``group`` communicates."""
    cut: tuple[int, int] | None = None
    """What is the same on all ranks: where the parameter begins in what the ranks have cut, and the size of a rank's
    part of that."""
    holds_several: bool = False
    """Whether the parameter is a flat one of FSDP1's, of several of the model's."""

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
        """Return the full tensor; every rank of the group calls it."""
        place = self.place
        full = torch.zeros(place.shape.numel(), dtype=self.dtype, device=place.device)
        full.narrow(0, place.start, place.count).copy_(self.held)
        dist.all_reduce(full.view(torch.uint8), group=place.group)  # each byte is zero on all ranks but one
        return full.as_strided(place.shape, place.strides).to(self.device)

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """Return this rank's boxes, each with its elements."""
        return [(box, self.place.view(self.held, box)) for box in self.place.boxes]

    # The methods that torch.distributed.checkpoint needs of tensors with a cut of their own.
    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """Return the items that this rank writes."""
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
        """Return this rank's part."""
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

    # The methods that torch needs of a subclass of its tensors.
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
        if fits and (func in _ELEMENT_WISE_OPS or torch.Tag.pointwise in func.tags):
            result = func(*tree_map_only(cls, _held, args), **tree_map_only(cls, _held, kwargs))
            if isinstance(result, Tensor):
                own = [shard for shard in shards if result is shard.held]  # changed in place
                return own[0] if own else cls(result, place)
        raise RuntimeError(
            f"{func} of a sharded tensor: this process has {place.count} of {place.shape.numel()} elements. Call "
            "full_tensor() first, on all processes, or 'with strategy.full_parameters(module):'."
        )

    def __copy__(self) -> FlatShard:
        """Return a tensor that shares memory, as torch does for its own."""
        return FlatShard(self.held, self.place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "A single shard cannot be pickled: this process has only a part of the tensor. Save what "
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


def states_of(optimizer: Optimizer) -> Iterable[tuple[Any, Any]]:
    """Return an optimizer's states by its parameters, without a look of `OptimizerStates` at what a step does."""
    own = optimizer.state
    return dict.items(own) if isinstance(own, dict) else own.items()


def cut_states(optimizer: Optimizer, layouts: Mapping[int, FlatLayout] = MappingProxyType({})) -> None:
    """Replace states that users' code has made by this rank's parts: DTensors, under FSDP1 plain ranges.

    Args:
        optimizer: Over sharded parameters, and maybe others.
        layouts: Of FSDP1's parameters, by the parameters' ids.
    """
    with torch._C.DisableTorchFunction():  # a mode of users' code shows the full shape
        for parameter, state in states_of(optimizer):
            layout = layouts.get(id(parameter))
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, FlatShard):
                    state[key] = value.held
                elif type(value) is not Tensor or value.numel() == 1:  # such as "step"
                    continue
                elif layout is not None and value.shape == layout.shape != (layout.count,):
                    state[key] = layout.own_range(value.to(parameter.device)).clone()
                elif isinstance(parameter, DTensor) and value.shape == parameter.shape:
                    state[key] = part_of(value, parameter)


Sharded = DTensor | FlatShard
"""A tensor of the full shape, of which a rank holds its part."""


@torch.no_grad()
def gathered(shard: Tensor) -> Tensor:
    """Return the full tensor with memory of its own and no graph; every rank calls it."""
    if not isinstance(shard, Sharded):
        return shard
    detached: Any = shard.detach()
    full: Tensor = detached.full_tensor()
    return full.clone() if full.untyped_storage().data_ptr() == local_part(shard).untyped_storage().data_ptr() else full


def local_part(shard: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, sharing memory; any other tensor as it is."""
    if isinstance(shard, FlatShard):
        return shard.held
    if not isinstance(shard, DTensor):
        return shard
    with torch.no_grad():
        return shard.to_local()


@overload
def part_of(full: Tensor, shard: Sharded) -> Sharded: ...


@overload
def part_of(full: Tensor, shard: Tensor) -> Tensor: ...


def part_of(full: Tensor, shard: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, sharded like ``shard``, if that is; no rank communicates."""
    if not isinstance(shard, Sharded):
        return full
    if isinstance(shard, FlatShard):
        return FlatShard(shard.place.own_range(full.to(shard.device)), shard.place)
    mesh = shard.device_mesh
    part: Any = distribute_tensor(full.detach().to(mesh.device_type), mesh, shard.placements, src_data_rank=None)
    return part.to(shard.device) if part.device != shard.device else part  # offloaded shards lie elsewhere


_copies: tuple[DeviceMesh | None, int, int] = (None, 0, 1)
"""Of this process's strategy: a mesh whose tensors other ranks have, too; which copy this rank has, of how many."""


def note_copies(mesh: DeviceMesh | None, index: int = 0, count: int = 1) -> None:
    """Note that ranks outside of ``mesh`` hold equal copies of what is sharded over it; None forgets it.

    Args:
        mesh: That tensor parallelism leaves to what no plan cuts.
        index: Of this rank's copy.
        count: Of copies.
    """
    global _copies
    _copies = (mesh, index, count)


def copies_of(mesh: DeviceMesh) -> tuple[int, int]:
    """Return which of how many equal copies of a tensor on this mesh a rank holds, beside replicas in the mesh."""
    known, index, count = _copies
    return (index, count) if known is not None and mesh == known else (0, 1)


def is_sharded_alike(tensor: Tensor, shard: Sharded) -> bool:
    """Return whether a tensor is sharded as ``shard`` is, so that operations on both run on the parts."""
    if isinstance(tensor, FlatShard):
        return isinstance(shard, FlatShard) and tensor.place.is_alike(shard.place)
    if isinstance(tensor, DTensor) and isinstance(shard, DTensor):
        return tensor.device_mesh == shard.device_mesh  # DTensor brings the placements together itself
    return False


def replicated(number: Tensor, shard: Sharded) -> Tensor:
    """Return a number as an operand of operations on ``shard``."""
    if isinstance(shard, FlatShard):
        return number
    mesh = shard.device_mesh
    return dtensor_of(number.to(shard.device), mesh, [Replicate()] * mesh.ndim, number.shape, number.stride())


def dtensor_of(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, strides: tuple[int, ...]
) -> DTensor:
    """Return a DTensor of what this rank has of it, on the device where that is; no rank communicates.

    ``DTensor.from_local`` alone moves the part to the mesh's device, where ``cpu_offload=True`` does not want it.

    Args:
        part: This rank's.
        mesh: Of the DTensor.
        placements: On the mesh.
        shape: Of the full tensor.
        strides: Of the full tensor.
    """
    sharded: Any = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=strides)
    return sharded if sharded.device == part.device else sharded.to(part.device)
