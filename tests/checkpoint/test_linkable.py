"""Which bytes can be linked, and how the output is laid out for it: decided without any file system."""

from __future__ import annotations

import json
import os
import sys
from math import prod
from pathlib import Path

import pytest

from accelight.checkpoint.formats.base import DTYPES, Piece, SourceTensor
from accelight.checkpoint.names import Selection
from accelight.checkpoint.writing.copy import Linker
from accelight.checkpoint.writing.plan import LINK_BYTES, MIN_LINKED_BYTES, Plan, first_element, make_plan, middle

ROWS = 2 * MIN_LINKED_BYTES // LINK_BYTES


def test_where_a_piece_begins() -> None:
    assert first_element((8, 6), (2, 0), (3, 6)) == 12
    assert first_element((8, 6), (2, 3), (1, 2)) == 15  # within a row
    assert first_element((8, 6), (2, 3), (2, 3)) is None  # two parts of rows
    assert first_element((4, 8, 6), (1, 2, 0), (1, 3, 6)) == 60
    assert first_element((4, 8, 6), (1, 2, 0), (2, 3, 6)) is None
    assert first_element((), (), ()) == 0


def test_whole_blocks_in_the_middle() -> None:
    assert middle(0, 0, MIN_LINKED_BYTES) == (0, MIN_LINKED_BYTES)
    assert middle(LINK_BYTES, 0, MIN_LINKED_BYTES + 1) == (0, MIN_LINKED_BYTES)
    size = MIN_LINKED_BYTES + LINK_BYTES
    assert middle(LINK_BYTES + 8, 8, size) == (LINK_BYTES - 8, MIN_LINKED_BYTES)
    assert middle(8, 8, MIN_LINKED_BYTES) == (0, 0)  # too short without its ends
    assert middle(100, 5000, 10**7) == (0, 0)  # at other places within their blocks


def tensor(dtype: str, *shape: int, shift: int = 0) -> SourceTensor:
    """Return a tensor in two pieces of rows, that lie as in the tensor, or shifted by some bytes."""
    half, itemsize = shape[0] // 2, DTYPES[dtype].itemsize
    sizes = [(half, *shape[1:]), (shape[0] - half, *shape[1:])]
    places = [LINK_BYTES, 10**9 // LINK_BYTES * LINK_BYTES + prod(sizes[0]) * itemsize]
    offsets = [(first, *[0] * (len(shape) - 1)) for first in (0, half)]
    pieces = [Piece(Path("file"), p + shift, o, s) for p, o, s in zip(places, offsets, sizes, strict=True)]
    return SourceTensor("", DTYPES[dtype], shape, tuple(pieces))


TENSORS = {
    "a.small": tensor("float64", 3),
    "b.rows": tensor("bfloat16", 2 * ROWS + 1, LINK_BYTES - 8),
    "c.whole": tensor("bfloat16", ROWS, LINK_BYTES),
    "d.odd": tensor("bfloat16", 3 * ROWS + 1, LINK_BYTES - 9),
    "e.whole": tensor("float32", ROWS, LINK_BYTES),
    "f.shifted": tensor("float32", 4, LINK_BYTES, shift=64),
}


def plan(tensors: dict[str, SourceTensor], **options: object) -> Plan:
    names = {name: name for name in tensors}
    return make_plan(Selection(names), tensors, **{"reflink": True, **options})  # type: ignore[arg-type]


def order(tensors: dict[str, SourceTensor], **options: object) -> list[str]:
    """Return the order of the tensors, after a look at what safetensors asks for."""
    (file,) = plan(tensors, **options).files
    header = b"".join(file.header)
    assert (8 + int.from_bytes(header[:8], "little")) == len(header) == file.tensors[0].start
    described = json.loads(header[8:])
    position = file.tensors[0].start
    for one in file.tensors:
        assert one.start == position
        assert one.start % one.dtype.itemsize == 0
        assert described[one.name]["data_offsets"][0] == position - len(header)
        position += one.num_bytes
    assert position == file.num_bytes
    return [one.name for one in file.tensors]


def test_what_can_be_linked_comes_first() -> None:
    assert order(TENSORS) == ["e.whole", "c.whole", "b.rows", "a.small", "f.shifted", "d.odd"]
    laid_out = plan(TENSORS)
    assert laid_out.files[0].tensors[0].start % LINK_BYTES == 0
    first = sum(one.num_bytes for one in laid_out.files[0].tensors[:3])
    assert first - 3 * LINK_BYTES <= laid_out.num_linkable < first  # but for where the pieces of b.rows begin and end
    assert order(TENSORS, reflink=False) == ["a.small", "e.whole", "f.shifted", "b.rows", "c.whole", "d.odd"]
    assert order({name: TENSORS[name] for name in ("c.whole", "d.odd")}) == ["c.whole", "d.odd"]


def test_the_librarys_order_where_little_can_be_linked() -> None:
    shifted = {f"x{number}": tensor("float32", 8 * ROWS, LINK_BYTES, shift=64) for number in range(2)}
    for tensors, options in ((TENSORS | shifted, {}), (shifted, {}), (TENSORS, {"dtype": DTYPES["float32"]})):
        assert plan(tensors, **options).num_linkable == 0
        assert plan(tensors, **options) == plan(tensors, reflink=False, **options)


def test_each_file_for_itself() -> None:
    files = plan(TENSORS, max_shard_bytes=5 * MIN_LINKED_BYTES * 2).files
    assert len(files) > 1
    assert all(file.tensors[0].start % LINK_BYTES == 0 for file in files if file.num_linkable)
    assert sum(file.num_linkable for file in files) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for links")
def test_what_fails_otherwise_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * LINK_BYTES))
    folder, file = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path / "file", os.O_RDWR)
    try:
        linker = Linker()
        with pytest.raises(OSError, match="Is a directory") as raised:
            linker.link(tmp_path / "source", folder, 0, file, 0, LINK_BYTES)
        assert raised.value.filename == str(tmp_path / "source")
        assert not linker.link(tmp_path / "file", file, 1, file, 0, LINK_BYTES)  # into itself, at half a block
        assert linker.num_bytes == 0
    finally:
        os.close(folder)
        os.close(file)
