"""safetensors files: the header, byte for byte as the safetensors library writes it, and the reader.

Source: safetensors 0.8 ``src/tensor.rs`` (``prepare``): dtypes in descending order of its enumeration, then names;
compact JSON, padded with spaces to 8 bytes, behind its length as a little-endian 64-bit number.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..files import CheckpointError, brief, close, open_regular, read_at, size_of
from .base import DTYPES, MAX_BYTES, MAX_DIMS, DType, FileTensor, TensorFile

MAX_HEADER_BYTES = 100_000_000  # the library refuses to read more
_LENGTH = 8
_BLOCK = 1000  # tensors: there may be a hundred thousand, and no second copy of all is made
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Entry(NamedTuple):  # a tuple: there may be a hundred thousand, and they are made quickly
    """One tensor of the file to be."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    num_bytes: int


class Layout(NamedTuple):
    """A file to be."""

    header: tuple[bytes, ...]
    """In blocks."""
    names: list[str]
    """Of its tensors, in the file's order."""
    starts: array[int]
    """The offset of each of them in the file."""
    num_bytes: int


def lay_out(
    names: Iterable[str],
    describe: Callable[[str], Entry],
    metadata: Mapping[str, str],
    *,
    by_size: bool = False,
) -> Layout:
    """Return the header of a file, and where its tensors lie.

    Args:
        names: Of the tensors.
        describe: Returns a tensor's entry.
        metadata: The header's.
        by_size: Put the smallest first, among those of one alignment; else by name, as the library does.

    Raises:
        CheckpointError: If safetensors has no word for a dtype, a name is no text, or the header grows too large.
    """
    ordered: list[str] = []
    by_rank: dict[int, list[str]] = {}
    for name in names:
        by_rank.setdefault(describe(name).dtype.rank, []).append(name)
    for rank in sorted(by_rank, reverse=True):
        own = by_rank.pop(rank)
        own.sort(key=(lambda name: (describe(name).num_bytes, name)) if by_size else None)
        ordered += own
    parts, blocks = [f'{{"__metadata__":{_json(dict(metadata))}'], []
    starts, position = array("q"), 0
    for name in ordered:
        entry = describe(name)
        starts.append(position)
        position += entry.num_bytes
        parts.append(_describe(entry, position))
        if len(parts) == _BLOCK:
            blocks.append(_encoded(",".join(parts)))
            parts = [""]
    blocks.append(_encoded(",".join(parts) + "}"))
    size = sum(map(len, blocks))
    blocks.append(b" " * (-(_LENGTH + size) % 8))  # as the library fills it up
    size += len(blocks[-1])
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"The header would have {size} bytes, but safetensors reads at most {MAX_HEADER_BYTES}. Set max_shard_size."
        )
    header = (size.to_bytes(_LENGTH, "little"), *blocks)
    begin = _LENGTH + size
    return Layout(header, ordered, array("q", (begin + start for start in starts)), begin + position)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"A tensor's name is not valid text: {error}.") from error


def _describe(entry: Entry, stop: int) -> str:
    """Return one tensor's name and description, as a header has them."""
    if entry.dtype.code is None:
        raise CheckpointError(
            f"Tensor {entry.name!r} is {entry.dtype.name}, which safetensors cannot hold. Use exclude, "
            f"or write pytorch_model.bin with safe_serialization=False."
        )
    if entry.name == "__metadata__":
        raise CheckpointError("A tensor is named '__metadata__', which safetensors reserves.")
    shape = list(entry.shape)
    if entry.dtype.packed > 1 and shape:
        shape[-1] *= entry.dtype.packed
    sizes = ",".join(map(str, shape))
    offsets = f"[{stop - entry.num_bytes},{stop}]"
    return f'{_json(entry.name)}:{{"dtype":"{entry.dtype.code}","shape":[{sizes}],"data_offsets":{offsets}}}'


# ------------------------------------------------------------------------------------------------
# Reading the untrusted header of a safetensors file without the safetensors library.
#
# Source: safetensors 0.8 ``src/tensor.rs`` (``Metadata::validate``): tensors lie one behind the other, without gaps,
# up to the file's end.


_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values() if dtype.code is not None}


def read_safetensors(path: Path) -> TensorFile:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: If it is not one, or its tensors do not fill the file exactly.
    """
    fd = open_regular(path)
    try:
        file_bytes = size_of(fd)
        size = int.from_bytes(read_at(fd, 8, 0), "little")
        if file_bytes < 8 or size > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise CheckpointError(
                f"{path}: not a safetensors file, or cut off: {file_bytes} bytes, of which the header has {size}."
            )
        text = read_at(fd, size, 8)
    finally:
        close(fd)
    try:
        described = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        return _parse(path, described, 8 + size, file_bytes)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not a safetensors header ({error}).") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _parse(path: Path, described: dict[str, Any], data_start: int, file_bytes: int) -> TensorFile:
    metadata = described.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ holds a value that is not a string")
    tensors = {name: _tensor(path, name, one, data_start) for name, one in described.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    position = data_start
    for name, tensor in ordered.items():
        if tensor.start != position:
            raise CheckpointError(f"{path}: tensor {name!r} begins at byte {tensor.start}, expected {position}.")
        position += tensor.num_bytes
    if position != file_bytes:
        raise CheckpointError(
            f"{path}: the tensors end at byte {position} by the header, but the file has {file_bytes}."
        )
    return TensorFile(path, ordered, metadata)


def _tensor(path: Path, name: str, raw: Mapping[str, Any], data_start: int) -> FileTensor:
    if not isinstance(raw["dtype"], str) or raw["dtype"] not in _BY_CODE:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {brief(raw['dtype'])}, which is not supported.")
    dtype = _BY_CODE[raw["dtype"]]
    shape, (start, stop) = list(raw["shape"]), raw["data_offsets"]
    if len(shape) > MAX_DIMS or not all(type(one) is int and 0 <= one < MAX_BYTES for one in (*shape, start, stop)):
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {brief(shape)} and data_offsets {brief([start, stop])}."
        )
    if dtype.packed > 1 and shape:
        shape[-1] //= dtype.packed
    if prod(shape) * dtype.itemsize != stop - start:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype.name} {shape} needs {prod(shape) * dtype.itemsize} bytes, but "
            f"data_offsets gives it {stop - start}."
        )
    return FileTensor(dtype, tuple(shape), data_start + start, stop - start)
