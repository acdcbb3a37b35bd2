"""`MergePlan`: the output files, their sizes and the place of every tensor, decided before a byte is written."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, overload

from ..files import CheckpointError
from ..formats.base import DType, SourceTensor, TensorInfo, is_floating, read_weight_map
from ..formats.safetensors import Entry, lay_out
from ..names import Selection
from ..object_path import ObjectPath

if TYPE_CHECKING:
    import torch

Compute = Callable[[], "torch.Tensor"]
Described = tuple[SourceTensor, DType, Compute | None]
"""A tensor, the dtype it is written as, and what computes it."""

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the output."""

    name: str
    source: SourceTensor
    dtype: DType
    compute: Compute | None
    """Returns the values, with the source's shape and dtype; None where they are the source's."""
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

    def __init__(self, names: Sequence[str], describe: Callable[[str], Described], starts: array[int] | None):
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
    """The bytes before the first tensor, in blocks; none where torch lays the file out."""
    num_bytes: int
    tensors: Sequence[PlannedTensor]
    """In the file's order."""
    ties: Mapping[str, str]
    """Alias to name, of the tensors in this file."""


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


def make_plan(
    selection: Selection,
    tensors: Mapping[str, SourceTensor],
    *,
    dtype: DType | None = None,
    max_shard_bytes: int | None = None,
    safe: bool = True,
    infos: Mapping[str, TensorInfo] | None = None,
    stem: str | None = None,
    computed: Mapping[str, Compute] = MappingProxyType({}),
    by_size: bool = False,
) -> Plan:
    """Lay the output out.

    Args:
        selection: What is written, under which names.
        tensors: By name in the source.
        dtype: For floating-point tensors; None keeps each one's own.
        max_shard_bytes: Limit of the tensors in one file; None for a single file.
        safe: Safetensors; False for torch's own format.
        infos: What of them is known without their bytes, where that is quicker.
        stem: How files are named; None for the names of models.
        computed: What computes tensors that are not the source's, by their names in the output.
        by_size: Order the tensors of a safetensors file by size, so that small ones adjoin.

    Raises:
        CheckpointError: If nothing is written, or safetensors cannot hold something.
    """
    if not selection.names:
        reasons = ", ".join(sorted(set(selection.skipped.values()))) or "it holds none"
        raise CheckpointError(f"No tensors to write: {reasons}.")

    def target(tensor: TensorInfo) -> DType:
        return dtype if dtype is not None and is_floating(tensor.dtype) else tensor.dtype

    def describe(name: str) -> Described:
        tensor = tensors[selection.names[name]]
        return tensor, target(tensor), computed.get(name)

    known = tensors if infos is None else infos

    def entry(name: str) -> Entry:
        tensor = known[selection.names[name]]
        into = target(tensor)
        return Entry(name, into, tensor.shape, prod(tensor.shape) * into.itemsize)

    sizes = _Lazily(selection.names, lambda name: entry(name).num_bytes)
    groups = split(sizes, max_shard_bytes)
    stem, suffix = (stem or "model", ".safetensors") if safe else ("pytorch_model", ".bin")
    files = []
    file_of: dict[str, str] = {}
    for file_name, group in zip(file_names(len(groups), stem, suffix), groups, strict=True):
        members = set(group) if selection.ties else set()
        ties = {alias: name for alias, name in selection.ties.items() if name in members}
        files.append(_plan_file(file_name, group, entry, describe, ties, safe, by_size))
        if len(groups) > 1:
            file_of |= dict.fromkeys([*group, *([] if safe else ties)], file_name)  # torch's files hold both names
    if len(files) == 1:
        return Plan(tuple(files), None, b"")
    return Plan(tuple(files), f"{stem}{suffix}.index.json", index_bytes(file_of, sum(sizes.values())))


