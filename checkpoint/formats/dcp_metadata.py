"""The ``.metadata`` file of torch.distributed.checkpoint, read without torch and without trusting it.

Source: torch 2.13 ``distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``); the older module
names are torch 2.0's.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import CheckpointError, brief, open_limited
from ..manifest import FileDigest
from .base import DTYPES, MAX_BYTES, DType, TensorInfo
from .safe_unpickler import (
    EMPTY_DICT,
    Allowed,
    Filled,
    Machine,
    Repeats,
    SafeCall,
    Sealed,
    Shortcut,
    Size,
    load_restricted,
)

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


# ------------------------------------------------------------------------------------------------
# Items of a DCP description's largest dict, which says where each chunk lies: each is read at once.
#
# They are all written alike: a ``MetadataIndex`` (name, place in the list of chunks, offset) and a ``_StorageInfo``
# (file, offset, length), whose classes and fields are fetched from the memo. Once the numbers of these entries are
# known, an item is a few fixed bytes with a name, an offset, a file and three numbers between them.


_BEGIN = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_GET = rb"(?:h.|j.{4})"
_NUMBER = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6})"
_SIZES = rb"((?:" + _NUMBER + rb"){1,3}[\x85-\x87])\x94\x85\x94R\x94"
_ONE_NUMBER = re.compile(_NUMBER, re.DOTALL)
_ONE_GET = re.compile(_GET, re.DOTALL)
_INT = struct.Struct("<i")
_SHORT_TEXT, _MEMOIZE = 0x8C, b"\x94"
_NOTHING = rb"(?!)"
_MAX_KNOWN = 10_000
_MAX_TRIES = 100


class StorageItems:
    """A `Shortcut` for items of ``storage_data``.

    Args:
        info: What stands for ``_StorageInfo``.
        make: Makes an index and its storage of name, offset, file, place and length.
    """

    def __init__(self, info: type, make: Callable[[Any, Any, Any, int, int], tuple[object, object]]):
        self._info = info
        self._make = make
        self._begin = b"-"
        """What stands before a name."""
        self._end = re.compile(_NOTHING)
        """Matches what stands behind it."""
        self._num_tries = 0
        self._offsets: dict[bytes, Size] = {}

    def take(self, machine: Machine, position: int) -> int | None:
        """Put an index and its storage on the stack."""
        data, memo = machine.data, machine.memo
        if not data.startswith(self._begin, position) and not self._learn(machine, position):
            return None
        start = position + len(self._begin)
        stop, name = _text(data, start)
        found = self._end.match(data, stop)
        if found is None and self._learn(machine, position):
            found = self._end.match(data, stop)
        if found is None:
            return None
        sizes, fetched, path, place, length = found.groups()
        number, count = machine.num_memo, 4 + (name is not None) + 3 * (fetched is None)
        if machine.may_fetch(number, count):
            return None
        offset = self._offset(sizes) if fetched is None else memo[_operand(fetched)]
        if offset is None:
            return None
        fqn = str(name, "utf-8", "surrogatepass") if name is not None else memo[_operand(data[start:stop])]
        machine.stack += self._make(fqn, offset, memo[_operand(path)], _number(place), _number(length))
        machine.num_memo = number + count
        return found.end()

    def made(self, machine: Machine, position: int) -> None:
        """Do nothing: what is learnt is learnt in `take`."""

    def _offset(self, sizes: bytes) -> Size | None:
        """Return the ``torch.Size`` of some numbers and the opcode that makes a tuple of so many of them."""
        offset = self._offsets.get(sizes)
        if offset is None:
            numbers = [_number(one) for one in _ONE_NUMBER.findall(sizes[:-1])]
            if len(numbers) != sizes[-1] - 0x84:
                return None
            if len(self._offsets) > _MAX_KNOWN:
                self._offsets.clear()
            offset = self._offsets[sizes] = Size(numbers)
        return offset

    def _learn(self, machine: Machine, position: int) -> bool:
        """Find out by which numbers an item's class and fields are fetched, from one that fetches all of them."""
        if self._num_tries >= _MAX_TRIES:
            return False
        self._num_tries += 1
        data, memo = machine.data, machine.memo
        begin = _ONE_GET.match(data, position + len(_BEGIN))
        if not data.startswith(_BEGIN, position) or begin is None:
            return False
        stop, _ = _text(data, begin.end())
        end = _LEARN.match(data, stop)
        if end is None:
            return False
        fields = {**end.groupdict(), "fqn": begin[0]}
        expected = {**_FIELDS, "info": self._info}
        if any(one is not None and memo.get(_operand(one)) != expected[name] for name, one in fields.items()):
            return False
        self._begin = _BEGIN + begin[0]
        self._end = _end({name: _NOTHING if one is None else re.escape(one) for name, one in fields.items()})
        return True


