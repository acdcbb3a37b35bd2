"""The plan of the output, made before a byte is written: files, sizes, and the place of every tensor."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar, overload

from ..errors import CheckpointError
from ..formats.dtypes import DType, is_floating
from ..formats.safetensors.header import Entry, lay_out
from ..formats.source import SourceTensor, TensorInfo
from ..names import Selection
from .linkable import LINK_BYTES, Sized, first_in_file, linkable_tensors
from .shards import file_names, index_bytes, split

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the output."""

    name: str
    source: SourceTensor
    dtype: DType
    start: int
    """Position of its bytes in the file; 0 where torch lays the file out."""

    @property
    def num_bytes(self) -> int:
        """Size in the output."""
        return prod(self.source.shape) * self.dtype.itemsize


class PlannedTensors(Sequence[PlannedTensor]):
    """Tensors of a file, made when they are asked for: there may be a hundred thousand.

    Args:
        names: In the file's order.
        describe: Returns what a tensor is made of, and its dtype in the output.
        starts: Where each begins; None where torch lays the file out.
    """

    def __init__(self, names: Sequence[str], describe: Callable[[str], Sized], starts: array[int] | None):
        self._names = names
        self._describe = describe
        self._starts = starts

    @overload
    def __getitem__(self, index: int) -> PlannedTensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PlannedTensor]: ...

    def __getitem__(self, index: int | slice) -> PlannedTensor | Sequence[PlannedTensor]:
        """Return one tensor, or several."""
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        name = self._names[index]
        return PlannedTensor(name, *self._describe(name), 0 if self._starts is None else self._starts[index])

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._names)

    def __eq__(self, other: object) -> bool:
        """Whether these are the same tensors at the same places."""
        return isinstance(other, PlannedTensors) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class _Lazily(Mapping[str, _Value]):
    """Values by name, made when they are asked for."""

    def __init__(self, names: Collection[str], make: Callable[[str], _Value]):
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> _Value:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class PlannedFile:
    """A file of the output."""

    name: str
    header: tuple[bytes, ...]
    """What stands before the first tensor, in blocks; none where torch lays the file out."""
    num_bytes: int
    tensors: Sequence[PlannedTensor]
    """In the file's order."""
    ties: Mapping[str, str]
    """Alias to name, of the tensors in this file."""
    num_linkable: int = 0
    """Bytes that can be links to the source's, where the file system has such; the file is laid out for them."""


@dataclass(frozen=True)
class Plan:
    """All files, and the index where there is more than one."""

    files: tuple[PlannedFile, ...]
    index_name: str | None
    index: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.num_bytes for file in self.files) + len(self.index)

    @property
    def num_linkable(self) -> int:
        """Bytes of all files that can be links."""
        return sum(file.num_linkable for file in self.files)


def make_plan(
    selection: Selection,
    tensors: Mapping[str, SourceTensor],
    *,
    dtype: DType | None = None,
    max_shard_bytes: int | None = None,
    safe: bool = True,
    reflink: bool = False,
    infos: Mapping[str, TensorInfo] | None = None,
) -> Plan:
    """Lay the output out.

    Args:
        selection: What is written, under which names.
        tensors: By name in the source.
        dtype: For floating-point tensors; None keeps each one's own.
        max_shard_bytes: Limit of the tensors in one file; None for a single file.
        safe: Safetensors; False for torch's own format.
        reflink: Whether safetensors are laid out for links, where most of the source is aligned for them.
        infos: What of them is known without their bytes, where that is quicker to tell.

    Raises:
        CheckpointError: If nothing is written, or safetensors cannot hold something.
    """
    if not selection.names:
        reasons = ", ".join(sorted(set(selection.skipped.values()))) or "it holds none"
        raise CheckpointError(f"No tensor is left to write: {reasons}.")

    def target(tensor: TensorInfo) -> DType:
        return dtype if dtype is not None and is_floating(tensor.dtype) else tensor.dtype

    def describe(name: str) -> Sized:
        tensor = tensors[selection.names[name]]
        return tensor, target(tensor)

    known = tensors if infos is None else infos

    def entry(name: str) -> Entry:
        tensor = known[selection.names[name]]
        into = target(tensor)
        return Entry(name, into, tensor.shape, prod(tensor.shape) * into.itemsize)

    planned, sizes = _Lazily(selection.names, describe), _Lazily(selection.names, lambda name: entry(name).num_bytes)
    linkable = linkable_tensors(planned, sizes) if reflink and safe else {}
    groups = split(sizes, max_shard_bytes)
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    files = []
    file_of: dict[str, str] = {}
    for file_name, group in zip(file_names(len(groups), stem, suffix), groups, strict=True):
        members = set(group) if selection.ties else set()
        ties = {alias: name for alias, name in selection.ties.items() if name in members}
        files.append(_plan_file(file_name, group, entry, describe, ties, linkable, safe))
        if len(groups) > 1:
            file_of |= dict.fromkeys([*group, *([] if safe else ties)], file_name)  # torch's files hold both names
    if len(files) == 1:
        return Plan(tuple(files), None, b"")
    return Plan(tuple(files), f"{stem}{suffix}.index.json", index_bytes(file_of, sum(sizes.values())))


def _plan_file(
    name: str,
    members: Sequence[str],
    entry: Callable[[str], Entry],
    describe: Callable[[str], Sized],
    ties: Mapping[str, str],
    linkable: Mapping[str, int],
    safe: bool,
) -> PlannedFile:
    if not safe:
        num_bytes = sum(entry(fqn).num_bytes for fqn in members)
        return PlannedFile(name, (), num_bytes, PlannedTensors(members, describe, None), ties)
    if "format" in ties:
        raise CheckpointError("A tied tensor is called 'format', which the safetensors header uses itself.")
    first = first_in_file(_Lazily(members, describe), _Lazily(members, lambda fqn: entry(fqn).num_bytes), linkable)
    metadata = {"format": "pt", **dict(sorted(ties.items()))}
    laid_out = lay_out(members, entry, metadata, first=first, unit=LINK_BYTES if first else 8)
    tensors = PlannedTensors(laid_out.names, describe, laid_out.starts)
    num_linkable = sum(linkable[fqn] for fqn in first)
    return PlannedFile(name, laid_out.header, laid_out.num_bytes, tensors, ties, num_linkable)
