"""One record of a ``.distcp`` file: a tensor written by ``torch.save``, located without torch and without copying.

A record is a small zip whose members are stored uncompressed: ``data.pkl`` says what the tensor is, ``data/0`` holds
its bytes. Only the record's two ends are read.

Source: torch 2.13 ``serialization.py`` (``_save``), ``_utils.py`` (``_rebuild_tensor_v2``, ``_v3``); the zip format's
APPNOTE 6.3.
"""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from .dtypes import DTYPES, STORAGE_CLASSES, DType
from .errors import CheckpointError
from .layout import MAX_BYTES
from .unpickler import Allowed, SafeCall, load_restricted

_SMALL = 16 * 1024  # a record up to this size is read whole, in one call
_END = 4 * 1024  # of a larger one, this much at each end to begin with
_MAX_PICKLE = 64 * 1024
_EOCD = struct.Struct("<4s4H2LH")
_EOCD64_LOCATOR = struct.Struct("<4sLQL")
_EOCD64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What a record holds, and where in the file its first element lies."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: DType | None
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class _Described:
    """Content of ``data.pkl``."""

    storage: _Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_v2(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, *more: Any) -> _Described:
    if not isinstance(storage, _Storage) or storage.dtype is None:
        raise pickle.UnpicklingError("a tensor without a typed storage")
    return _described(storage, storage.dtype, offset, shape, strides, more)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> _Described:
    if not isinstance(storage, _Storage) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise pickle.UnpicklingError(f"a tensor of dtype {dtype!r}")
    return _described(storage, DTYPES[dtype], offset, shape, strides, more)


def _described(storage: _Storage, dtype: DType, offset: Any, shape: Any, strides: Any, more: Any) -> _Described:
    if any(more):  # conjugate or negative bit: the bytes are not the values
        raise pickle.UnpicklingError(f"a lazy tensor, {more!r}. Save it after resolve_conj() and resolve_neg()")
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(one) is int and 0 <= one < MAX_BYTES for one in numbers):
        raise pickle.UnpicklingError(f"a tensor of shape {shape!r}, strides {strides!r} and storage offset {offset!r}")
    return _Described(storage, dtype, offset, tuple(shape), tuple(strides))


_ALLOWED: Allowed = {
    ("torch._utils", "_rebuild_tensor_v2"): SafeCall(_rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): SafeCall(_rebuild_v3),
    ("collections", "OrderedDict"): SafeCall(dict),
    **{("torch", name): ("storage", name) for name in STORAGE_CLASSES},
    **{("torch.storage", name): ("storage", name) for name in STORAGE_CLASSES},
    **{("torch", name): name for name in DTYPES},
}


def _storage(pid: Any) -> _Storage:
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], tuple):
        raise pickle.UnpicklingError("a storage that is not written by torch.save")
    _, (_, name), key, _, numel = pid
    if not isinstance(key, str) or type(numel) is not int or not 0 <= numel < MAX_BYTES:
        raise pickle.UnpicklingError(f"a storage with the key {key!r} and {numel!r} elements")
    dtype = STORAGE_CLASSES[name]
    return _Storage(None if dtype is None else DTYPES[dtype], key, numel)


