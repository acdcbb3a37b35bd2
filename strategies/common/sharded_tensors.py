"""Gives operations of users' code on sharded tensors their global meaning.

Between steps every parameter is a shard: a DTensor (FSDP2), this rank's range of a flat parameter (FSDP1), or a
partition that the parameter itself does not show (ZeRO-3). Users' hooks are written for whole tensors: they look at
shapes and norms, edit rows, draw random values, assign ``p.data`` and ``p.grad``. `GlobalTensors` is active while such
a hook runs, and decides for each operation:

- An operation that treats every element alone runs on the shards, without communication. Plain tensors of the full
  shape, such as masks, are cut to this rank's part first.
- Any other operation runs on the full tensor, which the ranks gather for it. What it changes is written back to each
  rank's shard, also through views of the full tensor, which stays open until the hook ends if the operation returned
  one.

Every rank runs the same operations in the same order, as it does with all collectives. Results are those of ``ddp``;
random numbers too, which are drawn for the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import prod
from typing import Any, NamedTuple, Protocol, overload
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary
from typing_extensions import Self

from ...checkpoint.names import clean_name
from ...state.rendezvous import CollectiveOrderChecker
from ..upstream.torch_core import _get_current_function_mode, tree_leaves, tree_map_only

# ------------------------------------------------------------------------------------------------
# A rank's shard of an FSDP1 parameter in memory: a range of elements, which DCP takes as boxes.
#
# FSDP1 cuts flat parameters, and not rows of the original ones. Rows, which DTensors have, would have to be gathered
# from the other ranks first. DCP asks for no rows: a range of a matrix is a part of a row, whole rows, and a part of a
# row, and each of them is a box like any other rank's.


_aten: Any = torch.ops.aten
_ELEMENT_WISE_OPS = frozenset(
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
    why_alone: str = ""
    """Why this rank cannot gather the tensor: not every rank has it."""

    def is_everywhere(self) -> bool:
        """Return whether every rank has elements of the parameter; all ranks get the same answer."""
        if self.cut is None:
            return False
        begin, share = self.cut
        return begin < share and begin + self.shape.numel() > (dist.get_world_size(self.group) - 1) * share

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
        """Return the full tensor; every rank that holds a range of it calls it.

        Raises:
            RuntimeError: If not every rank has it.
        """
        place = self.place
        if place.why_alone:
            raise RuntimeError(place.why_alone)
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


def with_plain_states(optimizer: Optimizer) -> None:
    """Let states that an optimizer made in users' code be what its step computes with: plain parts of this rank."""
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, FlatShard):
                state[key] = value.held


Sharded = DTensor | FlatShard
"""A tensor of the full shape, of which a rank holds its part."""

