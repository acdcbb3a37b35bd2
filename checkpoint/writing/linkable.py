"""Which bytes of a merge can be linked: the file system lets two files share blocks, at the same place within a block.

Sources are aligned by whoever saved them: a piece lies in its file at the place that it has in its tensor, counted in
blocks (`strategies/fsdp/checkpoints/aligned_file.py`). So what remains to be done here is that tensors begin with a
block: those that fill whole blocks come first in the output, and its header is filled up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..formats.dtypes import DType
from ..formats.source import Piece, SourceTensor

LINK_BYTES = 4096
"""The block that is counted in. Where a file system's blocks are larger, it refuses, and bytes are copied."""
MIN_LINKED_BYTES = 512 * 1024
"""A shorter range is copied: it is put together with its neighbours, and links would cut files into many extents."""
_ENOUGH = 0.5  # of an output's bytes, from which on it is laid out for links

Sized = tuple[SourceTensor, DType]
"""A tensor, and the dtype it is written as."""


def first_element(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Return where a piece's elements begin in the flattened tensor; None if they are not next to each other there."""
    start, is_cut = 0, False
    for full, size in zip(reversed(shape), reversed(sizes), strict=True):
        if size != 1 and is_cut:
            return None
        is_cut = is_cut or size != full
    for full, offset in zip(shape, offsets, strict=True):
        start = start * full + offset
    return start


def middle(source: int, target: int, num_bytes: int) -> tuple[int, int]:
    """Return the part of a range that can be linked: how many bytes to skip, and its length, 0 if there is none."""
    if (source - target) % LINK_BYTES:
        return 0, 0
    skipped = -source % LINK_BYTES
    length = (num_bytes - skipped) // LINK_BYTES * LINK_BYTES
    return (skipped, length) if length >= MIN_LINKED_BYTES else (0, 0)


def linkable_tensors(planned: Mapping[str, Sized], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the tensors of which most can be linked, if they begin with a block, and how many bytes that is.

    Nothing is returned where this is less than half of all bytes: the shards were not aligned, or are too small.

    Args:
        planned: The tensors of the output.
        sizes: Their bytes there.
    """
    found: dict[str, int] = {}
    for name, size in sizes.items():
        if size < MIN_LINKED_BYTES:
            continue
        tensor, dtype = planned[name]
        if dtype is tensor.dtype:
            linked = sum(_linkable(tensor, piece) for piece in tensor.pieces)
            if linked > size * _ENOUGH:
                found[name] = linked
    return found if found and sum(found.values()) > sum(sizes.values()) * _ENOUGH else {}


def _linkable(tensor: SourceTensor, piece: Piece) -> int:
    if not piece.is_plain:
        return 0
    first = first_element(tensor.cut_shape, piece.offsets, piece.sizes)
    if first is None:
        return 0
    return middle(piece.start, first * tensor.dtype.itemsize, prod(piece.sizes) * tensor.dtype.itemsize)[1]


def first_in_file(members: Mapping[str, Sized], sizes: Mapping[str, int], linkable: Mapping[str, int]) -> list[str]:
    """Return the tensors that a file begins with, so that they can be linked, in the order of the library.

    All that fill whole blocks; then the largest of the others, behind which nothing begins with a block. The rest must
    keep its alignment: what follows begins with a multiple of its dtypes' sizes.

    Args:
        members: The file's tensors.
        sizes: Their bytes, among others.
        linkable: See `linkable_tensors`.
    """
    if not linkable:
        return []
    own = sorted((name for name in members if name in linkable), key=lambda name: (-members[name][1].rank, name))
    first = [name for name in own if not sizes[name] % LINK_BYTES]
    whole = set(first)
    unit = max((dtype.itemsize for _, dtype in members.values()), default=1)
    others = [name for name in own if name not in whole and not sizes[name] % unit]
    return first + sorted(others, key=lambda name: -linkable[name])[:1]
