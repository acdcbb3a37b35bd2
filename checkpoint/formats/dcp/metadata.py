"""The ``.metadata`` file of torch.distributed.checkpoint, read without torch and without trusting it.

Source: torch 2.13 ``distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``); the older module
names are torch 2.0's.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...digests import FileDigest
from ...errors import CheckpointError, brief
from ...files import read_regular
from ..dtypes import DTYPES, DType
from ..source import MAX_BYTES, TensorInfo
from ..torch_save.allowed_names import EMPTY_DICT, Allowed, SafeCall, Sealed
from ..torch_save.pickled_objects import Size
from ..torch_save.unpickler import load_restricted

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 2**31  # about 100 bytes a chunk: ten million chunks and more


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
class StoredTensor(TensorInfo):
    """One tensor as ``.metadata`` describes it; chunks are (offsets, sizes, record)."""

    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], StoredRecord], ...]


@dataclass(frozen=True)
class DCPMetadata:
    """The checked content of ``.metadata``, in its order."""

    tensors: Mapping[str, StoredTensor]
    not_tensors: tuple[str, ...]
    paths: Mapping[str, tuple[str, ...]]
    """Keys of the saved (nested) state dict that lead to each entry; empty if it was saved unflattened."""
    offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Where in each file its records begin, in order: tensors' and others."""


class _Raw(metaclass=Sealed):
    """What the pickle fills in, unchecked; compared and hashed by identity.

    There is one for each chunk and each tensor, so they are kept small: what matters goes into slots, and the dict that
    it came in, which the unpickler keeps until its end, is emptied.
    """

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # a class with slots
            state = state[1]
        if type(state) is not dict:
            raise pickle.UnpicklingError(f"a {type(self).__name__.strip('_')} of {type(state).__name__}")
        self.take(state)
        state.clear()

    def take(self, state: dict[str, Any]) -> None:
        """Fill the slots."""


class _Metadata(_Raw):
    __slots__ = ("planner_data", "state_dict_metadata", "storage_data")

    def take(self, state: dict[str, Any]) -> None:
        self.state_dict_metadata = state.get("state_dict_metadata")
        self.planner_data = state.get("planner_data")
        self.storage_data = state.get("storage_data")


class _TensorStorage(_Raw):
    __slots__ = ("chunks", "properties", "size")

    def take(self, state: dict[str, Any]) -> None:
        self.properties, self.size, self.chunks = state.get("properties"), state.get("size"), state.get("chunks")


class _BytesStorage(_Raw):
    __slots__ = ()


class _Chunk(_Raw):
    __slots__ = ("offsets", "sizes")

    def take(self, state: dict[str, Any]) -> None:
        self.offsets, self.sizes = state.get("offsets"), state.get("sizes")


class _Index(_Raw):
    __slots__ = ("fqn", "offset")

    def take(self, state: dict[str, Any]) -> None:
        self.fqn, self.offset = state.get("fqn"), state.get("offset")


class _StorageInfo(_Raw):
    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")

    def take(self, state: dict[str, Any]) -> None:
        self.relative_path, self.offset, self.length = map(state.get, ("relative_path", "offset", "length"))
        self.transform_descriptors = state.get("transform_descriptors")


class _Properties(_Raw):
    __slots__ = ("dtype",)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and state:  # from `__getstate__`: dtype, layout and so on
            self.dtype = state[0]
        else:
            super().__setstate__(state)

    def take(self, state: dict[str, Any]) -> None:
        self.dtype = state.get("dtype")


class _Ignored(_Raw):
    __slots__ = ()

    def __setstate__(self, state: Any) -> None: ...


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
    ("torch", "Size"): Size,
    ("collections", "OrderedDict"): EMPTY_DICT,
    # The folder's own path, in `StorageMeta`; Python 3.13 moved the classes.
    **{
        (module, name): _IGNORE
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    **{("torch", name): name for name in DTYPES},
}


def read_dcp_metadata(path: Path, digest: FileDigest | None = None) -> DCPMetadata:
    """Read and check a ``.metadata`` file.

    Args:
        path: The file.
        digest: Of the file when it was written, where that is known.

    Raises:
        CheckpointError: If it is not one, or not as it was written, or its content is impossible.
    """
    content = read_regular(path, MAX_METADATA_BYTES, "a description")
    if digest is not None:
        digest.check(path, content)
    raw = load_restricted(content, _ALLOWED, str(path))
    try:
        return _Checker(str(path)).metadata(raw)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not the metadata of a DCP checkpoint ({type(error).__name__}: {error})."
        ) from error


_Records = dict[tuple[str, tuple[int, ...] | None], StoredRecord]


