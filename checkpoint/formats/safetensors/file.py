"""The header of a safetensors file as somebody wrote it: read without the safetensors library, and not trusted.

Source: safetensors 0.8 ``src/tensor.rs`` (``Metadata::validate``): tensors lie one behind the other, without gaps,
up to the file's end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, brief
from ...files import open_regular
from ..dtypes import DTYPES
from ..source import MAX_BYTES, MAX_DIMS
from ..tensor_file import FileTensor, TensorFile
from .header import MAX_HEADER_BYTES

_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values() if dtype.code is not None}


def read_safetensors(path: Path) -> TensorFile:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: If it is not one, or its tensors do not fill the file exactly.
    """
    fd = open_regular(path)
    try:
        file_bytes = os.fstat(fd).st_size
        size = int.from_bytes(os.pread(fd, 8, 0), "little")
        if file_bytes < 8 or size > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise CheckpointError(
                f"{path}: not a safetensors file, or cut off: {file_bytes} bytes, of which the header has {size}."
            )
        text = os.pread(fd, size, 8)
    finally:
        os.close(fd)
    try:
        described = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        return _parse(path, described, 8 + size, file_bytes)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not one of safetensors ({error}).") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _parse(path: Path, described: dict[str, Any], data_start: int, file_bytes: int) -> TensorFile:
    metadata = described.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ holds what is no text")
    tensors = {name: _tensor(path, name, one, data_start) for name, one in described.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    position = data_start
    for name, tensor in ordered.items():
        if tensor.start != position:
            raise CheckpointError(f"{path}: tensor {name!r} begins at byte {tensor.start}, expected is {position}.")
        position += tensor.num_bytes
    if position != file_bytes:
        raise CheckpointError(f"{path}: the header ends the tensors at byte {position}, the file has {file_bytes}.")
    return TensorFile(path, ordered, metadata)


def _tensor(path: Path, name: str, raw: Mapping[str, Any], data_start: int) -> FileTensor:
    if not isinstance(raw["dtype"], str) or raw["dtype"] not in _BY_CODE:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {brief(raw['dtype'])}, which is not known here.")
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
            f"{path}: tensor {name!r} of {dtype.name} {shape} needs {prod(shape) * dtype.itemsize} bytes, "
            f"data_offsets give it {stop - start}."
        )
    return FileTensor(dtype, tuple(shape), data_start + start, stop - start)
