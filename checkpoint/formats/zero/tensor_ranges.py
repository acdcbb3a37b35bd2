"""Tensors of a ZeRO checkpoint as ranges of the tensors that its files store, and where those lie."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

from ..dtypes import DType
from ..source import Piece, SourceTensor, check_coverage, check_expansion, is_contiguous
from ..torch_save.described_tensors import DescribedTensor, PlacedTensor, place
from ..torch_save.torch_file import open_archive


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a stored tensor, and where it belongs in the full one; in elements of the flattened tensors."""

    path: Path
    stored: DescribedTensor
    first: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class ZeroTensor:
    """A tensor of the model."""

    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    is_flat: bool
    """Whether it is put together from flat ranges; else it is one stored tensor."""


def stored_in_full(path: Path, stored: DescribedTensor) -> ZeroTensor:
    """Return a stored tensor as it is."""
    return ZeroTensor(stored.dtype, stored.shape, (Part(path, stored, 0, 0, prod(stored.shape)),), False)


class Flat:
    """Flat tensors of one or several files, seen as one after the other."""

    def __init__(self, tensors: Sequence[tuple[Path, DescribedTensor]]):
        self._tensors = tensors
        self.sizes = [prod(stored.shape) for _, stored in tensors]
        self._ends = list(accumulate(self.sizes))
        self.total = self._ends[-1] if self._ends else 0

    def cut(self, begin: int, end: int, target: int = 0) -> Iterator[Part]:
        """Yield what lies from element ``begin`` to ``end``, placed from ``target`` on."""
        index = bisect_right(self._ends, begin)
        while begin < end:
            path, stored = self._tensors[index]
            first = begin - self._ends[index] + self.sizes[index]
            count = min(end, self._ends[index]) - begin
            if count:
                yield Part(path, stored, first, target, count)
            begin, target, index = begin + count, target + count, index + 1


def joined_shares(dtype: DType, shape: tuple[int, ...], ranks: Sequence[Flat], offset: int) -> ZeroTensor:
    """Join one share of each rank, which begins at its element ``offset``; the last ranks' shares end with padding."""
    numel = prod(shape)
    share = share_of(shape, len(ranks))
    parts: list[Part] = []
    for rank, flat in enumerate(ranks):
        parts += flat.cut(offset, offset + min(share, max(numel - rank * share, 0)), rank * share)
    return ZeroTensor(dtype, shape, tuple(parts), True)


def share_of(shape: tuple[int, ...], world_size: int) -> int:
    """Return how many elements of a parameter each rank has in stage 3, padding included."""
    return -(-prod(shape) // world_size)


def locate(tensors: Mapping[str, ZeroTensor]) -> dict[str, SourceTensor]:
    """Find where the bytes of tensors lie.

    Raises:
        CheckpointError: If a storage is missing or has another size than the pickle says.
    """
    by_path: dict[Path, dict[DescribedTensor, str]] = {}
    for name, tensor in tensors.items():
        for part in tensor.parts:
            by_path.setdefault(part.path, {}).setdefault(part.stored, name)
    places: dict[tuple[Path, DescribedTensor], PlacedTensor] = {}
    for path, stored in by_path.items():
        with open_archive(path) as archive:
            for one, name in stored.items():
                places[path, one] = place(archive, one, f"{path}: tensor {name!r}")
    located: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        pieces = tuple(_piece(part, tensor, places[part.path, part.stored].start) for part in tensor.parts)
        found = SourceTensor(name, tensor.dtype, tensor.shape, pieces, tensor.is_flat)
        check_coverage(name, found.cut_shape, pieces)
        located[name] = found
    return located


def check_parts(tensors: Iterable[ZeroTensor], on_bytes: Callable[[int], object]) -> None:
    """Compare the bytes of what holds these tensors with the checksums that torch wrote beside them.

    Raises:
        CheckpointError: If they are not as they were written.
    """
    keys: dict[Path, dict[str, None]] = {}
    for tensor in tensors:
        for part in tensor.parts:
            keys.setdefault(part.path, {})[part.stored.storage.key] = None
    for path, own in keys.items():
        with open_archive(path) as archive:
            for key in own:
                on_bytes(archive.check([key]))


def _piece(part: Part, tensor: ZeroTensor, start: int) -> Piece:
    if tensor.is_flat:
        return Piece(part.path, start + part.first * tensor.dtype.itemsize, (part.target,), (part.count,))
    strides = None if is_contiguous(tensor.shape, part.stored.strides) else part.stored.strides
    if strides is not None:
        check_expansion(
            f"{part.path}: a tensor of shape {list(tensor.shape)}", tensor.shape, strides, tensor.dtype.itemsize
        )
    return Piece(part.path, start, (0,) * len(tensor.shape), tensor.shape, strides)