def _end(gets: dict[str, bytes]) -> re.Pattern[bytes]:
    """Return what matches an item behind its name; ``gets`` match what is the same in all items."""
    offset = rb"(?:" + gets["size"] + _SIZES + rb"|(" + _GET + rb"))"
    index = gets["index"] + rb"(?:" + _NUMBER + rb"|N)" + gets["offset"] + offset + rb"ub"
    info = gets["path"] + rb"(" + _GET + rb")" + gets["place"] + rb"(" + _NUMBER + rb")"
    return re.compile(
        index + gets["info"] + re.escape(_BEGIN) + info + gets["length"] + rb"(" + _NUMBER + rb")ub", re.DOTALL
    )


_FIELDS: dict[str, object] = {
    "fqn": "fqn",
    "index": "index",
    "offset": "offset",
    "size": Size,
    "path": "relative_path",
    "place": "offset",
    "length": "length",
}
_LEARN = _end({name: b"(?P<" + name.encode() + b">" + _GET + b")" for name in (*_FIELDS, "info") if name != "fqn"})


def _text(data: bytes, position: int) -> tuple[int, bytes | None]:
    """Return where a short text ends, and it; where what fetches one ends, and None; or where nothing can follow."""
    code = data[position]
    if code == _SHORT_TEXT:
        stop = position + 2 + data[position + 1]
        return (stop + 1, data[position + 2 : stop]) if data[stop : stop + 1] == _MEMOIZE else (len(data), None)
    return position + {0x68: 2, 0x6A: 5}.get(code, len(data)), None


def _operand(get: bytes) -> int:
    """Return the memo's number that is fetched; one that there is not for what fetches nothing."""
    if get[0] == 0x68:
        return get[1]
    return int.from_bytes(get[1:], "little") if get[0] == 0x6A else -1


def _number(data: bytes) -> int:
    """Return the number that an opcode puts on the stack."""
    code = data[0]
    if code == 0x4B:
        return data[1]
    if code == 0x4D:
        return data[1] | data[2] << 8
    if code == 0x4A:
        return int(_INT.unpack(data[1:])[0])
    return int.from_bytes(data[2:], "little", signed=True)


# ------------------------------------------------------------------------------------------------
# What a DCP description says of very many tensors, in little memory: no object for each of them, or for its chunks.
#
# Most tensors share dtype, shape and cut with others: these are kept once, in a `Layout`. Where each chunk lies is in
# arrays. The objects of `metadata` are made when they are asked for.


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


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


class Layout:
    """How tensors are cut."""

    __slots__ = ("_places", "boxes", "dtype", "shape")

    def __init__(self, dtype: DType, shape: tuple[int, ...], boxes: tuple[Box, ...]):
        self.dtype = dtype
        self.shape = shape
        self.boxes = boxes
        self._places: dict[tuple[int, ...], int] | None = None

    @property
    def places(self) -> dict[tuple[int, ...], int]:
        """Offsets to the first of the chunks that begin there: an empty one may begin where another does."""
        if self._places is None:
            offsets = [offsets for offsets, _ in self.boxes]
            self._places = dict(zip(reversed(offsets), range(len(offsets) - 1, -1, -1), strict=True))
        return self._places


def same_names(where: str, name: str, one: str, two: str) -> CheckpointError:
    """Return the error of two entries that would have one name."""
    return CheckpointError(f"{where}: two entries are called {name!r}: {one!r} and {two!r}.")


