"""Putting tensors together from pieces cut in any way, against slicing with torch."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelight.checkpoint import CheckpointError
from accelight.checkpoint.files import FilePool, read_at
from accelight.checkpoint.formats.base import DTYPES, Piece, SourceTensor, check_coverage
from accelight.checkpoint.writing.copy import TensorReader

Dims = tuple[int, ...]


def cut(data: st.DataObject, offsets: Dims, sizes: Dims, depth: int = 0) -> list[tuple[Dims, Dims]]:
    """Cut a box into boxes, again and again: not only the grids that shardings give."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not dims or depth > 3 or not data.draw(st.booleans()):
        return [(offsets, sizes)]
    dim = data.draw(st.sampled_from(dims))
    at = data.draw(st.integers(1, sizes[dim] - 1))
    first = (*sizes[:dim], at, *sizes[dim + 1 :])
    rest = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
    moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
    return cut(data, offsets, first, depth + 1) + cut(data, moved, rest, depth + 1)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_cut_of_any_shape(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    name = data.draw(st.sampled_from(["uint8", "bfloat16", "float32", "int64", "complex128"]))
    torch.manual_seed(0)
    whole = torch.randint(0, 256, (*shape, DTYPES[name].itemsize), dtype=torch.uint8)
    flat = whole.numpy().tobytes()
    with tempfile.TemporaryDirectory() as folder:
        pieces = []
        for number, (offsets, sizes) in enumerate(cut(data, (0,) * len(shape), shape)):
            path = Path(folder) / str(number)
            index = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            path.write_bytes(b"head" + whole[index].contiguous().numpy().tobytes())
            pieces.append(Piece(path, 4, offsets, sizes))
        check_coverage("w", shape, pieces)
        pieces = data.draw(st.permutations(pieces))
        tensor = SourceTensor("w", DTYPES[name], shape, tuple(pieces))
        files = FilePool(limit=2)
        reader = TensorReader(tensor, files)
        buffer = memoryview(bytearray(data.draw(st.sampled_from([16, 48, 100, 4096]))))
        blocks = [(start, bytes(view)) for start, view in reader.blocks(buffer)]
        assert b"".join(block for _, block in blocks) == flat
        assert [start for start, _ in blocks] == [sum(len(b) for _, b in blocks[:i]) for i in range(len(blocks))]
        begin = data.draw(st.integers(0, len(flat)))
        end = data.draw(st.integers(begin, len(flat)))
        part = memoryview(bytearray(end - begin))
        reader.read_into(begin, part)
        assert bytes(part) == flat[begin:end]
        runs = reader.runs()
        if runs is not None:
            out = bytearray(len(flat))
            for run in runs:
                out[run.target : run.target + run.num_bytes] = run.path.read_bytes()[run.source :][: run.num_bytes]
            assert bytes(out) == flat
        files.close()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_piece_more_or_less_or_moved_is_found(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    pieces = [Piece(Path("f"), 0, *box) for box in cut(data, (0,) * len(shape), shape)]
    piece = data.draw(st.sampled_from(pieces))
    less = [one for one in pieces if one is not piece]
    with pytest.raises(CheckpointError, match=f"has {prod(shape)} elements, but its"):
        check_coverage("w", shape, less)
    with pytest.raises(CheckpointError, match="overlapping chunks"):
        check_coverage("w", shape, [*pieces, piece])
    dim = data.draw(st.integers(0, len(shape) - 1))
    moved = (*piece.offsets[:dim], piece.offsets[dim] + 1, *piece.offsets[dim + 1 :])
    with pytest.raises(CheckpointError, match=r"overlapping chunks|outside the tensor's shape|is missing"):
        check_coverage("w", shape, [*less, Piece(Path("f"), 0, moved, piece.sizes)])


def test_rows_longer_than_a_block(tmp_path: Path) -> None:
    """Columns of a matrix whose rows are longer than the copying's blocks."""
    whole = torch.randn(3, 400_000)
    pieces = []
    for number, columns in enumerate(torch.split(whole, 170_001, dim=1)):
        path = tmp_path / str(number)
        path.write_bytes(columns.contiguous().numpy().tobytes())
        pieces.append(Piece(path, 0, (0, number * 170_001), tuple(columns.shape)))
    reader = TensorReader(SourceTensor("w", DTYPES["float32"], (3, 400_000), tuple(pieces)), FilePool())
    assert reader.runs() is not None
    blocks = reader.blocks(memoryview(bytearray(512 * 1024)))
    assert b"".join(bytes(view) for _, view in blocks) == whole.numpy().tobytes()


def test_files_beyond_the_limit_are_closed(tmp_path: Path) -> None:

    pool = FilePool(limit=3)
    for number in range(10):
        (tmp_path / str(number)).write_bytes(bytes([number]))
        assert read_at(pool.fd(tmp_path / str(number)), 1, 0) == bytes([number])
    assert len(pool._open) == 3
    pool.close()
