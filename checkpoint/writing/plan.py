"""The plan of the output, made before a byte is written: files, sizes, and the place of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ..errors import CheckpointError
from ..formats.dtypes import DType, is_floating
from ..formats.safetensors.header import Entry, lay_out
from ..formats.source import SourceTensor
from ..names import Selection
from .linkable import LINK_BYTES, Sized, first_in_file, linkable_tensors
from .shards import file_names, index_bytes, split


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


@dataclass(frozen=True)
class PlannedFile:
    """A file of the output."""

    name: str
    header: bytes
    """What stands before the first tensor; empty where torch lays the file out."""
    num_bytes: int
    tensors: tuple[PlannedTensor, ...]
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
) -> Plan:
    """Lay the output out.

    Args:
        selection: What is written, under which names.
        tensors: By name in the source.
        dtype: For floating-point tensors; None keeps each one's own.
        max_shard_bytes: Limit of the tensors in one file; None for a single file.
        safe: Safetensors; False for torch's own format.
        reflink: Whether safetensors are laid out for links, where most of the source is aligned for them.

    Raises:
        CheckpointError: If nothing is written, or safetensors cannot hold something.
    """
    if not selection.names:
        reasons = ", ".join(sorted(set(selection.skipped.values()))) or "it holds none"
        raise CheckpointError(f"No tensor is left to write: {reasons}.")
    planned = {name: _target(tensors[source], dtype) for name, source in selection.names.items()}
    sizes = {name: prod(tensor.shape) * target.itemsize for name, (tensor, target) in planned.items()}
    linkable = linkable_tensors(planned, sizes) if reflink and safe else {}
    groups = split(sizes, max_shard_bytes)
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    files = []
    file_of: dict[str, str] = {}
    for file_name, group in zip(file_names(len(groups), stem, suffix), groups, strict=True):
        members = set(group)
        ties = {alias: name for alias, name in selection.ties.items() if name in members}
        files.append(_plan_file(file_name, {name: planned[name] for name in group}, ties, sizes, linkable, safe))
        file_of |= dict.fromkeys([*group, *([] if safe else ties)], file_name)  # torch's files hold both names
    if len(files) == 1:
        return Plan(tuple(files), None, b"")
    return Plan(tuple(files), f"{stem}{suffix}.index.json", index_bytes(file_of, sum(sizes.values())))


def _target(tensor: SourceTensor, dtype: DType | None) -> tuple[SourceTensor, DType]:
    return tensor, dtype if dtype is not None and is_floating(tensor.dtype) else tensor.dtype


def _plan_file(
    name: str,
    members: Mapping[str, Sized],
    ties: Mapping[str, str],
    sizes: Mapping[str, int],
    linkable: Mapping[str, int],
    safe: bool,
) -> PlannedFile:
    if not safe:
        tensors = tuple(PlannedTensor(fqn, source, dtype, 0) for fqn, (source, dtype) in members.items())
        return PlannedFile(name, b"", sum(sizes[fqn] for fqn in members), tensors, ties)
    if "format" in ties:
        raise CheckpointError("A tied tensor is called 'format', which the safetensors header uses itself.")
    entries = [Entry(fqn, dtype, source.shape, sizes[fqn]) for fqn, (source, dtype) in members.items()]
    metadata = {"format": "pt", **dict(sorted(ties.items()))}
    first = first_in_file(members, sizes, linkable)
    header, starts, num_bytes = lay_out(entries, metadata, first=first, unit=LINK_BYTES if first else 8)
    tensors = tuple(PlannedTensor(fqn, *members[fqn], start) for fqn, start in starts.items())
    return PlannedFile(name, header, num_bytes, tensors, ties, sum(linkable[fqn] for fqn in first))