def _plan_file(
    name: str,
    members: Sequence[str],
    entry: Callable[[str], Entry],
    describe: Callable[[str], Described],
    ties: Mapping[str, str],
    safe: bool,
    by_size: bool,
) -> PlannedFile:
    if not safe:
        num_bytes = sum(entry(fqn).num_bytes for fqn in members)
        return PlannedFile(name, (), num_bytes, PlannedTensors(members, describe, None), ties)
    if "format" in ties:
        raise CheckpointError("A tied tensor is named 'format', which the safetensors header reserves.")
    metadata = {"format": "pt", **dict(sorted(ties.items()))}
    laid_out = lay_out(members, entry, metadata, by_size=by_size)
    tensors = PlannedTensors(laid_out.names, describe, laid_out.starts)
    return PlannedFile(name, laid_out.header, laid_out.num_bytes, tensors, ties)


# ------------------------------------------------------------------------------------------------
# Splitting the output over files, as Hugging Face does.
#
# Source: huggingface_hub 2.4 ``serialization/_base.py`` (``split_state_dict_into_shards_factory``); accelerate 1.15
# ``Accelerator.save_model`` for the index.


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")


def parse_size(size: str | int) -> int:
    """Return the bytes of ``"5GB"`` (10**9, as Hugging Face counts), ``"5GiB"`` or a number.

    Raises:
        ValueError: If it is neither, or less than one byte.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size.strip().upper()) if isinstance(size, str) else None
        if match is None or match[2] not in _UNITS:
            raise ValueError(
                f"A size must be a number of bytes or a string like '5GB', '500MB' or '2GiB', got {size!r}."
            )
        num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes < 1:
        raise ValueError(f"A size must be at least one byte, got {size!r}.")
    return num_bytes


def split(sizes: Mapping[str, int], max_shard_bytes: int | None) -> list[list[str]]:
    """Return the names of each file: filled in the given order; a tensor above the limit has a file of its own."""
    if max_shard_bytes is None:
        return [list(sizes)]
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, size in sizes.items():
        if size > max_shard_bytes:
            shards.append([name])
            continue
        if current_bytes + size > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size
    if current:
        shards.append(current)
    return shards


def file_names(count: int, stem: str, suffix: str) -> list[str]:
    """Return ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def index_bytes(file_of: Mapping[str, str], total_size: int) -> bytes:
    """Return the content of the index that names each tensor's file."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(file_of)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


# ------------------------------------------------------------------------------------------------
# Checks of the output folder's other files.


ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
RESULT_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The files that transformers' ``from_pretrained`` takes where several are there, first to last."""
_SHARD = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")


def check_destination(source: Path, output: Path, *, remove: bool) -> None:
    """Check an output folder against the checkpoint's.

    Raises:
        ValueError: If it is a file, is named like one, or would be removed together with the checkpoint.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_path is the folder to write into; {output} is a file.")
    if not output.exists() and output.suffix in (".safetensors", ".bin"):
        raise ValueError(
            f"output_path is the folder to write into, and the file in it is named model.safetensors; got {output}. "
            f"Pass its parent folder."
        )
    if isinstance(source, ObjectPath):
        return
    if remove and source.is_symlink():
        raise ValueError(f"remove_checkpoint_dir=True, but {source} is a link. Pass the folder it points to.")
    if remove and not isinstance(output, ObjectPath) and output.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"remove_checkpoint_dir=True would remove the output with it: {output} is inside {source}. "
            f"Choose an output folder outside the checkpoint."
        )


def check_conflicts(output: Path, plan: Plan) -> None:
    """Check that nothing in the folder would be loaded instead of what is about to be written.

    Raises:
        ValueError: If so.
    """
    written = plan.index_name or plan.files[0].name
    if written == ADAPTER_FILE:
        return
    for name in RESULT_NAMES[: RESULT_NAMES.index(written)]:
        if (output / name).exists():
            raise ValueError(
                f"{output} holds {name}, which loaders prefer to {written}. Remove it, or choose another output folder."
            )


def stale_files(output: Path, plan: Plan) -> list[str]:
    """Return the shards of an earlier, differently split merge that the new index replaces."""
    if plan.index_name is None or not (output / plan.index_name).is_file():
        return []
    try:
        named = set(read_weight_map(output / plan.index_name).values())
    except CheckpointError:
        return []  # not an index: nothing can be said about its files
    new = {file.name for file in plan.files}
    return sorted(name for name in named if _SHARD.fullmatch(name) and name not in new)
