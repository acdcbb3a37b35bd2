"""Files of ``torch.save``: the archive, its tensors, state dicts, Lightning's metadata. No torch, no code runs.

Plain containers, numbers, text and tensors come out as they are; every other object becomes an `Inert`.

Source: torch 2.13 ``serialization.py``, ``_utils.py`` (``_rebuild_tensor_v2``, ``_v3``), ``_tensor.py``
(``_rebuild_from_type_v2``).
"""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..files import (
    CheckpointError,
    brief,
    close,
    file_inside,
    is_regular,
    open_file,
    open_regular,
    read_at,
    size_of,
)
from ..manifest import HINT, FileDigest
from .base import DTYPES, MAX_BYTES, MAX_DIMS, STORAGE_CLASSES, DType, FileTensor, TensorFile, is_contiguous
from .safe_unpickler import (
    Allowed,
    CheckedDict,
    Inert,
    InertByDefault,
    InertUnlessAttack,
    SafeCall,
    Size,
    load_restricted,
    type_name,
)

# ------------------------------------------------------------------------------------------------
# Tensors as the pickles of ``torch.save`` describe them, and the places of their bytes in a file.


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A stored tensor, and where in the file its first element lies."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class Storage(NamedTuple):  # a tuple: a pickle cannot set its fields, as it can those of a frozen dataclass
    """A storage as a persistent id describes it; ``dtype`` is None for bytes."""

    dtype: DType | None
    key: str
    numel: int


class DescribedTensor(NamedTuple):
    """A tensor as a pickle describes it."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, *more: Any
) -> DescribedTensor:
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise pickle.UnpicklingError("a tensor without a typed storage")
    return _described(storage, storage.dtype, offset, shape, strides, more)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> DescribedTensor:
    if not isinstance(storage, Storage) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise pickle.UnpicklingError(f"a tensor of dtype {brief(dtype)}")
    return _described(storage, DTYPES[dtype], offset, shape, strides, more)


def _described(storage: Storage, dtype: DType, offset: Any, shape: Any, strides: Any, more: Any) -> DescribedTensor:
    if any(more):  # conjugate or negative bit: the bytes are not the values
        raise pickle.UnpicklingError(
            f"a lazy tensor, {brief(more)}. Call resolve_conj() and resolve_neg() before saving"
        )
    if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= MAX_DIMS:
        raise pickle.UnpicklingError(f"a tensor of shape {brief(shape)} and strides {brief(strides)}")
    numbers = (offset, *shape, *strides)
    if not all(type(one) is int and 0 <= one < MAX_BYTES for one in numbers):
        raise pickle.UnpicklingError(
            f"a tensor of shape, strides and storage offset {', '.join(map(brief, (shape, strides, offset)))}"
        )
    return DescribedTensor(storage, dtype, offset, shape, strides)


TENSOR_NAMES: Allowed = {
    ("torch._utils", "_rebuild_tensor_v2"): SafeCall(_rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): SafeCall(_rebuild_v3),
    ("collections", "OrderedDict"): CheckedDict,
    **{("torch", name): ("storage", name) for name in STORAGE_CLASSES},
    **{("torch.storage", name): ("storage", name) for name in STORAGE_CLASSES},
    **{("torch", name): name for name in DTYPES},
}


def storage_of(pid: Any) -> Storage:
    """Resolve a persistent id of ``torch.save``."""
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], tuple):
        raise pickle.UnpicklingError("a storage that torch.save does not write")
    _, kind, key, _, numel = pid
    name = kind[1] if len(kind) == 2 else None
    if type(name) is not str or name not in STORAGE_CLASSES:
        raise pickle.UnpicklingError(f"a storage of type {brief(name)}")
    if not isinstance(key, str) or type(numel) is not int or not 0 <= numel < MAX_BYTES:
        raise pickle.UnpicklingError(f"a storage with the key {brief(key)} and {brief(numel)} elements")
    dtype = STORAGE_CLASSES[name]
    return Storage(None if dtype is None else DTYPES[dtype], key, numel)


def place(archive: TorchArchive, described: DescribedTensor, what: str) -> PlacedTensor:
    """Return the described tensor with the offset of its first element.

    Raises:
        CheckpointError: If its storage is missing, has another size, or is too small for it.
    """
    storage = described.storage
    start, size = archive.storage(storage.key)
    itemsize = described.dtype.itemsize
    if size != storage.numel * (1 if storage.dtype is None else storage.dtype.itemsize):
        raise CheckpointError(
            f"{what}: data/{storage.key} has {size} bytes, but data.pkl says {storage.numel} elements."
        )
    reach = ((n - 1) * stride for n, stride in zip(described.shape, described.strides, strict=True))
    last = described.offset + sum(reach)
    if prod(described.shape) and (last + 1) * itemsize > size:
        raise CheckpointError(
            f"{what}: shape and strides reach element {last}, data/{storage.key} has {size // itemsize}."
        )
    return PlacedTensor(described.dtype, described.shape, described.strides, start + described.offset * itemsize)


MAX_DESCRIPTION_BYTES = 256 * 2**20
"""Of one file's pickle: a hundred thousand tensors need 20 MB; the rest is for what users keep in checkpoints."""


