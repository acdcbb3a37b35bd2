"""The ``.metadata`` file of torch.distributed.checkpoint, read without torch and without trusting it.

Source: torch 2.13 ``distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``); the older module
names are torch 2.0's.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...digests import FileDigest
from ...errors import CheckpointError, brief
from ...files import open_limited
from ..dtypes import DTYPES, DType
from ..source import MAX_BYTES
from ..torch_save.allowed_names import EMPTY_DICT, Allowed, SafeCall, Sealed
from ..torch_save.pickle_machine import Filled, Shortcut
from ..torch_save.pickled_objects import Size
from ..torch_save.repeats import Repeats
from ..torch_save.unpickler import load_restricted
from .storage_items import StorageItems
from .tensor_table import Layout, Paths, RecordPlaces, StoredRecord, TensorTable

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 2**31  # about 100 bytes a chunk: ten million chunks and more


@dataclass(frozen=True)
class DCPMetadata:
    """The checked content of ``.metadata``, in its order."""

    tensors: TensorTable
    not_tensors: tuple[str, ...]
    paths: Mapping[str, tuple[str, ...]]
    """Keys of the saved (nested) state dict that lead to each entry; empty if it was saved unflattened."""
    offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Where in each file its records begin, in order: tensors' and others."""
    others: Mapping[tuple[str, tuple[int, ...] | None], StoredRecord] = field(default_factory=dict)
    """Records of what is no chunk of a tensor, by name and offset."""


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
    __slots__ = ("chunks", "layout", "properties", "size")
    layout: Layout | None
    """What it says, when that was checked."""

    def take(self, state: dict[str, Any]) -> None:
        self.properties, self.size, self.chunks = state.get("properties"), state.get("size"), state.get("chunks")
        self.layout = None


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


def _make_item(fqn: object, place: object, path: object, offset: int, length: int) -> tuple[_Index, _StorageInfo]:
    """Return an index and its storage as the pickle's opcodes would have made them."""
    index, info = _Index.__new__(_Index), _StorageInfo.__new__(_StorageInfo)
    index.fqn, index.offset = fqn, place
    info.relative_path, info.offset, info.length, info.transform_descriptors = path, offset, length, None
    return index, info


def read_dcp_metadata(path: Path, digest: FileDigest | None = None) -> DCPMetadata:
    """Read and check a ``.metadata`` file.

    Args:
        path: The file.
        digest: Of the file when it was written, where that is known.

    Raises:
        CheckpointError: If it is not one, or not as it was written, or its content is impossible.
    """
    with os.fdopen(open_limited(path, MAX_METADATA_BYTES, "a description"), "rb") as stream:
        if digest is not None:
            digest.check_stream(path, stream)
        checker = _Checker(str(path))
        dicts = {
            "state_dict_metadata": _Sink(checker.entries),
            "planner_data": _Sink(checker.paths),
            "storage_data": _Sink(checker.records),
        }
        shortcuts: dict[type, Shortcut] = {_TensorStorage: Repeats(), _Index: StorageItems(_StorageInfo, _make_item)}
        raw = load_restricted(stream, _ALLOWED, str(path), dicts=dicts, shortcuts=shortcuts)
    try:
        return checker.metadata(raw)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not the metadata of a DCP checkpoint ({type(error).__name__}: {error})."
        ) from error


class _Sink(Filled):
    """One of the three large dicts: its items go to the checker as they come in."""

    __slots__ = ("_take",)

    def __init__(self, take: Callable[[list[Any], list[Any]], None]):
        self._take = take

    def fill(self, keys: list[Any], values: list[Any]) -> None:
        self._take(keys, values)


