"""The ``.metadata`` file of torch.distributed.checkpoint, read without torch and without trusting it.

Source: torch 2.13 ``distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``); the older module
names are torch 2.0's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dtypes import DTYPES, DType
from .errors import CheckpointError
from .layout import MAX_BYTES
from .unpickler import Allowed, SafeCall, Sealed, load_restricted

METADATA_NAME = ".metadata"
_MAX_DIMS = 64
_MAX_BYTES = 2**31  # about 100 bytes a chunk: ten million chunks and more


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Where DCP wrote one chunk: a range of a file, relative to the checkpoint's folder."""

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]
    is_raw: bool = False
    """The chunk's bytes themselves, as in a safetensors file; else a record of ``torch.save``."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as ``.metadata`` describes it; chunks are (offsets, sizes, record)."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], StoredRecord], ...]


@dataclass(frozen=True)
class DCPMetadata:
    """The checked content of ``.metadata``, in its order."""

    tensors: Mapping[str, StoredTensor]
    not_tensors: tuple[str, ...]
    paths: Mapping[str, tuple[str, ...]]
    """Keys of the saved (nested) state dict that lead to each entry; empty if it was saved unflattened."""


class _Raw(metaclass=Sealed):
    """What the pickle fills in, unchecked; compared and hashed by identity."""

    __slots__ = ("fields",)
    fields: object

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # a class with slots
            state = state[1]
        object.__setattr__(self, "fields", state)


class _Metadata(_Raw):
    __slots__ = ()


class _TensorStorage(_Raw):
    __slots__ = ()


class _BytesStorage(_Raw):
    __slots__ = ()


class _Chunk(_Raw):
    __slots__ = ()


class _Index(_Raw):
    __slots__ = ()


class _StorageInfo(_Raw):
    __slots__ = ()


class _Properties(_Raw):
    __slots__ = ()


class _Ignored(_Raw):
    __slots__ = ()


class _Size(tuple[int, ...], metaclass=Sealed):
    """``torch.Size``: small non-negative integers, checked as they come in."""

    __slots__ = ()

    def __new__(cls, values: Iterable[Any] = ()) -> _Size:  # noqa: PYI034 - Self is newer than Python 3.10
        sizes = tuple(values)
        if len(sizes) > _MAX_DIMS or not all(type(size) is int and 0 <= size < MAX_BYTES for size in sizes):
            raise pickle.UnpicklingError(f"a torch.Size of {str(sizes)[:200]}")
        return super().__new__(cls, sizes)


_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
_IGNORE = SafeCall(lambda *_: None)

_ALLOWED: Allowed = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _TensorStorage,
    (_METADATA, "BytesStorageMetadata"): _BytesStorage,
    (_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "TensorProperties"): _Properties,
    (_OLD_PROPERTIES, "TensorProperties"): _Properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _IGNORE,
    (_OLD_PROPERTIES, "MEM_FORMAT_ENCODING"): _IGNORE,
    (_METADATA, "StorageMeta"): _Ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _IGNORE,
    ("torch", "Size"): _Size,
    ("collections", "OrderedDict"): SafeCall(lambda *args: dict(*args)),
    # The folder's own path, in `StorageMeta`; Python 3.13 moved the classes.
    **{
        (module, name): _IGNORE
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    **{("torch", name): name for name in DTYPES},
}


def read_dcp_metadata(path: Path) -> DCPMetadata:
    """Read and check a ``.metadata`` file.

    Raises:
        CheckpointError: If it is not one, or says what cannot be.
    """
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise CheckpointError(f"{path} has {size} bytes; a description has less than {_MAX_BYTES}.")
    raw = load_restricted(path.read_bytes(), _ALLOWED, str(path))
    try:
        return _Checker(str(path)).metadata(raw)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not the metadata of a DCP checkpoint ({type(error).__name__}: {error})."
        ) from error


class _Checker:
    """Turns raw objects into checked ones; every value is looked at once."""

    def __init__(self, path: str):
        self._path = path

    def metadata(self, raw: object) -> DCPMetadata:
        fields = self._fields(raw, _Metadata, "the file")
        entries = self._typed(fields.get("state_dict_metadata"), dict, "state_dict_metadata")
        storage = self._typed(fields.get("storage_data"), dict, "storage_data")
        records = self._records(storage)
        tensors: dict[str, StoredTensor] = {}
        not_tensors: list[str] = []
        for fqn, entry in entries.items():
            self._typed(fqn, str, "an entry's name")
            if isinstance(entry, _BytesStorage):
                not_tensors.append(fqn)
            else:
                tensors[fqn] = self._tensor(fqn, entry, records)
        return DCPMetadata(tensors, tuple(not_tensors), self._paths(fields.get("planner_data")))

    def _tensor(
        self, fqn: str, raw: object, records: Mapping[tuple[str, tuple[int, ...] | None], StoredRecord]
    ) -> StoredTensor:
        fields = self._fields(raw, _TensorStorage, f"entry {fqn!r}")
        shape = self._size(fields.get("size"), f"{fqn!r}: size")
        dtype = self._dtype(fields.get("properties"), fqn)
        chunks = {}
        for chunk in self._typed(fields.get("chunks"), list, f"{fqn!r}: chunks"):
            part = self._fields(chunk, _Chunk, f"a chunk of {fqn!r}")
            offsets = self._size(part.get("offsets"), f"{fqn!r}: chunk offsets")
            sizes = self._size(part.get("sizes"), f"{fqn!r}: chunk sizes")
            record = records.get((fqn, offsets), records.get((fqn, None)))
            if record is None:
                raise CheckpointError(f"{self._path}: no file is named for the chunk of {fqn!r} at {list(offsets)}.")
            chunks[offsets, sizes] = (offsets, sizes, record)  # replicas of one chunk are listed several times
        return StoredTensor(fqn, dtype, shape, tuple(chunks.values()))

    def _records(self, storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], StoredRecord]:
        records: dict[tuple[str, tuple[int, ...] | None], StoredRecord] = {}
        for key, value in storage.items():
            index = self._fields(key, _Index, "a key of storage_data")
            fqn = self._typed(index.get("fqn"), str, "a storage index's name")
            offset = index.get("offset")
            offset = None if offset is None else self._size(offset, f"{fqn!r}: storage offset")
            record = self._record(fqn, value)
            if records.setdefault((fqn, offset), record) != record:
                raise CheckpointError(f"{self._path}: two records for the chunk of {fqn!r} at {offset}.")
        return records

    def _record(self, fqn: str, raw: object) -> StoredRecord:
        info = self._fields(raw, _StorageInfo, f"the storage of {fqn!r}")
        path = self._typed(info.get("relative_path"), str, f"{fqn!r}: relative_path")
        numbers = []
        for name in ("offset", "length"):
            number = self._typed(info.get(name), int, f"{fqn!r}: {name}")
            if not 0 <= number < MAX_BYTES:
                raise CheckpointError(f"{self._path}: {fqn!r}: {name} is {number}, allowed is 0 to {MAX_BYTES - 1}.")
            numbers.append(number)
        transforms = info.get("transform_descriptors") or ()
        return StoredRecord(
            path, numbers[0], numbers[1], tuple(self._typed(one, str, f"{fqn!r}: transform") for one in transforms)
        )

    def _dtype(self, raw: object, fqn: str) -> DType:
        state = self._typed(raw, _Properties, f"{fqn!r}: properties").fields
        name = state.get("dtype") if isinstance(state, dict) else state[0]  # a tuple, from `__getstate__`
        if not isinstance(name, str) or name not in DTYPES:
            raise CheckpointError(f"{self._path}: tensor {fqn!r} has dtype {name!r}, which is not known here.")
        return DTYPES[name]

    def _paths(self, raw: object) -> dict[str, tuple[str, ...]]:
        if raw is None:
            return {}
        return {
            self._typed(fqn, str, "planner_data"): tuple(str(key) for key in path)
            for fqn, path in self._typed(raw, dict, "planner_data").items()
        }

    def _size(self, value: object, what: str) -> tuple[int, ...]:
        return self._typed(value, _Size, what)

    def _fields(self, raw: object, kind: type[_Raw], what: str) -> dict[str, Any]:
        return self._typed(self._typed(raw, kind, what).fields, dict, f"the content of {what}")

    def _typed(self, value: Any, kind: type[Any], what: str) -> Any:
        if type(value) is not kind:
            raise CheckpointError(
                f"{self._path}: {what} should be {kind.__name__.strip('_')}, found {type(value).__name__}."
            )
        return value
