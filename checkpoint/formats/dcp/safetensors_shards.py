"""Folders of DCP's safetensors format: each rank's chunks in a file, and their places in its header.

Such a folder has no ``.metadata``. A header says where in its tensor each chunk begins, but not the tensor's
full shape: as for torch's own reader, it ends where the last chunk does.

Source: torch 2.13 ``distributed/checkpoint/hf_storage.py`` (``HuggingFaceStorageWriter`` with
``save_distributed=True``; ``HuggingFaceStorageReader.read_metadata``), ``filesystem.py`` (``_write_files_from_queue``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ...errors import CheckpointError
from ..dtypes import DType
from ..safe_paths import file_inside
from ..safetensors.file import read_safetensors
from ..source import MAX_BYTES
from ..tensor_file import TensorFile
from .metadata import DCPMetadata
from .tensor_table import StoredRecord, StoredTensor, TensorTable

SHARD_PATTERN = "shard-*-model-*-of-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"
_Chunk = tuple[tuple[int, ...], tuple[int, ...], StoredRecord]


def has_safetensors_shards(folder: Path) -> bool:
    """Whether a folder holds files with the names that DCP's safetensors writer gives."""
    return next(folder.glob(SHARD_PATTERN), None) is not None


def read_safetensors_shards(folder: Path) -> DCPMetadata:
    """Read the headers of all shards in a folder.

    Raises:
        CheckpointError: If one is damaged or does not say where its chunks belong, or two disagree about a tensor.
    """
    dtypes: dict[str, tuple[DType, str]] = {}
    chunks: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], _Chunk]] = {}
    for name in sorted(path.name for path in folder.glob(SHARD_PATTERN)):
        file = read_safetensors(file_inside(folder, name, str(folder)))
        for fqn, dtype, chunk in _chunks(file, name):
            first, where = dtypes.setdefault(fqn, (dtype, name))
            known = chunks.setdefault(fqn, {})
            if dtype is not first:
                raise CheckpointError(
                    f"{folder}: tensor {fqn!r} is {first.name} in {where} and {dtype.name} in {name}."
                )
            if any(len(sizes) != len(chunk[1]) for _, sizes in known):
                raise CheckpointError(
                    f"{folder}: tensor {fqn!r} has another number of dimensions in {where} than in {name}."
                )
            known.setdefault(chunk[:2], chunk)  # replicas
    tensors = (
        StoredTensor(fqn, dtypes[fqn][0], _full_shape(known), tuple(known.values())) for fqn, known in chunks.items()
    )
    return DCPMetadata(TensorTable.of(tensors), (), {})


def _full_shape(chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], _Chunk]) -> tuple[int, ...]:
    ends = [tuple(map(sum, zip(*chunk, strict=True))) for chunk in chunks]
    return tuple(map(max, zip(*ends, strict=True)))


def _chunks(file: TensorFile, name: str) -> Iterator[tuple[str, DType, _Chunk]]:
    if _OFFSETS not in file.metadata:
        raise CheckpointError(
            f"{file.path}: the header has no {_OFFSETS}, which says where the chunks belong. "
            f"torch.distributed.checkpoint's safetensors writer puts it there."
        )
    try:
        info = json.loads(file.metadata[_OFFSETS])
        places = {fqn: tuple(info[fqn]["saved_offsets"]) for fqn in file.tensors}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: {_OFFSETS} does not name every tensor's place ({error!r}).") from error
    for fqn, tensor in file.tensors.items():
        offsets = places[fqn]
        if len(offsets) != len(tensor.shape) or not all(type(one) is int and 0 <= one < MAX_BYTES for one in offsets):
            raise CheckpointError(
                f"{file.path}: tensor {fqn!r} of shape {list(tensor.shape)} is said to begin at {list(offsets)}."
            )
        record = StoredRecord(name, tensor.start, tensor.num_bytes, (), is_raw=True)
        yield fqn, tensor.dtype, (offsets, tensor.shape, record)