class _Checker:
    """Turns raw objects into checked ones; each raw one is freed as soon as its values have been checked."""

    def __init__(self, path: str):
        self._path = path

    def metadata(self, raw: object) -> DCPMetadata:
        content = self._typed(raw, _Metadata, "the file")
        entries = self._typed(content.state_dict_metadata, dict, "state_dict_metadata")
        storage = self._typed(content.storage_data, dict, "storage_data")
        records = self._records(storage)
        offsets: dict[str, set[int]] = {}
        for record in records.values():
            offsets.setdefault(record.relative_path, set()).add(record.offset)
        tensors: dict[str, StoredTensor] = {}
        not_tensors: list[str] = []
        for fqn in list(entries):
            self._typed(fqn, str, "an entry's name")
            entry = entries.pop(fqn)
            if isinstance(entry, _BytesStorage):
                not_tensors.append(fqn)
            else:
                tensors[fqn] = self._tensor(fqn, entry, records)
        places = {name: sorted(places) for name, places in offsets.items()}
        return DCPMetadata(tensors, tuple(not_tensors), self._paths(content.planner_data), places)

    def _tensor(self, fqn: str, raw: object, records: _Records) -> StoredTensor:
        entry = self._typed(raw, _TensorStorage, f"entry {fqn!r}")
        if type(entry.size) is not Size:
            raise self._wrong(entry.size, Size, f"{fqn!r}: size")
        dtype = self._dtype(entry.properties, fqn)
        chunks = {}
        for part in self._typed(entry.chunks, list, f"{fqn!r}: chunks"):
            if type(part) is not _Chunk:
                raise self._wrong(part, _Chunk, f"a chunk of {fqn!r}")
            offsets, sizes = part.offsets, part.sizes
            if type(offsets) is not Size:
                raise self._wrong(offsets, Size, f"{fqn!r}: chunk offsets")
            if type(sizes) is not Size:
                raise self._wrong(sizes, Size, f"{fqn!r}: chunk sizes")
            record = records.get((fqn, offsets)) or records.get((fqn, None))
            if record is None:
                raise CheckpointError(f"{self._path}: no file is named for the chunk of {fqn!r} at {list(offsets)}.")
            chunks[offsets, sizes] = (offsets, sizes, record)  # replicas of one chunk are listed several times
        return StoredTensor(fqn, dtype, entry.size, tuple(chunks.values()))

    def _records(self, storage: dict[Any, Any]) -> _Records:
        records: _Records = {}
        while storage:
            key, value = storage.popitem()
            index = self._typed(key, _Index, "a key of storage_data")
            fqn, offset = self._typed(index.fqn, str, "a storage index's name"), index.offset
            if offset is not None and type(offset) is not Size:
                raise self._wrong(offset, Size, f"{fqn!r}: storage offset")
            record = self._record(fqn, value)
            if records.setdefault((fqn, offset), record) != record:
                raise CheckpointError(f"{self._path}: two records for the chunk of {fqn!r} at {offset}.")
        return records

    def _record(self, fqn: str, raw: object) -> StoredRecord:
        info = self._typed(raw, _StorageInfo, f"the storage of {fqn!r}")
        path = self._typed(info.relative_path, str, f"{fqn!r}: relative_path")
        for name in ("offset", "length"):
            number = getattr(info, name)
            if type(number) is not int:
                raise self._wrong(number, int, f"{fqn!r}: {name}")
            if not 0 <= number < MAX_BYTES:
                raise CheckpointError(f"{self._path}: {fqn!r}: {name} is {number}, allowed is 0 to {MAX_BYTES - 1}.")
        transforms = tuple(self._typed(one, str, f"{fqn!r}: transform") for one in info.transform_descriptors or ())
        return StoredRecord(path, info.offset, info.length, transforms)

    def _dtype(self, raw: object, fqn: str) -> DType:
        name = self._typed(raw, _Properties, f"{fqn!r}: properties").dtype
        if not isinstance(name, str) or name not in DTYPES:
            raise CheckpointError(f"{self._path}: tensor {fqn!r} has dtype {brief(name)}, which is not known here.")
        return DTYPES[name]

    def _paths(self, raw: object) -> dict[str, tuple[str, ...]]:
        paths = {} if raw is None else self._typed(raw, dict, "planner_data")
        for fqn, path in paths.items():
            self._typed(fqn, str, "planner_data")
            if type(path) is not tuple or not all(type(key) is str or type(key) is int for key in path):
                raise CheckpointError(f"{self._path}: planner_data: the path of {fqn!r} is {brief(path)}.")
            if not all(type(key) is str for key in path):
                paths[fqn] = tuple(map(str, path))
        return paths

    def _typed(self, value: Any, kind: type[Any], what: str) -> Any:
        if type(value) is not kind:
            raise self._wrong(value, kind, what)
        return value

    def _wrong(self, value: object, kind: type[Any], what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {what} should be {kind.__name__.strip('_')}, found {type(value).__name__}."
        )