class _Checker:
    """Turns raw objects into a checked table; each raw one is freed as soon as its values have been checked."""

    def __init__(self, path: str):
        self._path = path
        self._table = TensorTable()
        self._paths = Paths(self._table)
        self._not_tensors: dict[str, None] = {}
        self._others: dict[tuple[str, tuple[int, ...] | None], StoredRecord] = {}
        """Records of what is no chunk of a tensor's, as far as is known yet; without offset: of all of a tensor."""

    def metadata(self, raw: object) -> DCPMetadata:
        """Return what the file holds, given its outermost object."""
        content = self._typed(raw, _Metadata, "the file")
        self._take_rest(content.state_dict_metadata, self.entries, "state_dict_metadata")
        if content.planner_data is not None:
            self._take_rest(content.planner_data, self.paths, "planner_data")
        self._take_rest(content.storage_data, self.records, "storage_data")
        others, self._others = self._others, {}
        for (fqn, offset), record in others.items():  # where its tensor was not known yet
            self._put(fqn, offset, record)
        self._complete()
        offsets = RecordPlaces(self._table, self._others.values())
        return DCPMetadata(self._table, tuple(self._not_tensors), self._paths, offsets, self._others)

    def _take_rest(self, given: object, take: Callable[[list[Any], list[Any]], None], what: str) -> None:
        """Take a dict's items, if they were not taken as they came in."""
        if type(given) is not _Sink:
            items = self._typed(given, dict, what)
            take(list(items), list(items.values()))

    def entries(self, names: list[Any], entries: list[Any]) -> None:
        """Take items of ``state_dict_metadata``."""
        table = self._table
        for fqn, entry in zip(names, entries, strict=True):
            self._typed(fqn, str, "an entry's name")
            if fqn in table.numbers or fqn in self._not_tensors:
                raise CheckpointError(f"{self._path}: two entries are called {fqn!r}.")
            if type(entry) is _BytesStorage:
                self._not_tensors[fqn] = None
                continue
            layout = getattr(entry, "layout", None)
            if type(layout) is not Layout:
                layout = self._layout(fqn, entry)
                entry.layout = layout
            table.add(fqn, layout)

    def _layout(self, fqn: str, raw: object) -> Layout:
        entry = self._typed(raw, _TensorStorage, f"entry {fqn!r}")
        if type(entry.size) is not Size:
            raise self._wrong(entry.size, Size, f"{fqn!r}: size")
        dtype = self._dtype(entry.properties, fqn)
        boxes: dict[tuple[Size, Size], None] = {}
        for part in self._typed(entry.chunks, list, f"{fqn!r}: chunks"):
            if type(part) is not _Chunk:
                raise self._wrong(part, _Chunk, f"a chunk of {fqn!r}")
            offsets, sizes = part.offsets, part.sizes
            if type(offsets) is not Size:
                raise self._wrong(offsets, Size, f"{fqn!r}: chunk offsets")
            if type(sizes) is not Size:
                raise self._wrong(sizes, Size, f"{fqn!r}: chunk sizes")
            boxes[offsets, sizes] = None  # replicas of one chunk are listed several times
        return self._table.layout(dtype, entry.size, tuple(boxes))

    def records(self, indices: list[Any], infos: list[Any]) -> None:
        """Take items of ``storage_data``."""
        for key, value in zip(indices, infos, strict=True):
            index = self._typed(key, _Index, "a key of storage_data")
            fqn, offset = self._typed(index.fqn, str, "a storage index's name"), index.offset
            if offset is not None and type(offset) is not Size:
                raise self._wrong(offset, Size, f"{fqn!r}: storage offset")
            self._put(fqn, offset, self._record(fqn, value))

    def _put(self, fqn: str, offset: tuple[int, ...] | None, record: StoredRecord) -> None:
        table = self._table
        number = table.numbers.get(fqn)
        place = None if number is None or offset is None else table.layouts[number].places.get(offset)
        if number is None or place is None:
            known = self._others.setdefault((fqn, offset), record)
        else:
            chunk = table.first[number] + place
            if not table.file_of[chunk]:
                table.set_record(chunk, record)
                return
            known = table.record(chunk)
        if known != record:
            raise CheckpointError(f"{self._path}: two records for the chunk of {fqn!r} at {offset}.")

    def _complete(self) -> None:
        """Give chunks that begin where another does that one's record, and the others that of their tensor."""
        table = self._table
        names: list[str] = []
        chunk = -1
        while True:
            try:
                chunk = table.file_of.index(0, chunk + 1)
            except ValueError:
                return
            number = table.tensor_of(chunk)
            names = names or list(table.numbers)  # numbered in their order
            fqn = names[number]
            layout, first = table.layouts[number], table.first[number]
            offsets, _ = layout.boxes[chunk - first]
            twin = first + layout.places[offsets]
            record = table.record(twin) if twin != chunk else self._others.get((fqn, None))
            if record is None:
                raise CheckpointError(f"{self._path}: no file is named for the chunk of {fqn!r} at {list(offsets)}.")
            table.set_record(chunk, record)

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

    def paths(self, names: list[Any], paths: list[Any]) -> None:
        """Take items of ``planner_data``."""
        for fqn, path in zip(names, paths, strict=True):
            self._typed(fqn, str, "planner_data")
            if type(path) is not tuple or not all(type(key) is str or type(key) is int for key in path):
                raise CheckpointError(f"{self._path}: planner_data: the path of {fqn!r} is {brief(path)}.")
            self._paths.add(fqn, tuple(map(str, path)))

    def _typed(self, value: Any, kind: type[Any], what: str) -> Any:
        if type(value) is not kind:
            raise self._wrong(value, kind, what)
        return value

    def _wrong(self, value: object, kind: type[Any], what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {what} should be {kind.__name__.strip('_')}, found {type(value).__name__}."
        )
