"""Pieces whose stored bytes are not the tensor's: strided or compressed ones. Torch is imported only for them."""

from __future__ import annotations

import io
import os
from math import prod
from typing import IO, TYPE_CHECKING

from ..errors import CheckpointError
from ..files import open_regular, read_exactly
from .source import Piece, SourceTensor

if TYPE_CHECKING:
    import torch


_RECORD_BYTES = 64 * 1024  # around a tensor


def decode_piece(tensor: SourceTensor, piece: Piece) -> memoryview:
    """Return the bytes of a piece in row-major order; all of the piece is in memory."""
    import torch

    dtype = getattr(torch, tensor.dtype.name)
    fd = open_regular(piece.path)
    try:
        if piece.encoding:
            values = _decode_record(tensor, piece, fd)
        else:
            strides = piece.strides or ()
            last = sum((size - 1) * stride for size, stride in zip(piece.sizes, strides, strict=True))
            stored = bytearray((last + 1) * tensor.dtype.itemsize)
            read_exactly(fd, piece.path, [memoryview(stored)], piece.start, len(stored))
            values = torch.frombuffer(stored, dtype=dtype).as_strided(piece.sizes, strides)
    finally:
        os.close(fd)
    out = bytearray(prod(piece.sizes) * tensor.dtype.itemsize)
    if out:
        torch.frombuffer(out, dtype=dtype).view(piece.sizes).copy_(values)
    return memoryview(out)


def _decode_record(tensor: SourceTensor, piece: Piece, fd: int) -> torch.Tensor:
    """Undo DCP's stream transforms (compression) of one record."""
    import torch

    from .dcp.upstream import ExtensionRegistry, StreamTransformExtension

    what = f"{piece.path}: tensor {tensor.fqn!r}"
    raw = bytearray(piece.length)
    read_exactly(fd, piece.path, [memoryview(raw)], piece.start, piece.length)
    stream: IO[bytes] = io.BytesIO(bytes(raw))
    try:
        for extension in ExtensionRegistry().from_descriptor_list(piece.encoding):
            if not isinstance(extension, StreamTransformExtension):
                raise ValueError(f"{extension} does not transform streams")
            stream = extension.transform_from(stream)
        most = prod(piece.sizes) * tensor.dtype.itemsize + _RECORD_BYTES
        if len(content := stream.read(most + 1)) > most:
            raise ValueError(f"it has more than the {most} bytes that a record of this tensor may have")
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{what}: the record is transformed by {list(piece.encoding)}: {error}") from error
    expected = (tensor.dtype.name, piece.sizes)
    found = (str(getattr(values, "dtype", "")).removeprefix("torch."), tuple(getattr(values, "shape", ())))
    if found != expected:
        raise CheckpointError(f"{what}: the record holds {found}, the metadata says {expected}.")
    return values
