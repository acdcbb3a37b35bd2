"""Reads a tensor's bytes in the order of the full tensor, from wherever its pieces lie.

A tensor is seen as rows. The last dimension that any piece is cut along and those after it make up a row, the
dimensions before it count the rows. In each row it touches, a piece is one run of bytes, and the piece's own rows lie
one after the other in its file. A tensor cut along dimension 0 is a single row, and each piece a single run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Literal

from ..files import FilePool, read_exactly
from ..formats.source import Piece, SourceTensor

_LONG_RUN = 64 * 1024  # from here on, copying run by run beats putting rows together in a buffer
_SHORT_RUN = 64
_MAX_VECTORS = 1024  # IOV_MAX on Linux and macOS
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie together in the file and in the tensor."""

    path: Path
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """A piece as rows."""

    piece: Piece
    segments: _Segments
    run_start: int
    run_bytes: int


class TensorReader:
    """Reads one tensor."""

    def __init__(self, tensor: SourceTensor, files: FilePool):
        self._tensor = tensor
        self._files = files
        self._decoded: dict[Piece, memoryview] = {}
        shape, itemsize = tensor.cut_shape, tensor.dtype.itemsize
        cut = max(
            (dim for piece in tensor.pieces for dim in range(len(shape)) if piece.sizes[dim] != shape[dim]), default=0
        )
        self._row_bytes = prod(shape[cut:]) * itemsize
        self._num_rows = prod(shape[:cut])
        inner = prod(shape[cut + 1 :]) * itemsize
        self._rows = [
            _Rows(
                piece,
                _Segments(shape[:cut], piece.offsets[:cut], piece.sizes[:cut]),
                piece.offsets[cut] * inner if shape else 0,
                piece.sizes[cut] * inner if shape else itemsize,
            )
            for piece in tensor.pieces
            if all(piece.sizes)
        ]

    def runs(self) -> Iterator[Run] | None:
        """Return the tensor as long runs to copy from file to file; None if its bytes must be put together first."""
        if not all(rows.piece.is_plain for rows in self._rows):
            return None
        if self._num_rows > 1 and any(rows.run_bytes < min(_LONG_RUN, self._row_bytes) for rows in self._rows):
            return None
        return self._iter_runs()

    def _iter_runs(self) -> Iterator[Run]:
        for rows in self._rows:
            piece, size = rows.piece, rows.run_bytes
            for first, own in rows.segments:
                count = rows.segments.num_rows
                if size == self._row_bytes:
                    yield Run(piece.path, piece.start + own * size, first * size, count * size)
                    continue
                for row in range(count):
                    target = (first + row) * self._row_bytes + rows.run_start
                    yield Run(piece.path, piece.start + (own + row) * size, target, size)

    def blocks(self, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield (position in the tensor, bytes) from start to end; the bytes are overwritten by the next block."""
        unit = self._row_bytes if self._row_bytes <= len(buffer) else self._tensor.dtype.itemsize
        step = len(buffer) // unit * unit if unit else len(buffer)
        for start in range(0, self._tensor.num_bytes, step):
            view = buffer[: min(step, self._tensor.num_bytes - start)]
            self.read_into(start, view)
            yield start, view

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the tensor's bytes from ``start`` on: rest of a row, complete rows, start of a row."""
        width = self._row_bytes
        while len(view):
            row, inside = divmod(start, width)
            count = len(view) // width if not inside else 0
            size = count * width or min(width - inside, len(view))
            self._fill(row, inside, count, view[:size])
            start, view = start + size, view[size:]

    def _fill(self, first: int, inside: int, count: int, view: memoryview) -> None:
        """Fill ``count`` complete rows from row ``first`` on; for 0, a part of that row from byte ``inside`` on."""
        last = first + max(count, 1)
        for rows in self._rows:
            num_rows = rows.segments.num_rows
            for row, step, num, own in rows.segments.touching(first, last):
                if count and num > 2 and num_rows * rows.run_bytes < _SHORT_RUN:
                    self._fill_apart(rows, row - first, step, num, own, view)
                    continue
                for number in range(num):
                    start = row + number * step
                    begin, end = max(start, first), min(start + num_rows, last)
                    if begin >= end:
                        continue
                    mine = own + number * num_rows + begin - start
                    if count:
                        self._fill_rows(rows, mine, end - begin, view[(begin - first) * self._row_bytes :])
                    else:
                        self._fill_part(rows, mine, inside, view)

    def _fill_part(self, rows: _Rows, own: int, start: int, view: memoryview) -> None:
        begin = max(start, rows.run_start)
        end = min(start + len(view), rows.run_start + rows.run_bytes)
        if begin < end:
            position = own * rows.run_bytes + begin - rows.run_start
            self._read(rows.piece, position, [view[begin - start : end - start]], end - begin)

    def _fill_rows(self, rows: _Rows, own: int, count: int, view: memoryview) -> None:
        """Fill the piece's part of ``count`` rows."""
        size, width, position = rows.run_bytes, self._row_bytes, own * rows.run_bytes
        if size == width:
            self._read(rows.piece, position, [view[: count * size]], count * size)
        elif size < _SHORT_RUN and count > size:
            self._scatter(rows, position, count, view)
        else:
            for row in range(0, count, _MAX_VECTORS):
                begins = range(row * width + rows.run_start, min(count, row + _MAX_VECTORS) * width, width)
                vectors = [view[begin : begin + size] for begin in begins]
                self._read(rows.piece, position + row * size, vectors, size * len(vectors))

    def _fill_apart(self, rows: _Rows, row: int, step: int, num: int, own: int, view: memoryview) -> None:
        """Fill many short segments, one every ``step`` rows: read at once, one strided copy for each element."""
        num_rows, itemsize = rows.segments.num_rows, min(self._tensor.dtype.itemsize, 8)
        together = memoryview(bytearray(num * num_rows * rows.run_bytes))
        self._read(rows.piece, own * rows.run_bytes, [together], len(together))
        source, target = together.cast(_FORMATS[itemsize]), view.cast(_FORMATS[itemsize])
        width, run, start = self._row_bytes // itemsize, rows.run_bytes // itemsize, rows.run_start // itemsize
        begin, end = row * width, (row + (num - 1) * step + num_rows) * width
        for index in range(num_rows * run):
            place = begin + index // run * width + start + index % run
            target[place : end : step * width] = source[index :: num_rows * run]

    def _scatter(self, rows: _Rows, position: int, count: int, view: memoryview) -> None:
        """Fill many short runs, one strided copy for each of their elements."""
        itemsize = min(self._tensor.dtype.itemsize, 8)
        together = memoryview(bytearray(count * rows.run_bytes))
        self._read(rows.piece, position, [together], len(together))
        source = together.cast(_FORMATS[itemsize])
        target = view[: count * self._row_bytes].cast(_FORMATS[itemsize])
        step, width, start = rows.run_bytes // itemsize, self._row_bytes // itemsize, rows.run_start // itemsize
        for element in range(step):
            target[start + element :: width] = source[element::step]

    def _read(self, piece: Piece, position: int, vectors: list[memoryview], num_bytes: int) -> None:
        if not piece.is_plain:
            data = self._decode(piece)
            for vector in vectors:
                vector[:] = data[position : position + len(vector)]
                position += len(vector)
            return
        read_exactly(self._files.fd(piece.path), piece.path, vectors, piece.start + position, num_bytes)

    def _decode(self, piece: Piece) -> memoryview:
        data = self._decoded.get(piece)
        if data is None:
            from ..formats.piece_decoding import decode_piece  # torch

            data = decode_piece(self._tensor, piece)
            self._decoded[piece] = data
        return data


class _Segments:
    """The rows that a box of the leading dimensions touches: as many consecutive ones again and again.

    There can be a million; none is kept.
    """

    def __init__(self, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]):
        if not shape:
            shape, offsets, sizes = (1,), (0,), (1,)
        while len(shape) > 1 and sizes[-1] == shape[-1]:  # an uncut last dimension: merged with the one before it
            last = shape[-1]
            shape = (*shape[:-2], shape[-2] * last)
            offsets = (*offsets[:-2], offsets[-2] * last)
            sizes = (*sizes[:-2], sizes[-2] * last)
        self.num_rows = sizes[-1]
        """In each segment."""
        self._offset = offsets[-1]
        self._outer = tuple(
            zip(offsets[:-1], sizes[:-1], (prod(shape[dim + 1 :]) for dim in range(len(shape) - 1)), strict=True)
        )
        self._count = prod(sizes[:-1])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield each segment's first row, and the first of the piece's own rows, in order."""
        for number, index in enumerate(product(*(range(size) for _, size, _ in self._outer))):
            row = sum((offset + one) * stride for (offset, _, stride), one in zip(self._outer, index, strict=True))
            yield row + self._offset, number * self.num_rows

    def touching(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first row, rows from one to the next, how many, first own row) of segments that may touch some rows.

        Those that are yielded together and are more than two lie within the rows.
        """
        number = self._find(first)
        inner, step = (self._outer[-1][1], self._outer[-1][2]) if self._outer else (1, 1)
        while number < self._count and (row := self._row(number)) < last:
            num = min(inner - number % inner, -(-(last - row) // step))
            if num > 2 and (row < first or row + (num - 1) * step + self.num_rows > last):
                num = 1 if row < first else num - 1
            yield row, step, num, number * self.num_rows
            number += num

    def _row(self, number: int) -> int:
        row = self._offset
        for offset, size, stride in reversed(self._outer):
            number, index = divmod(number, size)
            row += (offset + index) * stride
        return row

    def _find(self, row: int) -> int:
        """Return the number of the last segment that does not begin behind a row; 0 if all do."""
        number, below = 0, self._count
        for offset, size, stride in self._outer:
            below //= size
            index, row = divmod(row, stride)
            if index < offset:
                return max(number * below * size - 1, 0)
            if index >= offset + size:
                return (number + 1) * below * size - 1
            number = number * size + index - offset
        return max(number - (row < self._offset), 0)