_ELEMENT_BY_ELEMENT = frozenset(
    [
        "clone",
        "detach",
        "copy_",
        "fill_",
        "zero_",
        "to",
        "type_as",
        "type",
        "float",
        "double",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "contiguous",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "masked_fill",
        "masked_fill_",
        "subtract",
        "multiply",
        "divide",
        "true_divide",
        "subtract_",
        "multiply_",
        "divide_",
        "floor_divide",
        "floor_divide_",
        "rsub",
        "__rsub__",
        "__rdiv__",
        "__rtruediv__",
        "__rpow__",
        "__rfloordiv__",
        "__radd__",
        "__rmul__",
        "square_",
        "where",
    ]
)
"""Names of operations that treat every element alone and do not have torch's tag for it."""
_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward")
"""Hooks that the Trainer runs between a forward and its backward."""
_OF_THE_SHARD = frozenset(
    [
        "requires_grad",
        "requires_grad_",
        "device",
        "dtype",
        "layout",
        "is_leaf",
        "grad_fn",
        "_version",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "retains_grad",
        "is_floating_point",
        "is_complex",
        "get_device",
        "element_size",
        "__hash__",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "data_ptr",
        "untyped_storage",
        "is_shared",
        "is_pinned",
        "is_inference",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "output_nr",
        "names",
        "grad_dtype",
        "_is_view",
        "_base",
        "__deepcopy__",
    ]
)
"""Names of what has the same meaning for a shard as for the full tensor, or none for the latter."""
_OF_THE_SHAPE = frozenset(
    ["shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "nbytes", "is_contiguous"]
)
_OF_ATTRIBUTES = frozenset(["__get__", "__set__", "__delete__"])
_NOT_OF_VALUES = _OF_THE_SHARD | _OF_THE_SHAPE
_UNCOUNTED = frozenset(["numpy", "__array__", "__dlpack__"])
"""Operations whose results share memory, and whose writes raise no version counter."""
_REDUCTIONS = frozenset(
    ["norm", "sum", "mean", "max", "min", "amax", "amin", "any", "all", "vector_norm", "linalg_vector_norm"]
)
"""Operations that DTensor reduces over all elements with a small message instead of an all-gather."""


class ShardAccess(Protocol):
    """What an engine knows of the parameters that it has sharded and that are no `Sharded` themselves."""

    shows_shards: bool
    """Whether such a parameter is this rank's part itself, so that it takes gradients."""
    in_step: bool
    """Whether a training step runs, and no hook."""
    ends_window: bool
    """Whether what asks for a gradient runs in the last backward of an accumulation window."""

    def begin(self) -> None:
        """Take note that users' code starts or resumes; the engine's states may have changed since."""
        ...

    def end(self) -> None:
        """Take note that users' code that has met sharded tensors ends; it may have made states of them."""
        ...

    def shard_of(self, tensor: Tensor) -> FlatShard | None:
        """Return this rank's part of a parameter or of its optimizer's state, sharing memory; None for all else."""
        ...

    def writable(self, tensor: Tensor, *, assigns: bool) -> Tensor | None:
        """Return what takes a write to ``tensor``, or the values of ``tensor.data = values``; None for itself."""
        ...

    def linked(self, full: Tensor, tensor: Tensor) -> Tensor:
        """Return a full tensor whose gradient reaches ``tensor``, a parameter that `shard_of` knows."""
        ...

    def release(self) -> None:
        """Reshard what calls of modules have left unsharded; no such call runs."""
        ...

    def reach_model(self) -> None:
        """Let the model have what was written to weights of the optimizer's own; every rank calls it."""
        ...

    def note_write(self, tensor: Tensor) -> None:
        """Take note that a training step changes a tensor, which may share memory with an unsharded parameter."""
        ...

    def is_unreduced(self, tensor: Tensor) -> bool:
        """Return whether a parameter has a gradient that the ranks have not reduced yet."""
        ...

    def owns_gradient(self, tensor: Tensor) -> bool:
        """Return whether the gradient of ``tensor`` is elsewhere than torch has it, or in another form."""
        ...

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of such a parameter, sharing memory; None if no rank has one."""
        ...

    def set_gradient(self, parameter: Tensor, gradient: FlatShard | None) -> None:
        """Replace the gradient of such a parameter."""
        ...


class NoAccess:
    """The `ShardAccess` where all sharded parameters are DTensors."""

    shows_shards, in_step, ends_window = False, False, False

    def begin(self) -> None:
        """Do nothing: states are DTensors like their parameters."""

    def end(self) -> None:
        """Do nothing."""

    def shard_of(self, tensor: Tensor) -> FlatShard | None:
        """Return None."""
        return None

    def writable(self, tensor: Tensor, *, assigns: bool) -> Tensor | None:
        """Return None."""
        return None

    def linked(self, full: Tensor, tensor: Tensor) -> Tensor:
        """Return ``full``."""
        return full

    def release(self) -> None:
        """Do nothing: units reshard themselves."""

    def reach_model(self) -> None:
        """Do nothing: the optimizer steps on the model's weights."""

    def note_write(self, tensor: Tensor) -> None:
        """Do nothing: version counters show changes."""

    def is_unreduced(self, tensor: Tensor) -> bool:
        """Return False."""
        return False

    def owns_gradient(self, tensor: Tensor) -> bool:
        """Return False."""
        return False

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient."""
        return parameter.grad

    def set_gradient(self, parameter: Tensor, gradient: FlatShard | None) -> None:
        """Set the gradient."""
        parameter.grad = gradient


@dataclass
class _Open:
    """A full tensor that was gathered, and the shard that it is of."""

    tensor: Tensor
    """The user's object: the shard itself, or its parameter; not one of its aliases."""
    shard: Sharded
    full: Tensor
    version: int
    shard_version: int
    is_shown_uncounted: bool = False
    """Whether users have a view of the full tensor whose writes no version counts: NumPy's."""

    @classmethod
    def gathered(cls, tensor: Tensor, shard: Sharded, into: Tensor | None = None) -> Self:
        """Return a new one; every rank calls it.

        Args:
            tensor: The user's.
            shard: Its shard.
            into: The full tensor that an earlier one had.
        """
        full = gathered(shard).data  # no view: users' are views of it
        if into is not None:
            full = into if torch.equal(into, full) else into.copy_(full)  # a graph that waits for backward may have it
        return cls(tensor, shard, full, full._version, local_part(shard)._version)

    @property
    def is_changed(self) -> bool:
        """Whether the full tensor has, or may have, values that the shard lacks."""
        return self.is_shown_uncounted or self.full._version != self.version

    def write_back(self) -> None:
        """Let the shard have what was written to the full tensor since."""
        if self.is_changed:
            local_part(self.shard).copy_(local_part(part_of(self.full, self.shard)))
            self.version, self.shard_version = self.full._version, local_part(self.shard)._version

    def read_again(self) -> None:
        """Let the full tensor have what the shard has been changed to since; every rank calls it."""
        if local_part(self.shard)._version != self.shard_version:  # not an alias's, which may be empty, and new
            self.full.copy_(gathered(self.shard))
            self.version, self.shard_version = self.full._version, local_part(self.shard)._version


class _Kept:
    """A full tensor that lives on where users have kept views of it."""

    def __init__(self, opened: _Open) -> None:
        self.tensor, self._version, self._full = opened.tensor, opened.version, TensorWeakRef(opened.full)

    def full(self) -> Tensor | None:
        """Return the full tensor, if it is still there.

        Raises:
            RuntimeError: If a view was written to where nobody saw it.
        """
        full: Tensor | None = self._full()
        if full is not None and full._version != self._version:
            raise RuntimeError(
                "A view of a sharded parameter (p.data[0], say) that a hook has kept was changed outside of hooks: "
                "the change has reached no process. Change the parameter in a hook."
            )
        return full


class Aliases:
    """Tensors that share memory with parameters: what ``p.data`` and ``p.detach()`` have returned.

    All ranks create the same aliases. Addresses do not identify them, because a rank's part may be empty.
    """

    def __init__(self) -> None:
        self.kept: dict[int, _Kept] = {}
        """By the identity of an original, its full tensor of earlier hooks, if users may have views of it."""
        self._originals: Any = WeakIdKeyDictionary()
        self._found: dict[int, list[ref[Tensor]]] = {}
        """By the identity of an original, its aliases. Nothing refers to originals weakly, which stops
        `nn.Module._apply`; an alias keeps its original alive, so that no identity stands for two."""

    def original(self, tensor: Tensor) -> Tensor:
        """Return the tensor of which another is an alias; itself if it is none."""
        original: Tensor = self._originals.get(tensor, tensor)
        return original

    def add(self, tensor: Tensor, alias: Tensor) -> Tensor:
        """Return ``alias``, and take note that it shares memory with ``tensor``."""
        original = self.original(tensor)
        if alias is not tensor and alias is not original:
            self._originals[alias] = original
            self._found.setdefault(id(original), []).append(ref(alias, partial(self._drop, id(original))))
        return alias

    def _drop(self, original: int, alias: ref[Tensor]) -> None:
        found = self._found.get(original, [])
        if alias in found:
            found.remove(alias)
        if not found:
            self._found.pop(original, None)

    def separate(self, tensor: Tensor) -> Tensor:
        """Give aliases memory of their own before ``tensor`` is assigned to, as that gives it; return the original."""
        original = self.original(tensor)
        for each in self._found.pop(id(original), ()):
            alias = each()
            if alias is None:
                continue
            self._originals.pop(alias, None)
            if isinstance(alias, FlatShard):
                alias.held = alias.held.detach().clone()
            elif isinstance(alias, DTensor):
                alias._local_tensor = alias._local_tensor.detach().clone()
            else:
                alias.data = alias.detach().clone()
        self.kept.pop(id(original), None)
        return original

    def keep(self, opened: dict[int, _Open]) -> None:
        """Take over full tensors as a hook ends; they are freed unless users have views of them."""
        for key in list(opened):
            self.kept[key] = _Kept(opened.pop(key))
        self.kept = {key: one for key, one in self.kept.items() if one.full() is not None}


class OldMemory:
    """Memory that parameters have lost, and that users' code may have kept: when they were sharded, or by ZeRO-3."""

    def __init__(self) -> None:
        self._parts: dict[Any, list[_Lost]] = {}
        """By `_weak_storage`."""
        self._num_steps = 0
        self._most_parts = 0
        """Beyond which `_parts` may have more freed than used ones."""
        self.replaced: dict[int, tuple[TensorWeakRef, nn.Parameter]] = {}
        """By the identity of an original parameter that is still there, the one that FSDP2 has put in its place."""

    @staticmethod
    def of(module: nn.Module) -> OldMemory:
        """Return the module's."""
        return _old_memory.setdefault(module, OldMemory())

    def take(self, module: nn.Module) -> None:
        """Note where parameters are; the module is about to be sharded."""
        for name, parameter in module.named_parameters():
            part = None if isinstance(parameter, UninitializedParameter) else local_part(parameter)
            if part is not None and part.device.type != "meta" and part.numel():
                parts = self._parts.setdefault(_weak_storage(part), [])
                parts.append(_Lost(*_addresses(part), clean_name(name), step=None))

    def forget(self, module: nn.Module) -> None:
        """Forget what is freed, and what parameters have where they had it before."""
        used = {_weak_storage(local_part(one)) for one in module.parameters()}
        self._parts = {key: one for key, one in self._parts.items() if not key.expired() and key not in used}

    @contextmanager
    def partitioning(self, parameter: nn.Parameter, name: str) -> Iterator[None]:
        """Note the memory that a gathered parameter loses, if a view or a graph still has it."""
        storage, addresses = _weak_storage(parameter), _addresses(parameter)
        yield
        if not storage.expired() and addresses != _addresses(parameter):
            self._parts.setdefault(storage, []).append(_Lost(*addresses, name, self._num_steps))
            if len(self._parts) > self._most_parts:
                self._parts = {key: one for key, one in self._parts.items() if not key.expired()}
                self._most_parts = 2 * len(self._parts)

    def begin_step(self) -> bool:
        """Take note that a training step begins; return whether it may use memory that an earlier one has kept."""
        self._num_steps += 1
        return any(
            not storage.expired() and any(each.step is not None for each in parts)
            for storage, parts in self._parts.items()
        )

    def present(self, tensor: Tensor) -> Tensor:
        """Return the parameter that has taken the place of an original one; any other tensor as it is."""
        original, present = self.replaced.get(id(tensor), (None, tensor))
        return present if original is None or original() is tensor else tensor

    def check(self, tensors: Iterator[Tensor], hook: str, *, in_step: bool) -> None:
        """Check that none of these tensors lies in such memory; a step may use what it has gathered itself.

        Raises:
            RuntimeError: If one does.
        """
        for tensor in tensors if self._parts else ():
            if type(tensor) not in (Tensor, nn.Parameter) or not _has_storage(tensor):
                continue
            parts = self._parts.get(_weak_storage(tensor), ())
            begin, end = _addresses(tensor) if parts else (0, 0)
            for lost in parts:
                if begin < lost.end and lost.begin < end and not (in_step and lost.step == self._num_steps):
                    raise RuntimeError(_kept_error(hook, lost))


class _Lost(NamedTuple):
    """Memory that a parameter had."""

    begin: int
    end: int
    name: str
    step: int | None
    """Number of the training step that had gathered it; None of what was there before the model was sharded."""


def _kept_error(hook: str, lost: _Lost) -> str:
    if lost.step is None:
        when = "before the model was sharded: p.data, a view or a bound method of it, kept since then"
    else:
        when = "when a training step had gathered it: a part of it that the step has kept (self.row = weight[0])"
    return (
        f"{hook or 'User code'} uses a tensor that shares memory with {lost.name!r} as it was {when}. It has the "
        "values of then, and changes of it reach nothing. Read the parameter from its module where it is used; to keep "
        "the values of then, keep a copy (p.detach().clone())."
    )


_old_memory: WeakKeyDictionary[nn.Module, OldMemory] = WeakKeyDictionary()


def _weak_storage(tensor: Tensor) -> Any:
    """Return what identifies a tensor's storage, and keeps its address from being given out again."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements, and the first one after them."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() if tensor.numel() else 0


class GlobalTensors(TorchFunctionMode):
    """The mode; enter it while users' code runs.

    Args:
        access: The engine's.
        in_step: Whether it is for training steps, whose backward the engine runs; else it is for hooks.
        in_backward: Whether it is for hooks on gradients, whose other tensors differ between the ranks.
        aliases: Those of another mode of the same parameters.
    """

    def __init__(
        self,
        access: ShardAccess,
        *,
        in_step: bool = False,
        in_backward: bool = False,
        aliases: Aliases | None = None,
    ) -> None:
        super().__init__()
        self._access, self._in_step, self._in_backward = access, in_step, in_backward
        self.old_memory = OldMemory()
        self.places: CollectiveOrderChecker | None = None
        """Compares the lines at which the ranks gather; None compares nothing."""
        self._open: dict[int, _Open] = {}
        """By the identity of what `Aliases.original` returns."""
        self._aliases = Aliases() if aliases is None else aliases
        self._gradients: dict[int, Tensor] = {}
        """Of parameters whose gradient is made for each use: the first one since the hook began."""
        self._is_entered = self._is_paused = False
        self.has_met_shards = False
        """Whether an operation has had a sharded tensor."""
        self.hook = ""
        """Name of the hook that runs, or ran last."""
        self._written_on = "cpu"
        """Where the engine is to gather values that users' code has written in the midst of a forward."""

    def enter(self) -> None:
        """Begin, or continue after `leave`."""
        self._is_paused = False
        self._access.begin()
        if not self._is_entered:
            self._is_entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stop; below a mode of the user's own this one stays on torch's stack and does nothing."""
        if _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._is_entered = False
            self.__exit__(None, None, None)
        else:
            self._is_paused = True

    @torch.no_grad()
    def write_back(self, *, forget: bool = True) -> None:
        """Let shards have what was changed through views of full tensors.

        Args:
            forget: Whether to free the full tensors.
        """
        for key in list(self._open):
            self._write_back(self._open[key])
        if forget:
            self._aliases.keep(self._open)
            self._gradients = {}
            if self.has_met_shards:
                self._access.end()
        wait_for_streams(self._written_on)
        self._written_on = "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; the mode itself is off inside."""
        kwargs = kwargs or {}
        if self.old_memory.replaced:
            args, kwargs = self._map(args, self.old_memory.present), self._map(kwargs, self.old_memory.present)
        owner = getattr(func, "__self__", None)
        if getattr(owner, "__name__", None) == "grad" and not self._is_paused and self._access.owns_gradient(args[0]):
            return self._own_gradient(args[0], func.__name__, args[1:])
        if self._is_paused:
            return func(*args, **kwargs)
        name = func.__name__
        if getattr(owner, "__name__", name) not in _NOT_OF_VALUES:
            self._check_kept(name, args, kwargs)
        if not any(self._is_sharded(one) for one in _tensors(args, kwargs)):
            return self._on_plain(func, args, kwargs)
        self.has_met_shards = True
        return self._on_sharded(func, args, kwargs)

    def _on_sharded(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name in _OF_ATTRIBUTES:
            return self._attribute(func, func.__self__.__name__, name, args)
        if name in _OF_THE_SHARD:
            return func(*args, **kwargs)
        if name in _OF_THE_SHAPE:
            return func(*self._map(args, self._shard), **kwargs)
        if name == "grad":
            raise RuntimeError(
                "torch.autograd.grad() with respect to sharded parameters: the graph has the unsharded parameters, "
                "which are freed. Take gradients of activations, or of weights in the root's unit (in training_step "
                "with automatic optimization), or train with Trainer(strategy='ddp')."
            )
        if name.startswith("_foreach_") and (base := _foreach_base(name)) is not None:
            return self._foreach(base, args, kwargs)
        if name == "detach":
            detached: Tensor = func(self._shard(args[0]))
            return self._aliases.add(args[0], detached)
        if any(self._is_open(one) for one in _tensors(args, kwargs)):  # there are views of it, which see this
            return self._on_full(func, args, kwargs)
        if is_element_by_element(name) and not self._needs_full(name, args, kwargs):
            result = self._element_by_element(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if name in _REDUCTIONS and len(args) == 1 and not set(kwargs) - {"p"} and isinstance(args[0], DTensor):
            self._come(name)
            return _averaging_gradients(func(*args, **kwargs).full_tensor(), args[0])
        self._come(name)
        return self._on_full(func, args, kwargs)

    def _check_kept(self, name: str, args: Any, kwargs: Any) -> None:
        """Let views that users have kept have the values of now; refuse those from before sharding."""
        self.old_memory.check(_tensors(args, kwargs), self.hook, in_step=self._in_step)
        for tensor in _tensors(args, kwargs) if name not in _OF_ATTRIBUTES else ():
            _check_not_freed(tensor, self.hook)
        for tensor in _tensors(args, kwargs) if self._aliases.kept else ():
            for one in list(self._aliases.kept.values()):
                full = one.full()
                if full is not None and _share_memory(full, tensor):
                    self._come(name)
                    self._opened(one.tensor)

    def _write_back(self, opened: _Open) -> None:
        if opened.is_changed:
            self._before_write(opened.shard)
            opened.write_back()

    def _before_write(self, shard: Tensor) -> None:
        """Let the engine's copies of offloaded shards end before a write in the midst of a forward and a backward."""
        if self._written_on != "cpu" or not (self._in_step or self.hook in _BEFORE_BACKWARD):
            return
        self._written_on = _engines_device(shard)
        if local_part(shard).device.type == "cpu":
            wait_for_streams(self._written_on)

    def _come(self, name: str) -> None:
        if self.places is not None:
            self.places.compare_at_line(f"gathers a sharded tensor for {name}()")

    def _on_plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation without sharded tensors, which may write to an unsharded parameter."""
        name = func.__name__
        reads_data, assigns = (name == each and func.__self__.__name__ == "data" for each in ("__get__", "__set__"))
        if self._open and args and (reads_data or name == "detach" or name in _UNCOUNTED):
            opened = next((one for one in self._open.values() if _share_memory(one.full, args[0])), None)
            if opened is not None and name in _UNCOUNTED:
                opened.is_shown_uncounted = True
            elif opened is not None:
                detached: Any = args[0].detach()  # also for `.data`, whose writes would not be counted
                detached._accelight_full = opened.full  # which lives as long as a view of it, and this is none to torch
                return detached
        if args and (reads_data or name == "detach"):
            result: Any = func(*args, **kwargs)
            is_alias = isinstance(result, Tensor) and self._access.writable(args[0], assigns=True) is args[0]
            return self._aliases.add(args[0], result) if is_alias else result
        if not args and _is_in_place(name) and "tensor" in kwargs:  # as functions of torch.nn.init come here
            args, kwargs = (kwargs["tensor"],), {key: one for key, one in kwargs.items() if key != "tensor"}
        if not (assigns or _is_in_place(name)) or not args:
            return func(*args, **kwargs)
        self._note_write(args[0], assigns=assigns)
        if not isinstance(args[0], Tensor) or (torch.is_grad_enabled() and not assigns):
            return func(*args, **kwargs)
        target = self._access.writable(args[0], assigns=assigns)
        if target is None:
            return func(*args, **kwargs)
        self._before_write(target)
        if assigns:
            self._check_assignable()
            if args[1].shape != target.shape:
                raise RuntimeError(
                    f"p.data = value: the parameter has shape {tuple(target.shape)}, but the value has "
                    f"{tuple(args[1].shape)}."
                )
            if self._aliases.original(args[1]) is not self._aliases.original(args[0]):
                self._aliases.separate(args[0])
                with torch.no_grad():
                    target.copy_(args[1])
        else:
            func(target, *args[1:], **kwargs)
        return args[0]

    # ------------------------------------------------------------------ what is sharded
    def _is_sharded(self, tensor: Tensor) -> bool:
        return isinstance(tensor, Sharded) or self._access.shard_of(tensor) is not None

    def _shard(self, tensor: Tensor) -> Any:
        """Return a parameter as a `Sharded`; any other tensor as it is."""
        if isinstance(tensor, Sharded):
            return tensor
        shard = self._access.shard_of(tensor)
        return tensor if shard is None else shard

    def _needs_full(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether an operation is a part of a graph that shards lack: FSDP1's, or full tensors next to them."""
        tensors = [self._shard(one) for one in _tensors(args, kwargs)] if self._in_backward else []
        first: Any = next((one for one in tensors if isinstance(one, Sharded)), None)
        if "out" in kwargs or any(not _is_sharded_alike(one, first) for one in tensors):
            return True  # in a backward, ranks have other values in what is not sharded like parameters
        return (
            not name.endswith("_like")
            and not _is_in_place(name)
            and torch.is_grad_enabled()
            and any(
                one.requires_grad
                and not isinstance(one, DTensor)
                and (self._in_step or self._access.shows_shards or not self._is_sharded(one))
                for one in _tensors(args, kwargs)
            )
        )

    def _map(self, value: Any, change: Callable[[Tensor], Any]) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if type(value) in (list, tuple):
            return type(value)(self._map(one, change) for one in value)
        if type(value) is dict:
            return {key: self._map(one, change) for key, one in value.items()}
        return value

    # ------------------------------------------------------------------ attributes
    def _attribute(self, func: Any, name: str, action: str, args: Sequence[Any]) -> Any:
        tensor = args[0]
        if not self._is_sharded(tensor):
            if name == "data" and action == "__set__":  # a plain tensor takes the values of a sharded one
                return self._on_plain(func, (tensor, self._full(args[1])), {})
            return func(*args)
        if name == "data":
            return self._data(tensor) if action == "__get__" else self._assign(tensor, args[1])
        if name == "grad":
            return self._gradient(func, tensor, action, args[1:])
        if name in _OF_THE_SHARD:
            return func(*args)
        if name in _OF_THE_SHAPE:
            return func(self._shard(tensor))
        return self._on_full(func, args, {})

    def _data(self, tensor: Tensor) -> Tensor:
        shard = self._shard(tensor)
        return self._aliases.add(tensor, shard.data if isinstance(shard, DTensor) else shard)

    def _is_open(self, tensor: Tensor) -> bool:
        return bool(self._open) and id(self._aliases.original(tensor)) in self._open

    @torch.no_grad()
    def _assign(self, tensor: Tensor, value: Tensor) -> None:
        """Take over ``tensor.data = value``: the memory of the shard stays where the engine knows it."""
        self._check_assignable()
        if self._aliases.original(value) is self._aliases.original(tensor):
            return
        shard = self._shard(tensor)
        if value.shape != shard.shape or value.dtype != shard.dtype:
            raise RuntimeError(
                f"p.data = value: the sharded parameter has shape {tuple(shard.shape)} and dtype {shard.dtype}, but "
                f"the value has {tuple(value.shape)} and {value.dtype}. Assign a tensor of the same shape and dtype; "
                "create a parameter of another shape before the model is sharded (in configure_model())."
            )
        part = local_part(self._like(value, shard))
        self._open.pop(id(self._aliases.separate(tensor)), None)
        self._before_write(shard)
        local_part(shard).copy_(part)

    def _check_assignable(self) -> None:
        """Refuse to assign to ``p.data`` between a forward and its backward.

        On one device the backward of some operations (`nn.Linear`'s) then has the old values, that of others the new.

        Raises:
            RuntimeError: If the present hook runs there.
        """
        if self.hook in _BEFORE_BACKWARD and not self._in_step:
            raise RuntimeError(
                f"p.data = value in {self.hook}(), between a forward and its backward, which would compute some "
                "gradients with the old values. Use p.data.copy_(value), which all gradients are computed with, or "
                "assign in on_train_batch_start() or on_train_batch_end()."
            )

    def _note_write(self, target: Any, *, assigns: bool = False) -> None:
        """Let the engine know of a training step's write to a tensor, or to a list of them, that is not sharded."""
        if self._in_step:
            for one in _tensors((target,), {}):
                if assigns or not (torch.is_grad_enabled() and one.requires_grad):
                    self._access.note_write(one)

    def _gradient(self, func: Any, tensor: Tensor, action: str, values: Sequence[Any]) -> Any:
        self._check_reduced(tensor)
        if action == "__get__":
            return func(tensor)
        return func(tensor, None if action == "__delete__" else self._as_gradient(tensor, values[0], tensor))

    def _own_gradient(self, tensor: Tensor, action: str, values: Sequence[Any]) -> Any:
        self._check_reduced(tensor)
        if action == "__get__":
            gradient = self._access.gradient_of(tensor)
            if gradient is not None:
                self._aliases.add(self._gradients.setdefault(id(tensor), gradient), gradient)
            return gradient
        if (first := self._gradients.pop(id(tensor), None)) is not None:
            self._open.pop(id(first), None)
        if action == "__delete__" or values[0] is None:
            return self._access.set_gradient(tensor, None)
        present = self._access.gradient_of(tensor)
        shard = self._shard(tensor) if present is None else present
        return self._access.set_gradient(tensor, self._as_gradient(tensor, values[0], shard))

    def _check_reduced(self, tensor: Tensor) -> None:
        if self._access.is_unreduced(tensor):
            raise RuntimeError(
                "p.grad was used in a hook while gradients accumulate: the ranks reduce them in the last "
                "micro-batch of an accumulation window, and p.grad holds them only from then on. Use it in "
                "on_before_optimizer_step()."
            )

    def _as_gradient(self, tensor: Tensor, value: Tensor | None, shard: Tensor) -> Any:
        if value is None:
            return None
        shape = self._shard(tensor).shape
        if value.shape != shape:
            raise RuntimeError(
                f"p.grad = value: the parameter has shape {tuple(shape)}, but the value has {tuple(value.shape)}."
            )
        if not isinstance(shard, Sharded):
            raise RuntimeError(
                "p.grad = value: no rank has a gradient for this parameter, and DeepSpeed has no buffer for one. "
                "Use the parameter in the loss."
            )
        if not isinstance(value, Sharded):
            _check_equal_on_ranks(value, "p.grad = value")
        return self._like(value.detach(), shard)

    # ------------------------------------------------------------------ on shards
    def _element_by_element(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on the shards; NotImplemented where its result would not be one of theirs."""
        tensors = [self._shard(one) for one in _tensors(args, kwargs)]
        is_in_place = _is_in_place(func.__name__)
        first = tensors[0] if is_in_place else next(one for one in tensors if isinstance(one, Sharded))
        if not isinstance(first, Sharded):
            return NotImplemented
        shape = first.shape
        for one in tensors:
            if one.dim() > len(shape) or _broadcast(one.shape, shape) != shape:
                return NotImplemented

        def convert(tensor: Tensor) -> Tensor:
            return self._like(self._shard(tensor), first)

        if is_in_place:
            self._before_write(first)
            func(first, *self._map(tuple(args[1:]), convert), **self._map(kwargs, convert))
            return args[0]
        try:
            return func(*self._map(args, convert), **self._map(kwargs, convert))
        except (NotImplementedError, RuntimeError):  # an operation that shards do not know
            return NotImplemented

    def _like(self, tensor: Tensor, shard: Sharded) -> Tensor:
        """Return ``tensor`` with the sharding of ``shard``; a single number is left as it is."""
        if _is_sharded_alike(tensor, shard):
            return tensor
        if isinstance(tensor, Sharded):
            tensor = self._full(tensor)
        if tensor.numel() == 1 and tensor.shape != shard.shape:
            return _replicated(tensor.reshape(()), shard)
        return part_of(tensor.expand(shard.shape), shard)

    def _foreach(self, base: str, args: Any, kwargs: Any) -> Any:
        """Run a `torch._foreach_` operation one by one."""
        operation = getattr(Tensor, base, None) or getattr(torch, base)
        results = [
            self.__torch_function__(
                operation,
                (),
                tuple(one[index] if type(one) in (list, tuple) else one for one in args),
                {key: one[index] if type(one) in (list, tuple) else one for key, one in kwargs.items()},
            )
            for index in range(len(args[0]))
        ]
        return None if base.endswith("_") else results

    # ------------------------------------------------------------------ on full tensors
    def _on_full(self, func: Any, args: Any, kwargs: Any) -> Any:
        used: dict[int, _Open] = {}
        users: dict[int, Tensor] = {}
        linked: dict[int, Tensor] = {}
        known = set(self._open)

        def full_of(tensor: Tensor) -> Tensor:
            if not self._is_sharded(tensor):
                return tensor
            opened = self._opened(tensor)
            used[id(opened.full)] = opened
            users.setdefault(id(opened.full), tensor)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return opened.full
            if id(tensor) not in linked:
                linked[id(tensor)] = self._linked(opened, tensor)
            return linked[id(tensor)]

        full_args, full_kwargs = self._map(args, full_of), self._map(kwargs, full_of)
        if _is_in_place(func.__name__):
            self._note_write(next(_tensors(full_args, full_kwargs)))
        result = func(*full_args, **full_kwargs)
        with torch.no_grad():
            for one in used.values():
                self._write_back(one)
        returned = {_storage(one) for one in _tensors((result,), {}) if not isinstance(one, Sharded)}
        for one in used.values():
            if func.__name__ in _UNCOUNTED:
                one.is_shown_uncounted = True
            elif id(one.tensor) not in known and _storage(one.full) not in returned:
                del self._open[id(one.tensor)]
        return self._map(result, lambda one: users.get(id(one), one))

    @torch.no_grad()
    def _opened(self, tensor: Tensor) -> _Open:
        if isinstance(tensor, FlatParameter) or (isinstance(tensor, FlatShard) and tensor.place.holds_several):
            raise RuntimeError(
                "A flat parameter of FSDP1 was used in a way that is not element-wise (its shape, rows, norm, or "
                "random values): it holds several of the model's parameters. Set use_orig_params=True (the default)."
            )
        shard = self._shard(tensor)
        original = self._aliases.original(tensor)
        if id(original) not in self._open:
            kept = self._aliases.kept.pop(id(original), None)
            self._open[id(original)] = _Open.gathered(original, shard, None if kept is None else kept.full())
        self._write_back(self._open[id(original)])
        self._open[id(original)].read_again()
        return self._open[id(original)]

    def _linked(self, opened: _Open, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or (self._access.shows_shards and not self._in_step):
            linked: Tensor = _Link.apply(opened.full, tensor, opened.shard)  # type: ignore[no-untyped-call]
            return linked
        return self._access.linked(opened.full, tensor) if self._in_step else opened.full

    def _full(self, tensor: Tensor) -> Tensor:
        return gathered(self._shard(tensor)) if self._is_sharded(tensor) else tensor


@torch.no_grad()
def gathered(shard: Tensor) -> Tensor:
    """Return the full tensor with memory of its own and no graph; every rank calls it."""
    if not isinstance(shard, Sharded):
        return shard
    detached: Any = shard.detach()
    full: Tensor = detached.full_tensor()
    return full.clone() if full.untyped_storage().data_ptr() == local_part(shard).untyped_storage().data_ptr() else full


def local_part(shard: Tensor) -> Tensor:
    """Return what this rank holds of a sharded tensor, sharing memory; any other tensor as it is."""
    if isinstance(shard, FlatShard):
        return shard.held
    if not isinstance(shard, DTensor):
        return shard
    with torch.no_grad():
        return shard.to_local()


def wait_for_streams(device_type: str) -> None:
    """Wait for all that runs on an accelerator: writes to shards, and copies of them.

    Engines gather on streams of their own. Those wait for the stream that computes where a forward of the root begins,
    and not where users' code changes weights in the midst of it; and they copy offloaded shards while the host goes on.
    """
    if device_type != "cpu":
        torch.accelerator.synchronize()


def _engines_device(tensor: Tensor) -> str:
    """Return the type of device that the engine gathers on."""
    if isinstance(tensor, DTensor):
        return tensor.device_mesh.device_type
    return (tensor.place.device if isinstance(tensor, FlatShard) else tensor.device).type


def _share_memory(full: Tensor, tensor: Any) -> bool:
    is_plain = isinstance(tensor, Tensor) and not isinstance(tensor, Sharded) and _has_storage(tensor)
    return is_plain and full.device == tensor.device and _storage(full) == _storage(tensor)


def _check_not_freed(tensor: Tensor, hook: str) -> None:
    """Refuse a tensor whose memory FSDP has freed: reading it would end the process."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.numel() and _has_storage(tensor)
    if is_plain and not tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"{hook or 'User code'} uses a parameter, or a part of one, that a training step or a forward has kept "
            "(self.row = self.layer.weight[0]): FSDP frees the memory of unsharded parameters after the forward. Read "
            "the parameter from its module where it is used, or keep a copy (weight[0].detach().clone())."
        )


def _has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own: not inside of `torch.vmap` and `torch.func.grad`, nor sparse."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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


def _check_equal_on_ranks(value: Tensor, what: str) -> None:
    """Refuse a full tensor that differs between the ranks, of which each would keep another part.

    Raises:
        RuntimeError: On every rank.
    """
    bits = value.detach().double().sum().nan_to_num()
    ends = torch.stack([bits, -bits])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if float(ends[0]) != -float(ends[1]):
        raise RuntimeError(
            f"{what}: the ranks assigned different values, and each rank would keep a part of a different tensor "
            "(under ddp the weights of the ranks would diverge). Average it first: "
            "torch.distributed.all_reduce(value, torch.distributed.ReduceOp.SUM), then divide by the number of "
            "ranks."
        )


def _is_sharded_alike(tensor: Tensor, shard: Sharded) -> bool:
    if isinstance(tensor, FlatShard):
        return isinstance(shard, FlatShard) and tensor.place.is_alike(shard.place)
    if isinstance(tensor, DTensor) and isinstance(shard, DTensor):
        return tensor.device_mesh == shard.device_mesh  # DTensor brings the placements together itself
    return False


def _replicated(number: Tensor, shard: Sharded) -> Tensor:
    if isinstance(shard, FlatShard):
        return number
    mesh = shard.device_mesh
    return DTensor.from_local(number.to(shard.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _broadcast(one: torch.Size, other: torch.Size) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(one, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor):
            yield one
        elif type(one) in (list, tuple):
            yield from _tensors(one, {})


@cache
def is_element_by_element(name: str) -> bool:
    """Return whether the operation of this name treats every element alone, and draws no random numbers."""
    if name in _ELEMENT_BY_ELEMENT or name in _REDUCTIONS:
        return name in _ELEMENT_BY_ELEMENT
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.startswith("__"):
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return any(torch.Tag.pointwise in each for each in tags) and not any(
        torch.Tag.nondeterministic_seeded in each for each in tags
    )


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


@cache
def _foreach_base(name: str) -> str | None:
    base = name.removeprefix("_foreach_")
    return base if hasattr(Tensor, base) or hasattr(torch, base) else None


class _Link(torch.autograd.Function):
    """The full tensor as a function of a shard, whose gradient is the mean over the ranks, as ``ddp`` has it."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, tensor: Tensor, shard: Sharded) -> Tensor:
        ctx.shard = shard.detach()
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part = part_of(_mean(gradient), ctx.shard)
        return None, part.held if isinstance(part, FlatShard) else part, None


class _Average(torch.autograd.Function):
    """A result that is the same on all ranks; its gradient is the mean over them."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _mean(gradient)


def _mean(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _averaging_gradients(result: Tensor, shard: Tensor) -> Tensor:
    if not result.requires_grad:
        return result
    averaged: Tensor = _Average.apply(result)  # type: ignore[no-untyped-call]
    return averaged
