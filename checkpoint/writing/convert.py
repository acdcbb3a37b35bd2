"""Other dtypes and ``.bin`` files. Needs torch, imported only here, for all but widening bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..files import BLOCK_BYTES, FilePool
from ..formats.dtypes import DType
from ..formats.source import SourceTensor
from .gather import TensorReader
from .plan import PlannedFile

if TYPE_CHECKING:
    import torch


def convert_block(view: memoryview, source: DType, target: DType, what: str) -> memoryview:
    """Return the values of a block in another dtype.

    Raises:
        CheckpointError: If a finite value is too large for the target: the file would hold an infinity instead.
    """
    if (source.name, target.name) == ("bfloat16", "float32"):
        return _widen(view)
    import torch

    values = torch.frombuffer(view, dtype=getattr(torch, source.name))
    converted = values.to(getattr(torch, target.name))
    if target.name == "float16" or source.name == "float64":
        overflow = converted.isinf() & values.isfinite()
        if overflow.any():
            worst = values[overflow].abs().max().item()
            raise CheckpointError(
                f"{what}: the value {worst:g} does not fit into {target.name}. Use bfloat16 or float32."
            )
    out = bytearray(converted.numel() * target.itemsize)
    if out:
        torch.frombuffer(out, dtype=converted.dtype).copy_(converted)
    return memoryview(out)


def _widen(view: memoryview) -> memoryview:
    """Return bfloat16 values as float32, without torch: the same bits, and 16 zero bits below them."""
    out = memoryview(bytearray(2 * len(view)))
    out.cast("H")[1::2] = view.cast("H")  # files are little endian, whatever the machine is
    return out


def load_tensors(file: PlannedFile) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a planned file, in its order, each fully in memory."""
    import torch

    files = FilePool()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        for planned in file.tensors:
            data = bytearray(planned.num_bytes)
            for start, block in converted_blocks(planned.source, planned.dtype, planned.name, files, buffer):
                data[start : start + len(block)] = block
            dtype = getattr(torch, planned.dtype.name)
            shape = planned.source.shape
            yield (
                planned.name,
                torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype),
            )
    finally:
        files.close()


def converted_blocks(
    tensor: SourceTensor, target: DType, name: str, files: FilePool, buffer: memoryview
) -> Iterator[tuple[int, memoryview]]:
    """Yield (position in the output tensor, bytes) in the target dtype."""
    for start, view in TensorReader(tensor, files).blocks(buffer):
        if target is tensor.dtype:
            yield start, view
        else:
            position = start // tensor.dtype.itemsize * target.itemsize
            yield position, convert_block(view, tensor.dtype, target, f"Tensor {name!r}")


def save_bin(file: PlannedFile, stream: IO[bytes]) -> dict[str, Any]:
    """Write a planned file as ``torch.save`` does, tied names sharing one storage; returns the state dict."""
    import torch

    state_dict: dict[str, Any] = dict(load_tensors(file))
    for alias, name in file.ties.items():
        state_dict[alias] = state_dict[name]
    torch.save(state_dict, stream)
    return state_dict


def compare_bin(file: PlannedFile, stream: IO[bytes]) -> None:
    """Load a written ``.bin`` file and compare every tensor with its source, byte for byte.

    Raises:
        CheckpointError: If one is missing or differs.
    """
    import torch

    state_dict = torch.load(stream, map_location="cpu", weights_only=True)
    files = FilePool()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        for planned in file.tensors:
            flat = state_dict[planned.name].reshape(-1).view(torch.uint8) if planned.num_bytes else None
            for start, block in converted_blocks(planned.source, planned.dtype, planned.name, files, buffer):
                if flat is None or not torch.equal(
                    flat[start : start + len(block)], torch.frombuffer(block, dtype=torch.uint8)
                ):
                    raise CheckpointError(f"{file.name}: tensor {planned.name!r} read back differs from its source.")
    finally:
        files.close()
