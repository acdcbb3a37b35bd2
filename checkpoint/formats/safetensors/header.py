"""The head of a safetensors file, byte for byte as the safetensors library writes it.

Source: safetensors 0.8 ``src/tensor.rs`` (``prepare``): dtypes in descending order of its enumeration, then names;
compact JSON, padded with spaces to 8 bytes, behind its length as a little-endian 64-bit number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import CheckpointError
from ..dtypes import DType

MAX_HEADER_BYTES = 100_000_000  # the library refuses to read more
_LENGTH_BYTES = 8
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file to be."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    num_bytes: int


def lay_out(
    entries: Iterable[Entry], metadata: Mapping[str, str], *, first: Sequence[str] = (), unit: int = 8
) -> tuple[bytes, dict[str, int], int]:
    """Return the header's bytes, each tensor's position in the file in file order, and the file's size.

    Args:
        entries: The tensors.
        metadata: The header's.
        first: Tensors that come before all others, in this order; the library has none.
        unit: The first tensor begins at a multiple of this; the library takes 8.

    Raises:
        CheckpointError: If safetensors has no word for a dtype, a name is no text, or the header grows too large.
    """
    parts = [f'{{"__metadata__":{_json(dict(metadata))}']
    starts: dict[str, int] = {}
    position = 0
    places = {name: place for place, name in enumerate(first)}
    last = len(places)
    for entry in sorted(entries, key=lambda one: (places.get(one.name, last), -one.dtype.rank, one.name)):
        starts[entry.name] = position
        position += entry.num_bytes
        parts.append(_describe(entry, position))
    try:
        text = (",".join(parts) + "}").encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"A tensor's name is not valid text: {error}.") from error
    text += b" " * (-(_LENGTH_BYTES + len(text)) % unit)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"The header would have {len(text)} bytes, safetensors reads up to {MAX_HEADER_BYTES}. Set max_shard_size."
        )
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + position


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
