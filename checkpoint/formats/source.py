"""What a reader of any sharded format hands to the merge: tensors, their pieces, and where the bytes lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from random import Random

from ..errors import CheckpointError
from .dtypes import DType

_MANY = 32  # pieces, up to which comparing pairs is no work
_MOST_COMPARISONS = 300_000
_PRIME = 2**61 - 1
_MAX_EXPANDED = 64 * 2**20
MAX_DIMS = 64  # as torch has it
MAX_BYTES = 2**62  # no file or tensor is larger; sums of two such still fit the C types behind os.pread


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangular part of a tensor and the place of its bytes."""

    path: Path
    """The file."""
    start: int
    """Position in the file of the piece's first element; of the record where ``encoding`` is set."""
    offsets: tuple[int, ...]
    """Where the piece begins in the tensor, one number a dimension."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In elements; None for contiguous bytes."""
    encoding: tuple[str, ...] = ()
    """DCP's transform descriptors; empty for bytes as they are."""
    length: int = 0
    """Bytes of the record; set where ``encoding`` is."""

    @property
    def is_plain(self) -> bool:
        """Whether the file holds the piece's bytes as the output needs them."""
        return self.strides is None and not self.encoding


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before its bytes are looked for."""

    fqn: str
    """Name in the checkpoint, in full."""
    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SourceTensor(TensorInfo):
    """A full tensor, cut into pieces that cover it exactly."""

    pieces: tuple[Piece, ...]
    is_flat: bool = False
    """Whether the pieces are ranges of the flattened tensor, as ZeRO cuts it."""

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape that the pieces' offsets and sizes refer to."""
        return (prod(self.shape),) if self.is_flat else self.shape


@dataclass(frozen=True)
class Source:
    """A checkpoint whose description was read: the model's tensors, in the order they were saved, and the rest."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    """By name in the model (wrapper names still in place)."""
    skipped: Mapping[str, str]
    """Entry, by its full name, to the reason why it is not among the tensors."""
    locate: Callable[[Iterable[str]], Mapping[str, SourceTensor]]
    """Finds the bytes of the tensors with these names; raises CheckpointError where they are not as described."""
    check: Callable[[Iterable[str], Callable[[int], object]], None] = lambda wanted, on_bytes: None
    """Compares the stored bytes of the tensors with these names with the checksums beside them, tells how many it has
    compared, and raises CheckpointError where they are not as they were written. Without checksums: does nothing."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Alias to the name of the tensor it shares, where the checkpoint itself says so."""
    dtype: DType | None = None
    """What floating-point tensors become where nothing else is asked for; None keeps each one's own."""


def check_coverage(fqn: str, shape: Sequence[int], pieces: Sequence[Piece]) -> None:
    """Check that ``pieces`` cover a tensor of ``shape`` exactly once.

    Raises:
        CheckpointError: On a piece outside the tensor, an overlap or a gap.
    """
    for piece in pieces:
        if (
            len(piece.offsets) != len(shape)
            or len(piece.sizes) != len(shape)
            or any(offset + size > full for offset, size, full in zip(piece.offsets, piece.sizes, shape, strict=True))
        ):
            raise CheckpointError(
                f"{piece.path.name}: tensor {fqn!r} has a chunk at {list(piece.offsets)} of size {list(piece.sizes)}, "
                f"outside the tensor's shape {list(shape)}."
            )
    solid = sorted((p for p in pieces if all(p.sizes)), key=lambda piece: piece.offsets)
    if len(solid) > _MANY and _cover_once(shape, solid):
        return
    _tell_overlap(fqn, solid)
    covered, full = sum(prod(piece.sizes) for piece in solid), prod(shape)
    if covered != full:
        raise CheckpointError(
            f"Tensor {fqn!r} of shape {list(shape)} has {full} elements, its {len(pieces)} chunks hold {covered}: "
            f"a part is missing. Were all processes' files copied here?"
        )
    if len(solid) > _MANY:
        raise CheckpointError(
            f"Tensor {fqn!r} of shape {list(shape)}: some of its {len(solid)} chunks overlap, and there are gaps."
        )


def _cover_once(shape: Sequence[int], pieces: Sequence[Piece]) -> bool:
    """Return whether pieces cover a shape exactly once, as far as chance can tell.

    Each coordinate at which a piece begins or ends gets a random number, a piece the product over the dimensions of the
    differences between its ends. These add up to the same product for the whole shape if everything is covered once,
    and to something else otherwise, but for one case in 2**55: a sum of as many terms as there are pieces, where
    comparing pairs of 100,000 columns would take an hour.
    """
    numbers: list[dict[int, int]] = [{} for _ in shape]
    random = Random(int.from_bytes(os.urandom(16), "little")).getrandbits  # not known to whoever made the file

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for known, offset, size in zip(numbers, offsets, sizes, strict=True):
            for end in (offset, offset + size):
                if end not in known:
                    known[end] = random(60)
            product = product * (known[offset + size] - known[offset]) % _PRIME
        return product

    return sum(weight(piece.offsets, piece.sizes) for piece in pieces) % _PRIME == weight((0,) * len(shape), shape)


def _tell_overlap(fqn: str, pieces: Sequence[Piece]) -> None:
    """Sweep along dimension 0: only pieces whose ranges meet there are compared, and not without end."""
    active: list[Piece] = []
    num_left = _MOST_COMPARISONS
    for piece in pieces:
        active = [
            other for other in active if not piece.offsets or other.offsets[0] + other.sizes[0] > piece.offsets[0]
        ]
        num_left -= len(active)
        if num_left < 0:
            return
        for other in active:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            ):
                raise CheckpointError(
                    f"Tensor {fqn!r} has overlapping chunks: {list(other.offsets)} of size {list(other.sizes)} in "
                    f"{other.path.name}, and {list(piece.offsets)} of size {list(piece.sizes)} in {piece.path.name}."
                )
        active.append(piece)


def check_expansion(what: str, sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Check that a strided tensor is not many times what a file holds of it: it is put together in memory.

    Raises:
        CheckpointError: If it is.
    """
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    num_bytes = prod(sizes) * itemsize
    if num_bytes > _MAX_EXPANDED and num_bytes > 2 * reach * itemsize:
        raise CheckpointError(
            f"{what}: the strides {list(strides)} make {num_bytes} bytes of {reach * itemsize} stored ones; more than "
            f"twice as many are put together up to {_MAX_EXPANDED} bytes. Save it after contiguous()."
        )


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in row-major order without gaps; strides of dimensions of size 1 do not matter."""
    if not prod(shape):
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
