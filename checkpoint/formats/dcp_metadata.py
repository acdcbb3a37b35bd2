"""The ``.metadata`` file of torch.distributed.checkpoint, read without torch and without trusting it.

Source: torch 2.13 ``distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``); the older module
names are torch 2.0's.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import CheckpointError, brief, read_regular
from ..manifest import FileDigest
from .base import DTYPES, MAX_BYTES, DType, TensorInfo
from .safe_unpickler import Allowed, CheckedDict, SafeCall, Sealed, Size, load_restricted, type_name

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 2**31  # about 100 bytes a chunk: ten million chunks and more

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The place of one chunk: a range of a file, relative to the checkpoint's folder."""

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]
    is_raw: bool = False
    """The chunk's bytes themselves, as in a safetensors file; else a record of ``torch.save``."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The cut of tensors. Tensors of one dtype and shape that are cut alike share one object."""

    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor(TensorInfo):
    """One tensor as ``.metadata`` describes it."""

    layout: Layout
    records: tuple[StoredRecord, ...]
    """Of each of the layout's boxes."""

    @classmethod
    def of(cls, fqn: str, layout: Layout, records: tuple[StoredRecord, ...]) -> StoredTensor:
        """Return a tensor that is cut in this way."""
        return cls(fqn, layout.dtype, layout.shape, layout, records)


@dataclass(frozen=True)
class DCPMetadata:
    """The checked content of ``.metadata``, in its order."""

    tensors: Mapping[str, StoredTensor]
    not_tensors: tuple[str, ...]
    paths: Mapping[str, tuple[str, ...]]
    """Keys of the saved (nested) state dict that lead to each entry; empty if it was saved unflattened."""
    offsets: Mapping[str, list[int]] = field(default_factory=dict)
    """The offsets of the records in each file, in order: tensors' and others."""
    others: Mapping[tuple[str, str], StoredRecord] = field(default_factory=dict)
    """Records of what is no chunk of a tensor, by name and `offset_key`."""


def offset_key(offset: tuple[int, ...] | None) -> str:
    """Return a chunk's offset as text: a file can hold very many tuples with equal hashes, but no such texts."""
    return "" if offset is None else tuple.__repr__(offset)


# ------------------------------------------------------------------------------------------------
# Raw objects that the pickle fills, unchecked; compared and hashed by identity.


class _Raw(metaclass=Sealed):
    """An object whose state goes into slots. The dict that it came in stays in the unpickler's memo, and is emptied."""

    __slots__: tuple[str, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if type(state) is tuple and len(state) == 2 and state[0] is None:  # a class with slots
            state = state[1]
        if type(state) is not CheckedDict:
            raise pickle.UnpicklingError(f"a {type(self).__name__.strip('_')} of {type(state).__name__}")
        for name in self.__slots__:
            setattr(self, name, state.get(name))
        state.clear()


class _Metadata(_Raw):
    __slots__ = ("planner_data", "state_dict_metadata", "storage_data")


class _TensorStorage(_Raw):
    __slots__ = ("chunks", "properties", "size")


class _BytesStorage(_Raw):
    __slots__ = ()


class _Chunk(_Raw):
    __slots__ = ("offsets", "sizes")


class _Index(_Raw):
    __slots__ = ("fqn", "offset")


class _StorageInfo(_Raw):
    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")


class _Properties(_Raw):
    __slots__ = ("dtype",)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and state:  # from `__getstate__`: dtype, layout and so on
            self.dtype = state[0]
        else:
            super().__setstate__(state)


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
    ("collections", "OrderedDict"): CheckedDict,
    # The folder's own path, in `StorageMeta`; Python 3.13 moved the classes.
    **{
        (module, name): _IGNORE
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    **{("torch", name): name for name in DTYPES},
}


# ------------------------------------------------------------------------------------------------
# From raw objects to checked values.


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
    return parse_dcp_metadata(content, str(path))


def parse_dcp_metadata(content: bytes, what: str) -> DCPMetadata:
    """Check the content of a ``.metadata`` file.

    Args:
        content: All of it.
        what: Names the file in errors.

    Raises:
        CheckpointError: As `read_dcp_metadata`.
    """
    try:
        return _Checker(what).metadata(load_restricted(content, _ALLOWED, what))
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what}: not the metadata of a DCP checkpoint ({type(error).__name__}: {error})."
        ) from error
    except MemoryError:
        raise CheckpointError(f"{what}: the metadata is too large for the memory of this process.") from None


_KEY_TYPES = frozenset((str, int))


