"""The zip that ``torch.save`` writes: members stored uncompressed, found without copying. No torch.

Source: the zip format's APPNOTE 6.3; torch 2.13 ``serialization.py``.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ...digests import HINT
from ...errors import CheckpointError
from .allowed_names import Allowed
from .unpickler import load_restricted

SMALL = 16 * 1024  # a record up to this size is read in one call
BEGINNING = 256
_END = 4 * 1024  # of a larger one, first this much at each end
_EOCD = struct.Struct("<4s4H2LH")
_EOCD64_LOCATOR = struct.Struct("<4sLQL")
_EOCD64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_HAS_DESCRIPTOR = 8
_SIZES, _SIZE64 = struct.Struct("<2L"), struct.Struct("<Q")
_NEXT = (b"PK\3\4", b"PK\1\2")
_LOCAL_CRC, _CENTRAL_CRC = 14, 16  # where a member's two headers have its checksum
_BLOCK = 512 * 1024
_DIRECTORY = 1024  # that of one tensor fits
Fixed = tuple[tuple[slice, bytes], ...]
"""Places in a zip, and the bytes there."""


class TorchArchive:
    """A zip of ``torch.save`` in an open file: its pickle, and where its storages lie."""

    def __init__(self, window: Window, max_bytes: int, what: str):
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
        self._members, self.directory_start = _central_directory(self._window, max_bytes, what)
        prefix = next((name[: -len("data.pkl")] for name in self._members if name.endswith("/data.pkl")), None)
        if prefix is None:
            raise CheckpointError(f"{what}: the record has no data.pkl; it holds {sorted(self._members)[:8]}.")
        self._prefix = prefix

    def storage(self, key: str) -> tuple[int, int]:
        """Return where in the file a storage's bytes start, and how many there are."""
        start, size = self._range(f"data/{key}")
        return self._window.offset + start, size

    def pickle(self) -> bytes:
        """Return the bytes of ``data.pkl``, after a check of its checksum and of the byte order."""
        if f"{self._prefix}byteorder" in self._members:
            start, size = self._range("byteorder")
            if (found := self._window.read(start, start + min(size, 16), self._what)) != b"little":
                raise CheckpointError(
                    f"{self._what}: saved with byte order {found!r}, only little endian can be copied."
                )
        start, size = self._range("data.pkl")
        if size > self._max_bytes:
            raise CheckpointError(
                f"{self._what}: a data.pkl of {size} bytes; what is read here has less than {self._max_bytes}."
            )
        data = self._window.read(start, start + size, self._what)
        self._check_crc("data.pkl", self._members[self._prefix + "data.pkl"], zlib.crc32(data))
        return data

    @property
    def digest(self) -> int:
        """The CRC-32 of the zip's end, from its directory on: it has the checksums of all members."""
        return zlib.crc32(self._window.read(self.directory_start, self._window.length, self._what))

    def check(self, keys: Iterable[str] | None = None, share: tuple[int, int] = (0, 1)) -> int:
        """Compare the bytes of members with their checksums; where torch was told not to make any, nothing is compared.

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
                f"{self._what}: the bytes of {name} are damaged: their CRC-32 is {found:08x}, torch wrote "
                f"{member.crc32:08x} beside them. {HINT}"
            )

    def content(self, allowed: Allowed, storage: Callable[[object], object]) -> object:
        """Return what the pickle describes, made of what a table allows.

        Args:
            allowed: See `load_restricted`.
            storage: Returns what stands for a storage that the pickle names.
        """
        return load_restricted(self.pickle(), allowed, self._what, storage)

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
        name = self._prefix + short
        member = self._members.get(name)
        if member is None:
            raise CheckpointError(f"{self._what}: the record has no {name}; it holds {sorted(self._members)[:8]}.")
        return _member_range(self._window, member, name, self._what)


class Window:
    """The bytes of one record, read where asked for; small ones at once."""

    def __init__(self, fd: int, offset: int, length: int):
        self._fd = fd
        self.offset = offset
        self.length = length
        self.reads: list[tuple[int, int]] = []
        if length <= SMALL:
            self._head, self._tail_start = os.pread(fd, length, offset), 0
            self._tail = self._head
        else:
            self._head = os.pread(fd, _END, offset)
            self._tail_start = length - _END
            self._tail = os.pread(fd, _END, offset + self._tail_start)

    @property
    def all_bytes(self) -> bytes:
        """All bytes of a small record; none of a large one."""
        return self._head if self._head is self._tail else b""

    @property
    def beginning(self) -> bytes:
        """Enough bytes to tell records of different shapes and dtypes apart: it holds most of ``data.pkl``."""
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
            data = os.pread(self._fd, stop - start, self.offset + start)
        if len(data) != stop - start:
            raise CheckpointError(f"{what}: the file ends inside the record, at {len(data)} of {stop - start} bytes.")
        return data

    def crc32(self, start: int, size: int) -> int:
        """Return the CRC-32 of bytes that may be many; those that are not there do not count."""
        found = 0
        for position in range(start, start + size, _BLOCK):
            block = os.pread(self._fd, min(_BLOCK, start + size - position), self.offset + position)
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
    """0 where torch was told to make none (``torch.serialization.set_crc32_options``)."""


def directory_digest(fd: int, offset: int, length: int, what: str) -> int:
    """Return the digest of a zip, see `TorchArchive.digest`, without looking further into it.

    Raises:
        CheckpointError: If it does not end as a zip.
    """
    size = min(length, _DIRECTORY)
    end = os.pread(fd, size, offset + length - size)
    start = _EOCD.unpack_from(end, size - _EOCD.size)[6] if end[-_EOCD.size :].startswith(b"PK\5\6") else 0xFFFFFFFF
    if start == 0xFFFFFFFF:  # a large one, or none
        _, start = _central_directory(Window(fd, offset, length), length, what)
    if start >= length - size:
        return zlib.crc32(end[start - length + size :])
    return zlib.crc32(os.pread(fd, length - start, offset + start))


def _central_directory(window: Window, max_bytes: int, what: str) -> tuple[dict[str, _Member], int]:
    """Return the members, and where the directory begins."""
    end = window.length - _EOCD.size  # torch.save writes no comment: the last record stands at the very end
    if end < 0:
        raise CheckpointError(
            f"{what}: a record of {window.length} bytes is too short for a zip: not a file of torch.save."
        )
    magic, *_, count, size, start, comment = _EOCD.unpack(window.read(end, window.length, what))
    if magic != b"PK\5\6" or comment:
        raise CheckpointError(f"{what}: the record does not end as a zip of torch.save: cut off or damaged.")
    if count == 0xFFFF or size == 0xFFFFFFFF or start == 0xFFFFFFFF:
        count, size, start = _zip64_end(window, end, what)
    if size > max_bytes:
        raise CheckpointError(f"{what}: a zip directory of {size} bytes, torch.save writes less than {max_bytes}.")
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
        members[name] = _Member(local, plain, start + position, entry[7])
        position = extras + entry[11] + entry[12]
    return members, start


def _zip64_end(window: Window, end: int, what: str) -> tuple[int, int, int]:
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


def _member_range(window: Window, member: _Member, name: str, what: str) -> tuple[int, int]:
    """Return where a member's bytes start in the record, and how many there are."""
    local, size, limit, _ = member  # the directory comes last: no data may reach to the member's entry in it
    header = _LOCAL.unpack(window.read(local, local + _LOCAL.size, what))
    names = local + _LOCAL.size
    if header[0] != b"PK\3\4" or window.read(names, names + header[9], what) != name.encode():
        raise CheckpointError(f"{what}: the zip directory points {name} at byte {local}, which is not its header.")
    start = names + header[9] + header[10]
    if start + size > limit:
        raise CheckpointError(
            f"{what}: {name} has {size} bytes from byte {start}, only {max(limit - start, 0)} are there."
        )
    _check_end(window, header, start + size, size, f"{what}: {name}")
    return start, size


def _check_end(window: Window, header: tuple[Any, ...], end: int, size: int, what: str) -> None:
    """Check that a member ends where its bytes do: a wrong length of the names before them would shift them all."""
    magic = window.read(end, end + 4, what)
    if header[2] & _HAS_DESCRIPTOR:  # torch.save writes the sizes behind the bytes
        sizes = window.read(end + 8, end + 16, what)
        right = magic == b"PK\7\x08" and sizes in (
            _SIZES.pack(size & 0xFFFFFFFF, size & 0xFFFFFFFF),
            _SIZE64.pack(size),
        )
    else:
        right = header[7] in (size, 0xFFFFFFFF) and header[8] in (size, 0xFFFFFFFF) and magic in _NEXT
    if not right:
        raise CheckpointError(f"{what} should end at byte {end} of the record, which is not the end of a zip's member.")