class OddTensor(NamedTuple):
    """A tensor that cannot be copied; an error only where it is needed."""

    reason: str


def _lenient(name: str) -> SafeCall:
    rebuild = TENSOR_NAMES["torch._utils", name]
    if not callable(rebuild):
        raise TypeError(f"torch._utils.{name} is not one of the functions that rebuild a tensor")

    def call(*args: object) -> object:
        try:
            return rebuild(*args)
        except (pickle.UnpicklingError, TypeError) as error:
            return OddTensor(str(error))

    return SafeCall(call)


def _rebuild_parameter(data: Any = None, *_: object) -> object:
    return data


def _rebuild_from_type(rebuild: Any = None, _: object = None, args: Any = (), *__: object) -> object:
    """``torch.Tensor`` with attributes, as DeepSpeed sets them: the tensor alone."""
    known = isinstance(rebuild, SafeCall) and isinstance(args, tuple)
    return rebuild(*args) if known else Inert()


_ALLOWED: Allowed = InertUnlessAttack(
    {
        **{key: value for key, value in TENSOR_NAMES.items() if key[0] != "torch._utils"},
        ("torch._utils", "_rebuild_tensor_v2"): _lenient("_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"): _lenient("_rebuild_tensor_v3"),
        ("torch._utils", "_rebuild_parameter"): SafeCall(_rebuild_parameter),
        ("torch._utils", "_rebuild_parameter_with_state"): SafeCall(_rebuild_parameter),
        ("torch._tensor", "_rebuild_from_type_v2"): SafeCall(_rebuild_from_type),
        ("torch", "Size"): Size,
        # An enumeration of ints; only the int is kept.
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): SafeCall(lambda value=None, *_: value),
    }
)


def _storage(pid: Any) -> object:
    try:
        return storage_of(pid)
    except pickle.UnpicklingError:  # of a dtype that cannot be copied; its tensor becomes an OddTensor
        return Inert()


@contextmanager
def open_archive(path: Path, max_pickle_bytes: int = MAX_DESCRIPTION_BYTES) -> Iterator[TorchArchive]:
    """Open a file of ``torch.save``.

    Args:
        path: The file.
        max_pickle_bytes: The largest pickle that is read into memory.

    Raises:
        CheckpointError: If it is not one, or is cut off.
    """
    fd = open_regular(path)
    try:
        size = size_of(fd)
        if read_at(fd, 2, 0) == b"\x80\x02":
            raise CheckpointError(
                f"{path}: saved in torch's old format, not as a zip archive. Load it with torch and save it again, in "
                f"DeepSpeed with checkpoint serialization on."
            )
        try:
            yield TorchArchive(FileWindow(partial(read_at, fd), 0, size), max_pickle_bytes, str(path))
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not a zip archive of torch.save, or cut off: {error}.") from error
        except MemoryError:
            raise CheckpointError(f"{path}: too large for the memory of this process.") from None
    finally:
        close(fd)


def digest_of_file(path: Path) -> FileDigest:
    """Return the digest of a file of ``torch.save``, from its end alone.

    Raises:
        CheckpointError: If it is not one.
    """
    fd = open_regular(path)
    try:
        size = size_of(fd)
        return FileDigest.of_records(size, [directory_digest(partial(read_at, fd), 0, size, str(path))])
    finally:
        close(fd)


def check_written(path: Path, digest: FileDigest) -> None:
    """Check that a file of ``torch.save`` is the one that was written; its tensors are not looked at.

    Raises:
        CheckpointError: If it is another one.
    """
    digest.check_size(path, path.stat().st_size)
    found = digest_of_file(path)
    if found != digest:
        raise CheckpointError(
            f"{path} changed after the save: its digest is {found.records.hex()}, but accelight.json says "
            f"{digest.records.hex()}. It is damaged, or belongs to another save. {HINT}"
        )


