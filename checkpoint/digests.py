"""What ``accelight.json`` says of the other files, so that damage since they were written is seen.

torch writes a CRC-32 of each tensor's bytes into the zip that it keeps them in, at the zip's end, and never looks at
it again. So nothing need be computed while a checkpoint is saved: a digest of each zip's end is enough. It says that
this is the zip that was written, and not one of another save; and the zip says what its bytes are.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import CheckpointError

_WIDTH = 4
_BLOCK = 2**20


@dataclass(frozen=True)
class FileDigest:
    """One file, as it was written."""

    num_bytes: int
    crc32: int | None = None
    """Of all of its bytes; None for a file of zips."""
    records: bytes = b""
    """CRC-32 of each zip's directory, four bytes each, in the order in which they lie in the file."""

    def __post_init__(self) -> None:
        if type(self.num_bytes) is not int or self.num_bytes < 0 or len(self.records) % _WIDTH:
            raise ValueError(f"a file's digest cannot be {self}.")

    @classmethod
    def of(cls, content: bytes) -> FileDigest:
        """Return the digest of a file with this content."""
        return cls(len(content), zlib.crc32(content))

    @classmethod
    def of_stream(cls, stream: BinaryIO) -> FileDigest:
        """Return the digest of an open file, and go back to its beginning."""
        num_bytes = found = 0
        while block := stream.read(_BLOCK):
            num_bytes += len(block)
            found = zlib.crc32(block, found)
        stream.seek(0)
        return cls(num_bytes, found)

    @classmethod
    def of_records(cls, num_bytes: int, records: list[int]) -> FileDigest:
        """Return the digest of a file with zips that have these digests, in their order."""
        return cls(num_bytes, None, b"".join(one.to_bytes(_WIDTH, "big") for one in records))

    def record(self, number: int) -> int:
        """Return the digest of one zip."""
        return int.from_bytes(self.records[number * _WIDTH : (number + 1) * _WIDTH], "big")

    @property
    def num_records(self) -> int:
        """How many zips there are."""
        return len(self.records) // _WIDTH

    def check(self, path: Path, content: bytes) -> None:
        """Check the content of a file.

        Raises:
            CheckpointError: If it is another one.
        """
        self._check(path, len(content), zlib.crc32(content))

    def _check(self, path: Path, num_bytes: int, crc32: int) -> None:
        self.check_size(path, num_bytes)
        if self.crc32 is not None and crc32 != self.crc32:
            raise CheckpointError(
                f"{path} is damaged: its CRC-32 is {crc32:08x}, accelight.json says {self.crc32:08x}. {HINT}"
            )

    def check_stream(self, path: Path, stream: BinaryIO) -> None:
        """Check the content of an open file, and go back to its beginning.

        Raises:
            CheckpointError: If it is another one.
        """
        found = FileDigest.of_stream(stream)
        self._check(path, found.num_bytes, found.crc32 or 0)

    def check_size(self, path: Path, num_bytes: int) -> None:
        """Check a file's size.

        Raises:
            CheckpointError: If it is another one.
        """
        if num_bytes != self.num_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes, accelight.json says {self.num_bytes}: it was cut off, or belongs to "
                f"another save. {HINT}"
            )

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        if self.crc32 is not None:
            return {"bytes": self.num_bytes, "crc32": f"{self.crc32:08x}"}
        return {"bytes": self.num_bytes, "records": self.records.hex()}

    @classmethod
    def from_json(cls, content: Any) -> FileDigest:
        """Return what `to_json` made plain.

        Raises:
            ValueError: If it is something else.
        """
        if not isinstance(content, dict) or set(content) not in ({"bytes", "crc32"}, {"bytes", "records"}):
            raise ValueError("a digest has 'bytes', and 'crc32' or 'records'.")
        crc32, records = content.get("crc32"), content.get("records", "")
        if not isinstance(records, str) or not isinstance(crc32, str | None):
            raise ValueError("a digest's 'crc32' and 'records' are text.")
        return cls(content["bytes"], None if crc32 is None else int(crc32, 16), bytes.fromhex(records))


Digests = Mapping[str, FileDigest]
"""By the file's name in the checkpoint's folder, with slashes."""

HINT = "Take the checkpoint before it, or copy the file again."


class RecordDigests:
    """The digests of records by their places.

    Args:
        digests: Of the checkpoint's files.
        offsets: Where in each file its records begin, in order.
        what: Names the file that says so, for errors.

    Raises:
        CheckpointError: If a file should have another number of records.
    """

    def __init__(self, digests: Digests, offsets: Mapping[str, Sequence[int]], what: str):
        self._digests = digests
        self._places: dict[str, Sequence[int]] = {}
        for name in offsets:
            digest = digests.get(name)
            if digest is None or digest.crc32 is not None:
                continue
            places = offsets[name]
            if digest.num_records != len(places):
                raise CheckpointError(
                    f"{what} has {len(places)} records in {name!r}, accelight.json {digest.num_records}. {HINT}"
                )
            self._places[name] = places

    def of(self, name: str, offset: int) -> int | None:
        """Return the digest of the record at a place; None where it is not known."""
        places = self._places.get(name, ())
        number = bisect_left(places, offset)
        found = number < len(places) and places[number] == offset
        return self._digests[name].record(number) if found else None