class _Checker:
    """Turns raw objects into checked ones."""

    def __init__(self, path: str):
        self._path = path
        self._records: dict[tuple[str, str], StoredRecord] = {}
        """By name and `offset_key`."""
        self._offsets: dict[str, set[int]] = {}
        self._used: set[tuple[str, str]] = set()
        self._layouts: dict[tuple[str, str, tuple[str, ...]], Layout] = {}

    def metadata(self, raw: object) -> DCPMetadata:
        """Return the file's content, given its outermost object."""
        content = self._typed(raw, _Metadata, "the file")
        entries = self._typed(content.state_dict_metadata, CheckedDict, "state_dict_metadata")
        paths = {} if content.planner_data is None else self._typed(content.planner_data, CheckedDict, "planner_data")
        for index, info in self._typed(content.storage_data, CheckedDict, "storage_data").items():
            self._add_record(index, info)
        tensors: dict[str, StoredTensor] = {}
        not_tensors: list[str] = []
        for fqn, entry in entries.items():
            self._typed(fqn, str, "an entry's name")
            if type(entry) is _BytesStorage:
                not_tensors.append(fqn)
            else:
                layout = self._layout(fqn, entry)
                tensors[fqn] = StoredTensor.of(fqn, layout, tuple([self._record(fqn, one) for one, _ in layout.boxes]))
        return DCPMetadata(
            tensors,
            tuple(not_tensors),
            {fqn: self._keys(fqn, keys) for fqn, keys in paths.items()},
            {name: sorted(own) for name, own in self._offsets.items()},
            {key: record for key, record in self._records.items() if key not in self._used},
        )

    def _add_record(self, raw_index: object, raw_info: object) -> None:
        index = self._typed(raw_index, _Index, "a key of storage_data")
        fqn, offset = self._typed(index.fqn, str, "a storage index's name"), index.offset
        if offset is not None:
            self._typed(offset, Size, "%r: storage offset", fqn)
        info = self._typed(raw_info, _StorageInfo, "the storage of %r", fqn)
        path = self._typed(info.relative_path, str, "%r: relative_path", fqn)
        for name, number in (("offset", info.offset), ("length", info.length)):
            if type(number) is not int or not 0 <= number < MAX_BYTES:
                self._typed(number, int, "%r: %s", fqn, name)
                raise CheckpointError(f"{self._path}: {fqn!r}: {name} is {number}, expected 0 to {MAX_BYTES - 1}.")
        transforms = tuple([self._typed(one, str, "%r: transform", fqn) for one in info.transform_descriptors or ()])
        record = StoredRecord(path, info.offset, info.length, transforms)
        known = self._records.setdefault((fqn, offset_key(offset)), record)
        if known is not record and known != record:
            raise CheckpointError(f"{self._path}: two records for the chunk of {fqn!r} at {offset}.")
        self._offsets.setdefault(path, set()).add(info.offset)

    def _record(self, fqn: str, offsets: tuple[int, ...]) -> StoredRecord:
        """Return the place of a chunk: its own record, or the one of the whole tensor."""
        for key in ((fqn, offset_key(offsets)), (fqn, offset_key(None))):
            if key in self._records:
                self._used.add(key)
                return self._records[key]
        raise CheckpointError(f"{self._path}: names no file for the chunk of {fqn!r} at {list(offsets)}.")

    def _layout(self, fqn: str, raw: object) -> Layout:
        entry = self._typed(raw, _TensorStorage, "entry %r", fqn)
        size = self._typed(entry.size, Size, "%r: size", fqn)
        dtype = self._dtype(entry.properties, fqn)
        boxes: dict[str, Box] = {}
        for part in self._typed(entry.chunks, list, "%r: chunks", fqn):
            chunk = self._typed(part, _Chunk, "a chunk of %r", fqn)
            offsets = self._typed(chunk.offsets, Size, "%r: chunk offsets", fqn)
            sizes = self._typed(chunk.sizes, Size, "%r: chunk sizes", fqn)
            boxes[f"{offsets}{sizes}"] = offsets, sizes  # replicas of one chunk are listed several times
        key = (dtype.name, str(size), tuple(boxes))
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = Layout(dtype, size, tuple(boxes.values()))
        return found

    def _dtype(self, raw: object, fqn: str) -> DType:
        name = self._typed(raw, _Properties, "%r: properties", fqn).dtype
        if not isinstance(name, str) or name not in DTYPES:
            raise CheckpointError(f"{self._path}: tensor {fqn!r} has dtype {brief(name)}, which is not supported.")
        return DTYPES[name]

    def _keys(self, fqn: object, keys: Any) -> tuple[str, ...]:
        self._typed(fqn, str, "planner_data")
        if type(keys) is not tuple or not _KEY_TYPES.issuperset(map(type, keys)):
            raise CheckpointError(f"{self._path}: planner_data: the path of {fqn!r} is {brief(keys)}.")
        return tuple(map(str, keys))

    def _typed(self, value: Any, kind: type[Any], what: str, *names: str) -> Any:
        if type(value) is not kind:
            wanted = "dict" if kind is CheckedDict else kind.__name__.strip("_")
            raise CheckpointError(f"{self._path}: {what % names} should be {wanted}, found {type_name(value)}.")
        return value