class TensorTable(Mapping[str, StoredTensor]):
    """Tensors by name."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """Each tensor's, by name."""
        self.layouts: list[Layout] = []
        self.first = array("q", [0])
        """The first chunk of each tensor, and behind the last one how many there are."""
        self.files: list[str] = [""]
        self.file_of = array("I")
        """Of each chunk, the place in ``files``; 0 where none is known."""
        self.offsets = array("q")
        self.lengths = array("q")
        self.transforms: dict[int, tuple[str, ...]] = {}
        """Of the chunks that have any."""
        self.is_raw = False
        self._prefix: str | None = ""
        """What stands before each name in full; None where it is not the same for all."""
        self._fqns: dict[int, str] = {}
        self._layouts: dict[tuple[str, tuple[int, ...], tuple[Box, ...]], Layout] = {}
        self._files: dict[str, int] = {}

    @classmethod
    def of(cls, tensors: Iterable[StoredTensor]) -> TensorTable:
        """Return a table of tensors with records of one kind."""
        table = cls()
        for tensor in tensors:
            boxes = tuple((offsets, sizes) for offsets, sizes, _ in tensor.chunks)
            number = table.add(tensor.fqn, table.layout(tensor.dtype, tensor.shape, boxes))
            for chunk, (_, _, record) in enumerate(tensor.chunks, table.first[number]):
                table.set_record(chunk, record)
        return table

    def layout(self, dtype: DType, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Layout:
        """Return the layout of this kind, of which there is one."""
        key = (dtype.name, shape, boxes)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = Layout(dtype, shape, boxes)
        return found

    def add(self, fqn: str, layout: Layout) -> int:
        """Add a tensor whose chunks have no record yet, and return its number."""
        number = len(self.layouts)
        self.numbers[fqn] = number
        self.layouts.append(layout)
        count = len(layout.boxes)
        self.first.append(self.first[number] + count)
        zeros = bytes(8 * count)
        self.file_of.frombytes(zeros[: 4 * count])
        self.offsets.frombytes(zeros)
        self.lengths.frombytes(zeros)
        return number

    def file_number(self, name: str) -> int:
        """Return a file's place in ``files``."""
        number = self._files.get(name)
        if number is None:
            number = self._files[name] = len(self.files)
            self.files.append(name)
        return number

    def set_record(self, chunk: int, record: StoredRecord) -> None:
        """Say where a chunk lies."""
        self.file_of[chunk] = self.file_number(record.relative_path)
        self.offsets[chunk] = record.offset
        self.lengths[chunk] = record.length
        if record.transforms:
            self.transforms[chunk] = record.transforms
        self.is_raw = record.is_raw

    def record(self, chunk: int) -> StoredRecord:
        """Return where a chunk lies."""
        path = self.files[self.file_of[chunk]]
        return StoredRecord(path, self.offsets[chunk], self.lengths[chunk], self.transforms.get(chunk, ()), self.is_raw)

    def chunks(self, number: int) -> range:
        """Return the chunks of a tensor."""
        return range(self.first[number], self.first[number + 1])

    def tensor_of(self, chunk: int) -> int:
        """Return the number of the tensor that a chunk is part of."""
        return bisect_right(self.first, chunk) - 1

    def fqn(self, name: str, number: int) -> str:
        """Return a tensor's name in full."""
        return self._fqns[number] if self._prefix is None else self._prefix + name

    def info(self, name: str) -> TensorInfo:
        """Return what is known of a tensor without its chunks."""
        number = self.numbers[name]
        layout = self.layouts[number]
        return TensorInfo(self.fqn(name, number), layout.dtype, layout.shape)

    def __getitem__(self, name: str) -> StoredTensor:
        """Return a tensor."""
        number = self.numbers[name]
        layout = self.layouts[number]
        chunks = tuple((*box, self.record(chunk)) for box, chunk in zip(layout.boxes, self.chunks(number), strict=True))
        return StoredTensor(self.fqn(name, number), layout.dtype, layout.shape, chunks)

    def __iter__(self) -> Iterator[str]:
        """Yield the names in order."""
        return iter(self.numbers)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self.numbers)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.numbers

    def rename(self, names: Iterable[tuple[str, str]], where: str) -> None:
        """Keep some tensors, under other names.

        Args:
            names: New name and name. Each name is forgotten as it comes: there may be a hundred thousand.
            where: Names the folder in errors.

        Raises:
            CheckpointError: If two get one name.
        """
        old, new, prefix = self.numbers, dict[str, int](), None
        fqns: list[str] = []
        """Of those so far, where they do not all begin with the same prefix."""
        for name, fqn in names:
            if name in new:
                first = prefix + name if prefix is not None else fqns[list(new).index(name)]
                raise same_names(where, name, first, fqn)
            if not new:
                prefix = fqn.removesuffix(name)
            if prefix is not None and prefix + name != fqn:
                fqns = [prefix + one for one in new]
                prefix = None
            if prefix is None:
                fqns.append(fqn)
            new[name] = old.pop(fqn)
        self._prefix = prefix
        self._fqns = dict(zip(new.values(), fqns, strict=False))
        self.numbers = new