def check_bytes(path: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Compare all bytes in a file of ``torch.save`` with the checksums next to them; its old format has none.

    Args:
        path: The file.
        share: Which of how many shares to look at, where several processes look.

    Raises:
        CheckpointError: If they are not as they were written.
    """
    with os.fdopen(open_file(path), "rb") as stream:
        is_zip = stream.read(2) == b"PK"
    if is_zip:
        with open_archive(path) as archive:
            archive.check(share=share)


def read_torch_file(path: Path) -> object:
    """Return the object in a file of ``torch.save``; tensors as `DescribedTensor`.

    Raises:
        CheckpointError: If it is not such a file, is cut off, or its pickle is not as torch writes it.
    """
    try:
        with open_archive(path) as archive:
            return archive.content(_ALLOWED, _storage)
    except CheckpointError as error:
        if str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path}: {error}") from None


# ------------------------------------------------------------------------------------------------
# The zip that ``torch.save`` writes: members stored uncompressed, found without copying.
#
# Not read with ``zipfile``: it takes 1.7 times as long for the zip of one tensor, of which a folder may have very many,
# reads a directory of any size, and does not report where a member's bytes and its directory entry lie.
#
# Source: the zip format's APPNOTE 6.3; torch 2.13 ``serialization.py``.


SMALL = 16 * 1024  # a record up to this size is read in one call
BEGINNING = 256
_END = 4 * 1024  # of a larger one, first this much at each end
_BLOCK = 512 * 1024
_DIRECTORY = 1024  # that of one tensor fits
_EOCD = struct.Struct("<4s6xHLLH")  # magic, members, directory's size and start, comment's size
_EOCD64_LOCATOR = struct.Struct("<4s4xQ4x")
_EOCD64 = struct.Struct("<4s28xQQQ")  # as _EOCD
_CENTRAL = struct.Struct("<4s4xHH4xLLLHHH8xL")  # magic, flags, method, CRC, 2 sizes, name, extra, comment, header
_LOCAL = struct.Struct("<4s2xH10xLLHH")  # magic, flags, 2 sizes, name, extra
_LOCAL_CRC, _CENTRAL_CRC = 14, 16  # where a member's two headers have its checksum
_ENCRYPTED, _HAS_DESCRIPTOR = 1, 8
_LARGE = 0xFFFFFFFF  # the number is in the zip64 fields
_SIZES, _SIZE64 = struct.Struct("<2L"), struct.Struct("<Q")
_NEXT = (b"PK\3\4", b"PK\1\2")
Fixed = tuple[tuple[slice, bytes], ...]
"""Places in a zip, and the bytes there."""


ReadAt = Callable[[int, int], bytes]
"""Returns so many bytes from such an offset, or fewer where the file ends: ``partial(read_at, fd)``."""


class FileWindow:
    """The bytes of one record in a file, read where asked for; small ones at once."""

    def __init__(self, read: ReadAt, offset: int, length: int):
        self._read = read
        self.offset = offset
        self.length = length
        self.reads: list[tuple[int, int]] = []
        self._head = read(length if length <= SMALL else _END, offset)
        self._tail_start = 0 if length <= SMALL else length - _END
        self._tail = read(_END, offset + self._tail_start) if self._tail_start else self._head

    @property
    def all_bytes(self) -> bytes:
        """All bytes of a small record; none of a large one."""
        return b"" if self._tail_start else self._head

    @property
    def beginning(self) -> bytes:
        """Enough bytes to distinguish records of different shapes and dtypes: it holds most of ``data.pkl``."""
        return self._head[:BEGINNING]

    def read(self, start: int, stop: int, what: str) -> bytes:
        """Return bytes ``start`` to ``stop`` of the record."""
        self.reads.append((start, stop))
        if not 0 <= start <= stop <= self.length:
            raise CheckpointError(f"{what}: the record of {self.length} bytes points at bytes {start} to {stop}.")
        if stop <= len(self._head):
            data = self._head[start:stop]
        elif start >= self._tail_start:
            data = self._tail[start - self._tail_start : stop - self._tail_start]
        else:
            data = self._read(stop - start, self.offset + start)
        if len(data) != stop - start:
            raise CheckpointError(f"{what}: the file ends inside the record, at {len(data)} of {stop - start} bytes.")
        return data

    def crc32(self, start: int, size: int) -> int:
        """Return the CRC-32 of bytes that may be many; those that are not there do not count."""
        found = 0
        for position in range(start, start + size, _BLOCK):
            block = self._read(min(_BLOCK, start + size - position), self.offset + position)
            found = zlib.crc32(block, found)
        return found


class _Member(NamedTuple):
    """One file in the zip."""

    local: int
    """Position of its local header."""
    size: int
    entry: int
    """Position of its entry in the central directory."""
    crc32: int
    """0 where torch was set to make none (``torch.serialization.set_crc32_options``)."""


class TorchArchive:
    """A zip of ``torch.save`` in an open file: its pickle, and where its storages lie."""

    def __init__(self, window: FileWindow, max_bytes: int, what: str):
        """Read the directory.

        Args:
            window: The zip's bytes.
            max_bytes: The largest pickle, and the largest directory, that are read into memory.
            what: Names the zip in errors.

        Raises:
            CheckpointError: If it is not a zip as ``torch.save`` writes it.
            struct.error: If it is cut off inside an entry; so is a UnicodeDecodeError raised for a name.
        """
        self._what = what
        self._max_bytes = max_bytes
        self._window = window
        count, size, self.directory_start = _find_directory(window, what)
        if size > max_bytes:
            raise CheckpointError(
                f"{what}: a zip directory of {size} bytes, but torch.save writes fewer than {max_bytes}."
            )
        self._members = self._read_directory(count, size)
        prefix = next((name[: -len("data.pkl")] for name in self._members if name.endswith("/data.pkl")), None)
        if prefix is None:
            raise CheckpointError(f"{what}: the record has no data.pkl; it holds {sorted(self._members)[:8]}.")
        self._prefix = prefix

    def _read_directory(self, count: int, size: int) -> dict[str, _Member]:
        what, start, position = self._what, self.directory_start, 0
        data = self._window.read(start, start + size, what)
        members: dict[str, _Member] = {}
        for _ in range(count):
            magic, flags, method, crc, stored, plain, name_size, extra_size, comment_size, local = _CENTRAL.unpack_from(
                data, position
            )
            names = position + _CENTRAL.size
            extras = names + name_size
            name = data[names:extras].decode()
            if _LARGE in (stored, plain, local):
                extra = data[extras : extras + extra_size]
                plain, stored, local = _zip64_sizes(extra, (plain, stored, local), what)
            if magic != b"PK\1\2" or method or flags & _ENCRYPTED or stored != plain or name in members:
                raise CheckpointError(
                    f"{what}: zip member {name!r} is compressed, encrypted or duplicated; torch.save stores members "
                    "once and uncompressed."
                )
            members[name] = _Member(local, plain, start + position, crc)
            position = extras + extra_size + comment_size
        return members

    def storage(self, key: str) -> tuple[int, int]:
        """Return the offset of a storage's bytes in the file, and their number."""
        start, size = self._range(f"data/{key}")
        return self._window.offset + start, size

    def pickle(self) -> bytes:
        """Return the bytes of ``data.pkl``, after a check of its checksum and of the byte order."""
        if f"{self._prefix}byteorder" in self._members:
            start, size = self._range("byteorder")
            if (found := self._window.read(start, start + min(size, 16), self._what)) != b"little":
                raise CheckpointError(
                    f"{self._what}: saved with byte order {found!r}, only little-endian data can be copied."
                )
        start, size = self._range("data.pkl")
        if size > self._max_bytes:
            raise CheckpointError(f"{self._what}: a data.pkl of {size} bytes; the limit is {self._max_bytes}.")
        data = self._window.read(start, start + size, self._what)
        self._check_crc("data.pkl", self._members[self._prefix + "data.pkl"], zlib.crc32(data))
        return data

    def content(self, allowed: Allowed, storage: Callable[[object], object]) -> object:
        """Return the object that the pickle describes, made of allowed classes.

        Args:
            allowed: See `load_restricted`.
            storage: Returns what stands for a storage that the pickle names.
        """
        return load_restricted(self.pickle(), allowed, self._what, storage)

    @property
    def digest(self) -> int:
        """The CRC-32 of the zip's end, from its directory on: it has the checksums of all members."""
        return zlib.crc32(self._window.read(self.directory_start, self._window.length, self._what))

    def check(self, keys: Iterable[str] | None = None, share: tuple[int, int] = (0, 1)) -> int:
        """Compare the bytes of members with their checksums; where torch was set to make none, nothing is compared.

        Args:
            keys: Of the storages to look at; None for everything in the zip.
            share: Which of how many shares to look at, where several processes look.

        Returns:
            The number of bytes that were compared.

        Raises:
            CheckpointError: If a member is not as it was written.
        """
        own = [name for name in self._members if name.startswith(self._prefix)]
        names = own if keys is None else [f"{self._prefix}data/{key}" for key in keys]
        num_bytes = 0
        for name in names[share[0] :: share[1]]:
            short = name.removeprefix(self._prefix)
            start, size = self._range(short)
            if self._members[name].crc32:
                self._check_crc(short, self._members[name], self._window.crc32(start, size))
                num_bytes += size
        return num_bytes

    def _check_crc(self, name: str, member: _Member, found: int) -> None:
        if member.crc32 not in (0, found):
            raise CheckpointError(
                f"{self._what}: the bytes of {name} are damaged: their CRC-32 is {found:08x}, but torch recorded "
                f"{member.crc32:08x}. {HINT}"
            )

    def fixed(self, key: str) -> Fixed:
        """Return the bytes that another zip must share with this one for all that was read here to hold for it, too.

        That is every byte that was read, except the checksums of the storage ``key`` and of the zip's id.
        """
        holes = []
        for name in (f"{self._prefix}data/{key}", f"{self._prefix}.data/serialization_id"):
            if name in self._members:
                member = self._members[name]
                holes += [member.local + _LOCAL_CRC, member.entry + _CENTRAL_CRC]
        fixed: list[slice] = []
        end = 0
        for start, stop in sorted(self._window.reads):
            start = max(start, end)
            end = max(end, stop)
            for hole in sorted(holes):
                if start <= hole < stop:
                    fixed.append(slice(start, hole))
                    start = hole + 4
            if start < stop:
                begin = fixed.pop().start if fixed and fixed[-1].stop == start else start
                fixed.append(slice(begin, stop))
        return tuple((where, self._window.all_bytes[where]) for where in fixed)

    def _range(self, short: str) -> tuple[int, int]:
        """Return the offset of a member's bytes in the record, and their number."""
        window, what, name = self._window, self._what, self._prefix + short
        member = self._members.get(name)
        if member is None:
            raise CheckpointError(f"{what}: the record has no {name}; it holds {sorted(self._members)[:8]}.")
        local, size, limit, _ = member  # the directory comes last: no data may reach to the member's entry in it
        names = local + _LOCAL.size
        magic, flags, stored, plain, name_size, extra_size = _LOCAL.unpack(window.read(local, names, what))
        if magic != b"PK\3\4" or window.read(names, names + name_size, what) != name.encode():
            raise CheckpointError(f"{what}: the zip directory points {name} at byte {local}, which is not its header.")
        start = names + name_size + extra_size
        end = start + size
        if end > limit:
            raise CheckpointError(
                f"{what}: {name} has {size} bytes from byte {start}, but only {max(limit - start, 0)} exist."
            )
        # A wrong length of the names before the bytes would shift them all: the member must end where they do.
        after = window.read(end, end + 4, what)
        if flags & _HAS_DESCRIPTOR:  # torch.save writes the sizes behind the bytes
            sizes = _SIZES.pack(size & _LARGE, size & _LARGE), _SIZE64.pack(size)
            is_end = after == b"PK\7\x08" and window.read(end + 8, end + 16, what) in sizes
        else:
            is_end = after in _NEXT and all(one in (size, _LARGE) for one in (stored, plain))
        if not is_end:
            raise CheckpointError(
                f"{what}: {name} should end at byte {end} of the record, which is not the end of a zip member."
            )
        return start, size


def directory_digest(read: ReadAt, offset: int, length: int, what: str) -> int:
    """Return the digest of a zip, see `TorchArchive.digest`, without looking further into it.

    Raises:
        CheckpointError: If it does not end as a zip.
    """
    size = min(length, _DIRECTORY)
    end = read(size, offset + length - size)
    start = _EOCD.unpack_from(end, size - _EOCD.size)[3] if end[-_EOCD.size :].startswith(b"PK\5\6") else _LARGE
    if start == _LARGE:  # a large one, or none
        _, _, start = _find_directory(FileWindow(read, offset, length), what)
    if start >= length - size:
        return zlib.crc32(end[start - length + size :])
    return zlib.crc32(read(length - start, offset + start))


def _find_directory(window: FileWindow, what: str) -> tuple[int, int, int]:
    """Return the number of entries of the central directory, its size and its position."""
    end = window.length - _EOCD.size  # torch.save writes no comment: the last record stands at the very end
    if end < 0:
        raise CheckpointError(
            f"{what}: a record of {window.length} bytes is too short for a zip archive: not a file of torch.save."
        )
    magic, count, size, start, comment = _EOCD.unpack(window.read(end, window.length, what))
    if magic != b"PK\5\6" or comment:
        raise CheckpointError(f"{what}: the record does not end like a zip archive of torch.save: cut off or damaged.")
    if count != 0xFFFF and _LARGE not in (size, start):
        return count, size, start
    magic, position = _EOCD64_LOCATOR.unpack(window.read(end - _EOCD64_LOCATOR.size, end, what))
    if magic != b"PK\6\7":
        raise CheckpointError(f"{what}: the zip64 directory of the record is missing.")
    magic, count, size, start = _EOCD64.unpack(window.read(position, position + _EOCD64.size, what))
    if magic != b"PK\6\6":
        raise CheckpointError(f"{what}: the zip64 directory of the record is damaged.")
    return count, size, start


def _zip64_sizes(extra: bytes, values: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Return values with the large ones among them taken from a member's zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1 and size // 8 >= values.count(_LARGE):
            large = iter(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
            return tuple([next(large) if one == _LARGE else one for one in values])
        position += 4 + size
    raise CheckpointError(f"{what}: a zip64 member of the record has no sizes.")


# ------------------------------------------------------------------------------------------------
# A state dict: ``pytorch_model.bin``.


_MAX_PICKLE = 2**30  # about 150 bytes a tensor

_NAMES: Allowed = {
    **TENSOR_NAMES,
    ("torch._utils", "_rebuild_parameter"): SafeCall(_rebuild_parameter),
}


def read_state_dict_file(path: Path) -> TensorFile:
    """Find the tensors of a state dict that ``torch.save`` wrote.

    Raises:
        CheckpointError: If it is not one, holds anything but tensors under names, or points outside itself.
    """
    with open_archive(path, _MAX_PICKLE) as archive:
        content = archive.content(_NAMES, storage_of)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: expected a state dict, found {type_name(content)}.")
        return TensorFile(path, {_name(path, key): _tensor(archive, path, key, content[key]) for key in content})


def _name(path: Path, key: object) -> str:
    if not isinstance(key, str):
        raise CheckpointError(f"{path}: expected a state dict with strings as keys, found {type_name(key)}.")
    return key


def _tensor(archive: TorchArchive, path: Path, name: object, value: object) -> FileTensor:
    what = f"{path}: {name!r}"
    if not isinstance(value, DescribedTensor):
        raise CheckpointError(f"{what} is {type_name(value)}, not a tensor; a merged state dict holds tensors.")
    found = place(archive, value, what)
    strides = None if is_contiguous(found.shape, found.strides) else found.strides
    return FileTensor(found.dtype, found.shape, found.start, prod(found.shape) * found.dtype.itemsize, strides)


# ------------------------------------------------------------------------------------------------
# Epoch and step in Lightning's ``meta.pt``.


META_NAME = "meta.pt"
"""Saved by Lightning's strategies and ours next to the shards: everything but weights and optimizer state."""

_MAX_LIGHTNING_PICKLE = 64 * 2**20
_ALLOWED_OF_LIGHTNING: Allowed = InertByDefault({("collections", "OrderedDict"): CheckedDict})


def read_progress(folder: Path) -> tuple[int | None, int | None]:
    """Return epoch and global step from a folder's ``meta.pt``; None where it lacks them, or is missing.

    Raises:
        CheckpointError: If the file is not one that ``torch.save`` writes.
    """
    path = folder / META_NAME
    if not is_regular(path):
        return None, None
    path = file_inside(folder, META_NAME, str(folder))
    with open_archive(path, _MAX_LIGHTNING_PICKLE) as archive:
        content = archive.content(_ALLOWED_OF_LIGHTNING, lambda _: None)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dict, found {type_name(content)}.")
    epoch, step = (content.get(key) for key in ("epoch", "global_step"))
    return epoch if type(epoch) is int else None, step if type(step) is int else None
