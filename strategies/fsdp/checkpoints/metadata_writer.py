"""Writing ``.metadata`` piece by piece: the pickle that torch writes, in less time and without its memory.

`pickle.dump` remembers every object until its end: for 640,000 chunks 770 MB and 10 s of the processor, here a few MB
and 1.4 s. Only what is fetched again has a number: classes, fields, names and files, all of them at the beginning.
Every reader of the format reads it.

Source: CPython 3.11 ``pickletools.py``; torch 2.13 ``distributed/checkpoint/filesystem.py`` (``FileSystemWriter``).
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ...upstream.torch_core import _StorageInfo
from .packed_plans import Chunks
from .written_parts import parts_of

_FIELDS: dict[type, tuple[str, ...]] = {
    TensorStorageMetadata: ("properties", "size", "chunks"),
    ChunkStorageMetadata: ("offsets", "sizes"),
    MetadataIndex: ("fqn", "index", "offset"),
    _StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
}
"""What is written here, of each class: a torch with other fields has its own pickle written."""
_NEW = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_MEMOIZE, _POP = b"\x94", b"0"
_BATCH = 1000
_INT, _LONG = struct.Struct("<i"), struct.Struct("<I")
_FRAME = b"\x95"


def can_write(metadata: Metadata) -> bool:
    """Whether torch's classes are those that are known here, and names are text."""
    known = all({one.name for one in fields(cls)} == set(names) for cls, names in _FIELDS.items())
    return known and all(type(fqn) is str for fqn in metadata.state_dict_metadata)


def write_metadata(stream: BinaryIO, metadata: Metadata, results: Sequence[Iterable[WriteResult]]) -> None:
    """Write a description.

    Args:
        stream: Of the file.
        metadata: As torch plans it, without ``storage_data``.
        results: Where all ranks wrote what; used as ``storage_data``.
    """
    _Writer(stream, metadata, results).write()


class _Writer:
    def __init__(self, stream: BinaryIO, metadata: Metadata, results: Sequence[Iterable[WriteResult]]):
        self._stream = stream
        self._metadata = metadata
        self._parts = parts_of(results)
        self._gets: dict[object, bytes] = {}
        """Opcodes that fetch a class or a text."""
        self._num_memo = 0
        self._fragments: dict[object, bytes] = {}

    def write(self) -> None:
        self._stream.write(b"\x80\x04")
        self._write_memo()
        content = {**vars(self._metadata), "storage_data": None}
        self._stream.write(_global(Metadata) + b")\x81}(")
        for name, value in content.items():
            self._stream.write(_text(name))
            if name == "state_dict_metadata":
                self._write_items(self._gets[fqn] + self._entry(entry) for fqn, entry in value.items())
            elif name == "storage_data":
                self._write_items(self._storage())
            elif name == "planner_data" and isinstance(value, Mapping):
                self._write_items(self._key(fqn) + _pickled(path) for fqn, path in value.items())
            else:
                self._stream.write(_pickled(value))
        self._stream.write(b"ub.")

    def _write_memo(self) -> None:
        """Give a number to all that is fetched."""
        for cls in (*_FIELDS, torch.Size):
            self._remember(cls, _global(cls))
        names = dict.fromkeys(name for own in _FIELDS.values() for name in own)
        files = dict.fromkeys(file for part in self._parts for file in part.files())
        for text in (*names, *self._metadata.state_dict_metadata, *files):
            self._remember(text, _text(text))

    def _remember(self, what: object, pickled: bytes) -> None:
        if what not in self._gets:
            number = self._num_memo
            self._gets[what] = b"h%c" % number if number < 256 else b"j" + _LONG.pack(number)
            self._num_memo += 1
            self._stream.write(pickled + _MEMOIZE + _POP)

    def _key(self, text: str) -> bytes:
        return self._gets.get(text) or _text(text)

    def _write_items(self, items: Iterator[bytes]) -> None:
        """Write a dict of pickled keys with their values."""
        self._stream.write(b"}")
        while batch := b"".join(islice(items, _BATCH)):
            self._stream.write(b"(" + batch + b"u")

    def _entry(self, entry: object) -> bytes:
        """Return an entry of ``state_dict_metadata``."""
        if type(entry) is not TensorStorageMetadata:
            return _pickled(entry)
        gets, chunks = self._gets, cast("Any", entry.chunks)
        boxes = chunks.boxes() if isinstance(chunks, Chunks) else ((one.offsets, one.sizes) for one in chunks)
        chunk = gets[ChunkStorageMetadata] + _NEW + gets["offsets"]
        return b"".join(
            (
                gets[TensorStorageMetadata] + _NEW + gets["properties"] + _pickled(entry.properties),
                gets["size"] + self._size(entry.size) + gets["chunks"] + b"](",
                *(chunk + self._size(offsets) + gets["sizes"] + self._size(sizes) + b"ub" for offsets, sizes in boxes),
                b"eub",
            )
        )

    def _storage(self) -> Iterator[bytes]:
        """Yield the items of ``storage_data``."""
        gets = self._gets
        index_begin = gets[MetadataIndex] + _NEW + gets["fqn"]
        info_begin = gets[_StorageInfo] + _NEW + gets["relative_path"]
        for part in self._parts:
            for fqn, begin, hint, file, offset, length, transforms in part.records():
                key = index_begin + self._key(fqn) + gets["index"] + (b"N" if hint is None else _number(hint))
                if begin is not None:
                    key += gets["offset"] + self._size(begin)
                value = info_begin + gets[file] + gets["offset"] + _number(offset)
                value += gets["length"] + _number(length)
                if transforms is not None:
                    value += gets["transform_descriptors"] + _pickled(transforms)
                yield key + b"ub" + value + b"ub"

    def _size(self, size: tuple[int, ...]) -> bytes:
        """Return a ``torch.Size``; few differ."""
        found = self._fragments.get(size)
        if found is None:
            numbers = b"".join(map(_number, size))
            if not size:
                made = b")"
            elif len(size) <= 3:
                made = numbers + (b"\x85", b"\x86", b"\x87")[len(size) - 1] + _MEMOIZE
            else:
                made = b"(" + numbers + b"t" + _MEMOIZE
            found = self._gets[torch.Size] + made + b"\x85\x94R\x94"
            if len(self._fragments) < 100_000:
                self._fragments[size] = found
        return found


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"\x8c%c" % len(data) + data if len(data) < 256 else b"X" + _LONG.pack(len(data)) + data


def _global(cls: type) -> bytes:
    return _text(cls.__module__) + _text(cls.__qualname__) + b"\x93"


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65_536:
        return b"M%c%c" % (value & 255, value >> 8)
    if -(2**31) <= value < 2**31:
        return b"J" + _INT.pack(value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(data) + data


def _pickled(value: object) -> bytes:
    """Return what puts a value on the stack, whatever the memo holds."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 4)
    pickler.fast = True  # remembers nothing
    pickler.dump(value)
    data = buffer.getvalue()
    return data[11 if data[2:3] == _FRAME else 2 : -1]
