"""The head of a safetensors file, byte for byte as the safetensors library writes it.

Source: safetensors 0.8 ``src/tensor.rs`` (``prepare``): dtypes in descending order of its enumeration, then names;
compact JSON, padded with spaces to 8 bytes, behind its length as a little-endian 64-bit number.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...errors import CheckpointError
from ..dtypes import DType

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
    """Where in the file each of them begins."""
    num_bytes: int


def lay_out(
    names: Iterable[str],
    describe: Callable[[str], Entry],
    metadata: Mapping[str, str],
    *,
    first: Sequence[str] = (),
    unit: int = 8,
) -> Layout:
    """Return the header of a file, and where its tensors lie.

    Args:
        names: Of the tensors.
        describe: Returns a tensor's entry.
        metadata: The header's.
        first: Tensors that come before all others, in this order; the library has none.
        unit: The first tensor begins at a multiple of this; the library takes 8.

    Raises:
        CheckpointError: If safetensors has no word for a dtype, a name is no text, or the header grows too large.
    """
    ordered = list(first)
    before = set(ordered)
    by_rank: dict[int, list[str]] = {}
    for name in names:
        if name not in before:
            by_rank.setdefault(describe(name).dtype.rank, []).append(name)
    for rank in sorted(by_rank, reverse=True):
        own = by_rank.pop(rank)
        own.sort()
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
    blocks.append(b" " * (-(_LENGTH + size) % unit))
    size += len(blocks[-1])
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"The header would have {size} bytes, safetensors reads up to {MAX_HEADER_BYTES}. Set max_shard_size."
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
        raise CheckpointError("A tensor is called '__metadata__', which safetensors keeps for itself.")
    shape = list(entry.shape)
    if entry.dtype.packed > 1 and shape:
        shape[-1] *= entry.dtype.packed
    sizes = ",".join(map(str, shape))
    offsets = f"[{stop - entry.num_bytes},{stop}]"
    return f'{_json(entry.name)}:{{"dtype":"{entry.dtype.code}","shape":[{sizes}],"data_offsets":{offsets}}}'