class Paths(Mapping[str, tuple[str, ...]]):
    """Keys of a nested state dict that lead to its entries: mostly, an entry's name is its keys with dots between."""

    def __init__(self, table: TensorTable):
        self._table = table
        self._cuts: list[tuple[int, ...] | None] = []
        """Of each tensor, the lengths of all keys but the last."""
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._others: dict[str, tuple[str, ...]] = {}
        self._num_tensors = 0

    def add(self, fqn: str, path: tuple[str, ...]) -> None:
        """Add an entry's."""
        number = self._table.numbers.get(fqn)
        if number is None or ".".join(path) != fqn or not path:
            self._others[fqn] = path
            return
        cut = tuple(map(len, path[:-1]))
        if len(self._cuts) <= number:
            self._cuts += [None] * (number + 1 - len(self._cuts))
        self._num_tensors += self._cuts[number] is None
        self._cuts[number] = self._known.setdefault(cut, cut)

    def __getitem__(self, fqn: str) -> tuple[str, ...]:
        """Return the keys that lead to an entry."""
        number = self._table.numbers.get(fqn)
        cut = self._cuts[number] if number is not None and number < len(self._cuts) else None
        if cut is None:
            return self._others[fqn]
        keys, position = [], 0
        for size in cut:
            keys.append(fqn[position : position + size])
            position += size + 1
        keys.append(fqn[position:])
        return tuple(keys)

    def __iter__(self) -> Iterator[str]:
        """Yield the entries."""
        for fqn, number in self._table.numbers.items():
            if number < len(self._cuts) and self._cuts[number] is not None:
                yield fqn
        yield from self._others

    def __len__(self) -> int:
        """Return how many entries there are."""
        return self._num_tensors + len(self._others)


class RecordPlaces(Mapping[str, Sequence[int]]):
    """Where in each file its records begin, in order: tensors' and others."""

    def __init__(self, table: TensorTable, others: Iterable[StoredRecord]):
        self._table = table
        self._others: dict[str, set[int]] = {}
        for record in others:
            self._others.setdefault(record.relative_path, set()).add(record.offset)
        self._names = dict.fromkeys([*table.files[1:], *self._others])
        self._places: dict[str, array[int]] = {}

    def __getitem__(self, name: str) -> Sequence[int]:
        """Return the places in a file."""
        if not self._places:
            self._places = self._find()
        return self._places[name]

    def _find(self) -> dict[str, array[int]]:
        """Return the places in all files, after one look at all chunks."""
        table, found = self._table, {name: array("q", self._others.get(name, ())) for name in self._names}
        by_number = [found.get(name, array("q")) for name in table.files]
        for number, place in zip(table.file_of, table.offsets, strict=True):
            by_number[number].append(place)
        return {name: array("q", sorted(set(places))) for name, places in found.items()}

    def __iter__(self) -> Iterator[str]:
        """Yield the files' names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return how many files there are."""
        return len(self._names)
