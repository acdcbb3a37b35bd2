"""What a file of full tensors holds, safetensors or torch's: as it describes them, checked against its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .dtypes import DType


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file."""

    dtype: DType
    shape: tuple[int, ...]
    """As torch has it: packed dtypes count stored elements."""
    start: int
    """Position of its first element in the file."""
    num_bytes: int
    strides: tuple[int, ...] | None = None
    """In elements; None for contiguous bytes."""


@dataclass(frozen=True)
class TensorFile:
    """The tensors of one file."""

    path: Path
    tensors: Mapping[str, FileTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of a safetensors header; a file of torch has none."""
