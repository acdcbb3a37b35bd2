"""One record of a ``.distcp`` file: a tensor written by ``torch.save``, located without torch and without copying.

A record is a small zip whose members are stored uncompressed: ``data.pkl`` says what the tensor is, ``data/0`` holds
its bytes. Only the record's two ends are read.
"""

from __future__ import annotations

import os
import struct
import zlib

from ...digests import HINT
from ...errors import CheckpointError
from ..torch_save.described_tensors import TENSOR_NAMES, DescribedTensor, PlacedTensor, place, storage_of
from ..torch_save.unpickler import load_restricted
from ..torch_save.zip_file import BEGINNING, SMALL, Fixed, TorchArchive, Window

_MAX_PICKLE = 64 * 1024
_MAX_DIRECTORY = 64 * 2**20  # of a record that is no tensor, too
_MAX_KNOWN = 1000
_AHEAD = 64 * 1024


class RecordReader:
    """Locates records in one open file."""

    def __init__(self, fd: int, name: str, file_bytes: int):
        self._fd = fd
        self._name = name
        self._file_bytes = file_bytes
        self._known: dict[tuple[int, bytes], tuple[Fixed, PlacedTensor, int]] = {}
        self._ahead, self._ahead_from = b"", 0

    def locate(self, fqn: str, offset: int, length: int, digest: int | None = None) -> PlacedTensor:
        """Return the tensor in the record at ``offset``.

        Args:
            fqn: For errors.
            offset: Of the record.
            length: Of the record.
            digest: Of the record when it was written, where that is known.

        Raises:
            CheckpointError: If the file is shorter, or the record is not one tensor stored as torch does, or another.
        """
        what = f"{self._name}: tensor {fqn!r}"
        self.check_range(fqn, offset, length)
        window = Window(self._fd, offset, length)
        key, data = (length, window.beginning), window.all_bytes
        try:
            archive = TorchArchive(window, _MAX_PICKLE, what)
            if digest is not None:
                check_digest(what, archive.digest, digest)
            described = _describe(archive.pickle(), what)
            found = place(archive, described, what)
            if data and len(self._known) < _MAX_KNOWN:
                relative = PlacedTensor(found.dtype, found.shape, found.strides, found.start - offset)
                self._known[key] = archive.fixed(described.storage.key), relative, archive.directory_start
            return found
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{what}: the record at byte {offset} is not a zip of torch.save ({error})."
            ) from error

    def locate_known(self, offset: int, length: int, digest: int | None = None) -> PlacedTensor | None:
        """Return the tensor in a record that is as one before it but for its values; None where that is not so.

        Args:
            offset: Of the record.
            length: Of the record.
            digest: Of the record when it was written, where that is known.
        """
        if length > SMALL or offset + length > self._file_bytes:
            return None
        data = self._bytes(offset, length)
        found = self._known.get((length, data[:BEGINNING]))
        if found is None:
            return None
        fixed, like, directory = found
        for where, expected in fixed:
            if data[where] != expected:
                return None
        if digest is not None and zlib.crc32(data[directory:]) != digest:
            return None
        return PlacedTensor(like.dtype, like.shape, like.strides, offset + like.start)

    def _bytes(self, offset: int, length: int) -> bytes:
        """Return the bytes of a small record; those that follow it are likely to be asked for next."""
        start = offset - self._ahead_from
        if start < 0 or start + length > len(self._ahead):
            self._ahead, self._ahead_from, start = os.pread(self._fd, _AHEAD, offset), offset, 0
        return self._ahead[start : start + length]

    def check_range(self, fqn: str, offset: int, length: int) -> None:
        """Check that the file is long enough for a record."""
        if offset + length > self._file_bytes:
            raise CheckpointError(
                f"{self._name}: tensor {fqn!r}: the record should end at byte {offset + length}, the file has "
                f"{self._file_bytes}. It was cut off, or belongs to another save."
            )

    def check(self, fqn: str, offset: int, length: int, digest: int | None = None, *, bytes_too: bool = True) -> int:
        """Compare the bytes of a record with the checksums in it, and return how many there were.

        Args:
            fqn: For errors.
            offset: Of the record.
            length: Of the record.
            digest: Of the record when it was written, where that is known.
            bytes_too: Whether to look at more than the digest.

        Raises:
            CheckpointError: If they are not as they were written.
        """
        what = f"{self._name}: tensor {fqn!r}"
        self.check_range(fqn, offset, length)
        try:
            archive = TorchArchive(Window(self._fd, offset, length), _MAX_DIRECTORY, what)
            check_digest(what, archive.digest, digest)
            return archive.check() if bytes_too else 0
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{what}: the record at byte {offset} is not a zip of torch.save ({error})."
            ) from error


def check_digest(what: str, found: int, expected: int | None) -> None:
    """Check that a record is the one that was written.

    Raises:
        CheckpointError: If it is another one; nothing where it is not known which was written.
    """
    if expected is not None and found != expected:
        raise CheckpointError(
            f"{what}: the record is not the one that was written: its digest is {found:08x}, accelight.json says "
            f"{expected:08x}. The file was damaged, or belongs to another save. {HINT}"
        )


_known_pickles: dict[bytes, DescribedTensor] = {}  # thousands of layers repeat a few shapes


def _describe(data: bytes, what: str) -> DescribedTensor:
    known = _known_pickles.get(data)
    if known is not None:
        return known
    described = load_restricted(data, TENSOR_NAMES, what, storage_of)
    if not isinstance(described, DescribedTensor):
        raise CheckpointError(f"{what}: the record holds {type(described).__name__}, not one tensor.")
    if len(_known_pickles) > 10_000:
        _known_pickles.clear()
    _known_pickles[data] = described
    return described