class RecordReader:
    """Locates records in one open file."""

    def __init__(self, fd: int, name: str, file_bytes: int):
        self._fd = fd
        self._name = name
        self._file_bytes = file_bytes

    def locate(self, fqn: str, offset: int, length: int) -> TensorRecord:
        """Return the tensor in the record at ``offset``.

        Raises:
            CheckpointError: If the file is shorter, or the record is not one tensor stored as torch does.
        """
        what = f"{self._name}: tensor {fqn!r}"
        self.check_range(fqn, offset, length)
        try:
            return self._parse(_Window(self._fd, offset, length), what)
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{what}: the record at byte {offset} is not a zip of torch.save ({error})."
            ) from error

    def check_range(self, fqn: str, offset: int, length: int) -> None:
        """Check that the file is long enough for a record."""
        if offset + length > self._file_bytes:
            raise CheckpointError(
                f"{self._name}: tensor {fqn!r}: the record should end at byte {offset + length}, the file has "
                f"{self._file_bytes}. It was cut off, or belongs to another save."
            )

    def _parse(self, window: _Window, what: str) -> TensorRecord:
        members = _central_directory(window, what)
        prefix = next((name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")), None)
        if prefix is None:
            raise CheckpointError(f"{what}: the record has no data.pkl; it holds {sorted(members)[:8]}.")
        described = _describe(window, members, prefix, what)
        storage = described.storage
        name = f"{prefix}data/{storage.key}"
        if name not in members:
            raise CheckpointError(f"{what}: the record has no {name}; it holds {sorted(members)[:8]}.")
        start, size = _member_range(window, members[name], name, what)
        itemsize = described.dtype.itemsize
        if size != storage.numel * (1 if storage.dtype is None else storage.dtype.itemsize):
            raise CheckpointError(f"{what}: {name} has {size} bytes, data.pkl says {storage.numel} elements.")
        reach = ((n - 1) * stride for n, stride in zip(described.shape, described.strides, strict=True))
        last = described.offset + sum(reach)
        if prod(described.shape) and (last + 1) * itemsize > size:
            raise CheckpointError(f"{what}: shape and strides reach element {last}, {name} has {size // itemsize}.")
        position = window.offset + start + described.offset * itemsize
        return TensorRecord(described.dtype, described.shape, described.strides, position)


class _Window:
    """The bytes of one record, read where asked for; small ones at once."""

    def __init__(self, fd: int, offset: int, length: int):
        self._fd = fd
        self.offset = offset
        self.length = length
        if length <= _SMALL:
            self._head, self._tail_start = os.pread(fd, length, offset), 0
            self._tail = self._head
        else:
            self._head = os.pread(fd, _END, offset)
            self._tail_start = length - _END
            self._tail = os.pread(fd, _END, offset + self._tail_start)

    def read(self, start: int, stop: int, what: str) -> bytes:
        """Return bytes ``start`` to ``stop`` of the record."""
        if not 0 <= start <= stop <= self.length:
            raise CheckpointError(f"{what}: the record of {self.length} bytes points at bytes {start} to {stop}.")
        if stop <= len(self._head):
            data = self._head[start:stop]
        elif start >= self._tail_start:
            data = self._tail[start - self._tail_start : stop - self._tail_start]
        else:
            data = os.pread(self._fd, stop - start, self.offset + start)
        if len(data) != stop - start:
            raise CheckpointError(f"{what}: the file ends inside the record, at {len(data)} of {stop - start} bytes.")
        return data


_Member = tuple[int, int, int]
"""Position of the local header, size in bytes, start of the central directory (no data may lie behind that)."""


def _central_directory(window: _Window, what: str) -> dict[str, _Member]:
    end = window.length - _EOCD.size  # torch.save writes no comment: the last record stands at the very end
    if end < 0:
        raise CheckpointError(f"{what}: a record of {window.length} bytes is too short for a zip.")
    magic, *_, count, size, start, comment = _EOCD.unpack(window.read(end, window.length, what))
    if magic != b"PK\5\6" or comment:
        raise CheckpointError(f"{what}: the record does not end as a zip of torch.save: cut off or damaged.")
    if count == 0xFFFF or size == 0xFFFFFFFF or start == 0xFFFFFFFF:
        count, size, start = _zip64_end(window, end, what)
    if size > _MAX_PICKLE:
        raise CheckpointError(f"{what}: a zip directory of {size} bytes, torch.save writes less than {_MAX_PICKLE}.")
    data = window.read(start, start + size, what)
    members: dict[str, _Member] = {}
    position = 0
    for _ in range(count):
        entry = _CENTRAL.unpack_from(data, position)
        names = position + _CENTRAL.size
        extras = names + entry[10]
        name = data[names:extras].decode()
        stored, plain, local = entry[8], entry[9], entry[16]
        if 0xFFFFFFFF in (stored, plain, local):
            plain, stored, local = _zip64_extra(data[extras : extras + entry[11]], plain, stored, local, what)
        if entry[0] != b"PK\1\2" or entry[4] or entry[3] & 1 or stored != plain or name in members:
            raise CheckpointError(f"{what}: zip member {name!r} is compressed, encrypted or double; torch.save stores.")
        members[name] = (local, plain, start)
        position = extras + entry[11] + entry[12]
    return members


def _zip64_end(window: _Window, end: int, what: str) -> tuple[int, int, int]:
    magic, _, position, _ = _EOCD64_LOCATOR.unpack(window.read(end - _EOCD64_LOCATOR.size, end, what))
    if magic != b"PK\6\7":
        raise CheckpointError(f"{what}: the zip64 directory of the record is missing.")
    magic, *_, count, size, start = _EOCD64.unpack(window.read(position, position + _EOCD64.size, what))
    if magic != b"PK\6\6":
        raise CheckpointError(f"{what}: the zip64 directory of the record is damaged.")
    return count, size, start


def _zip64_extra(extra: bytes, plain: int, stored: int, local: int, what: str) -> tuple[int, int, int]:
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
            try:
                return tuple(next(values) if one == 0xFFFFFFFF else one for one in (plain, stored, local))  # type: ignore[return-value]
            except (StopIteration, RuntimeError):
                break
        position += 4 + size
    raise CheckpointError(f"{what}: a zip64 member of the record has no sizes.")


def _member_range(window: _Window, member: _Member, name: str, what: str) -> tuple[int, int]:
    """Return where a member's bytes start in the record, and how many there are."""
    local, size, limit = member
    header = _LOCAL.unpack(window.read(local, local + _LOCAL.size, what))
    names = local + _LOCAL.size
    if header[0] != b"PK\3\4" or window.read(names, names + header[9], what) != name.encode():
        raise CheckpointError(f"{what}: the zip directory points {name} at byte {local}, which is not its header.")
    start = names + header[9] + header[10]
    if start + size > limit:
        raise CheckpointError(
            f"{what}: {name} has {size} bytes from byte {start}, only {max(limit - start, 0)} are there."
        )
    return start, size


_known_pickles: dict[bytes, _Described] = {}  # thousands of layers repeat a few shapes


def _describe(window: _Window, members: dict[str, _Member], prefix: str, what: str) -> _Described:
    order = members.get(f"{prefix}byteorder")
    if order is not None:
        start, size = _member_range(window, order, f"{prefix}byteorder", what)
        if (found := window.read(start, start + min(size, 16), what)) != b"little":
            raise CheckpointError(f"{what}: saved with byte order {found!r}, only little endian can be copied.")
    start, size = _member_range(window, members[f"{prefix}data.pkl"], f"{prefix}data.pkl", what)
    if size > _MAX_PICKLE:
        raise CheckpointError(f"{what}: a data.pkl of {size} bytes; that of one tensor has less than {_MAX_PICKLE}.")
    data = window.read(start, start + size, what)
    known = _known_pickles.get(data)
    if known is not None:
        return known
    described = load_restricted(data, _ALLOWED, what, _storage)
    if not isinstance(described, _Described):
        raise CheckpointError(f"{what}: the record holds {type(described).__name__}, not one tensor.")
    if len(_known_pickles) > 10_000:
        _known_pickles.clear()
    _known_pickles[data] = described
    return described
