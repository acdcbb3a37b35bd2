"""Writes the weights of a sharded model as safetensors: every process its own byte ranges, without a gather."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....checkpoint.atomic_dir import AtomicFolder
from ....checkpoint.files import BLOCK_BYTES, CheckpointError, MergeReport, translate_full_disk, write_exactly
from ....checkpoint.formats.base import DTYPES, SourceTensor, conversion_target
from ....checkpoint.manifest import Manifest
from ....checkpoint.names import checked_prefix, clean_name, select
from ....checkpoint.writing.copy import convert_block
from ....checkpoint.writing.plan import (
    Plan,
    PlannedTensor,
    check_conflicts,
    check_destination,
    make_plan,
    parse_size,
    stale_files,
)
from ....state.rendezvous import raise_on_all_ranks, run_on_rank_zero
from ...common.checkpoint_files import check_mark, mark
from ...sharded_tensors.shards import FlatShard
from ..sharded_model import NamedTensor
from .planner import replica_of

_SUFFIX = ".safetensors"
_SHARED_FROM_BYTES = 2**20  # an unsharded tensor that is smaller is not worth being written by several


@dataclass(frozen=True)
class _Part:
    """A box of a tensor that this rank holds, and its share where others hold the same."""

    local: Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    share: int
    num_shares: int


def save_safetensors(
    path: Path,
    state: Mapping[str, Any],
    module: nn.Module,
    manifest: Manifest,
    *,
    max_shard_size: str | int | None,
    dtype: str | torch.dtype | None,
    strip_prefix: str | None,
) -> MergeReport:
    """Write the weights; every rank calls it. See `AccelFSDPStrategy.save_safetensors`.

    Args:
        path: A file with the suffix ``.safetensors``, or a folder.
        state: Sharded, as `model_state` returns it; the same names on every rank. What modules
            keep beside tensors is left out.
        module: Whose weights they are; distinguishes parameters from buffers.
        manifest: With its ties, its module attribute and what is left out.
        max_shard_size: Of one file.
        dtype: For floating-point tensors.
        strip_prefix: As `merge_fsdp_weights` has it.
    """
    started, what = time.monotonic(), f"Saving the weights to {path}"
    weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    is_file = path.suffix == _SUFFIX
    folder = path.parent if is_file else path
    with raise_on_all_ranks(what):
        if is_file and max_shard_size is not None:
            raise ValueError(f"max_shard_size needs a folder to write several files into, got the file {path}.")
        selection = select(list(weights), manifest, strip_prefix=checked_prefix(strip_prefix))
        plan = make_plan(
            selection,
            {name: _described(name, tensor) for name, tensor in weights.items()},
            dtype=conversion_target(dtype),
            max_shard_bytes=None if max_shard_size is None else parse_size(max_shard_size),
        )
        if is_file:
            plan = replace(plan, files=(replace(plan.files[0], name=path.name),))
        parts = _parts(weights, module, set(selection.names.values()))
    output = AtomicFolder(folder, shared=True)
    with ExitStack() as stack:  # leaving it early removes what was written

        def begin() -> tuple[list[str], str]:
            if not is_file:
                check_destination(folder, folder, remove=False)
                check_conflicts(folder, plan)
            paths = _create(stack.enter_context(output), plan)
            place = Path(paths[0]).parent
            name = mark(place)
            stack.callback((place / name).unlink)
            return paths, name

        paths, name = run_on_rank_zero(begin, what)
        with raise_on_all_ranks(what), translate_full_disk(folder, plan.num_bytes):
            check_mark(Path(paths[0]).parent, name)
            for file, temporary in zip(plan.files, paths, strict=True):
                _write_parts(temporary, file.tensors, parts)
        stale = [] if is_file else stale_files(folder, plan)
        run_on_rank_zero(lambda: output.commit(plan.index_name, stale), what)
    names = [file.name for file in plan.files] + ([plan.index_name] if plan.index_name else [])
    return MergeReport(
        destination=folder,
        files=tuple(names),
        num_tensors=sum(len(file.tensors) for file in plan.files),
        num_bytes=plan.num_bytes,
        seconds=time.monotonic() - started,
        ties=dict(selection.ties),
        skipped={**selection.skipped, **dict.fromkeys(state.keys() - weights.keys(), "not a tensor")},
        verified=False,
    )


def _described(name: str, tensor: Tensor) -> SourceTensor:
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"Tensor {name!r} is {tensor.dtype}, which safetensors cannot hold.")
    return SourceTensor(name, dtype, tuple(tensor.shape), ())


def _parts(weights: Mapping[str, Tensor], module: nn.Module, wanted: set[str]) -> dict[str, list[_Part]]:
    """Return the tensors that this rank has to write."""
    buffers = {clean_name(name) for name, _ in module.named_buffers(remove_duplicate=False)}
    return {
        name: _parts_of(name, tensor, clean_name(name) in buffers) for name, tensor in weights.items() if name in wanted
    }


def _parts_of(name: str, tensor: Tensor, is_buffer: bool) -> list[_Part]:
    if isinstance(tensor, FlatShard):
        return [_Part(local, box.offsets, box.sizes, *replica_of(tensor)) for box, local in tensor.boxes()]
    offsets, sizes = NamedTensor((name,), tensor, True).part()
    if isinstance(tensor, DTensor):
        return [_Part(tensor.to_local(), offsets, sizes, *replica_of(tensor))]
    if (
        is_buffer or tensor.nbytes < _SHARED_FROM_BYTES
    ):  # buffers may differ from process to process: one of them counts
        return [_Part(tensor, offsets, sizes, 0, 1)] if dist.get_rank() == 0 else []
    return [_Part(tensor, offsets, sizes, dist.get_rank(), dist.get_world_size())]


def _create(output: AtomicFolder, plan: Plan) -> list[str]:
    """Make the files with their headers, and return where they lie until they are complete."""
    output.check_space(plan.num_bytes)
    for file in plan.files:
        fd, position = output.create(file.name, file.num_bytes), 0
        for block in file.header:
            write_exactly(fd, memoryview(block), position)
            position += len(block)
    if plan.index_name is not None:
        write_exactly(output.create(plan.index_name, None), memoryview(plan.index), 0)
    return [str(output.path_of(file.name)) for file in plan.files]


def _write_parts(path: str, tensors: Sequence[PlannedTensor], parts: Mapping[str, Sequence[_Part]]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for (planned, position), start, values in in_host_memory(_pieces(tensors, parts)):
            _write(fd, planned, position + start // planned.source.dtype.itemsize, _bytes_of(values))
        os.fsync(fd)  # on a network file system, each machine holds its own writes back
    finally:
        os.close(fd)


def _pieces(
    tensors: Sequence[PlannedTensor], parts: Mapping[str, Sequence[_Part]]
) -> Iterator[tuple[tuple[PlannedTensor, int], Tensor]]:
    """Yield (tensor, first element) and the bytes of each run that this rank writes, where they lie; no other bytes."""
    for planned in tensors:
        itemsize = planned.source.dtype.itemsize
        for part in parts.get(planned.source.fqn, ()):
            local = part.local.detach().contiguous().reshape(-1).view(torch.uint8)
            for start, position, count in _runs(planned.source.shape, part):
                yield (planned, position), local[start * itemsize : (start + count) * itemsize]


def _write(fd: int, planned: PlannedTensor, position: int, values: memoryview) -> None:
    source, target = planned.source.dtype, planned.dtype
    where = planned.start + position * target.itemsize
    if source is target:
        write_exactly(fd, values, where)
        return
    for begin in range(0, len(values), BLOCK_BYTES):
        block = convert_block(values[begin : begin + BLOCK_BYTES], source, target, f"Tensor {planned.name!r}")
        write_exactly(fd, block, where + begin // source.itemsize * target.itemsize)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, of any dtype."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _runs(shape: tuple[int, ...], part: _Part) -> Iterator[tuple[int, int, int]]:
    """Yield (first element in the part, its place in the full tensor, number of elements) of each contiguous run.

    Where several ranks hold the same part, each has its share of every run.
    """
    sizes, offsets = part.sizes, part.offsets
    inner = len(shape)  # dimensions from here on are complete, so that one more can be in the same run
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    length = prod(sizes[outer:])
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    first, last = length * part.share // part.num_shares, length * (part.share + 1) // part.num_shares
    if first == last:
        return
    for number, index in enumerate(product(*map(range, sizes[:outer]))):
        position = base + sum(one * stride for one, stride in zip(index, strides, strict=False))
        yield number * length + first, position + first, last - first


# ------------------------------------------------------------------------------------------------
# Bytes of tensors in host memory, one block after the other: one is copied from the device while one is written.


K = TypeVar("K")

_BLOCK_BYTES = 16 * 2**20
_ALIGNMENT = 16  # so that a piece can be read as any dtype


def in_host_memory(
    pieces: Iterable[tuple[K, Tensor]], block_bytes: int = _BLOCK_BYTES, *, copy_all: bool = False
) -> Iterator[tuple[K, int, Tensor]]:
    """Yield (key, where it begins in the piece, bytes) of each piece, which is valid until the next one is asked for.

    What is in host memory already is yielded as it is, and first; the rest goes through two blocks, pinned for CUDA.

    Args:
        pieces: Keys, and contiguous tensors of dtype uint8.
        block_bytes: Of one block, a multiple of 16; longer pieces are yielded in parts.
        copy_all: Let all go through the blocks.
    """
    filling = filled = None
    for key, values in pieces:
        if values.device.type == "cpu" and not copy_all:
            yield key, 0, values
            continue
        if filling is None or filled is None:
            filling, filled = (_Block[K](block_bytes, values.device) for _ in range(2))
        for start in range(0, values.numel(), block_bytes):
            part = values[start : start + block_bytes]
            if not filling.has_room(part):
                filling.close()
                yield from filled.contents()
                filling, filled = filled, filling
            filling.add(key, start, part)
    if filling is not None and filled is not None:
        filling.close()
        yield from filled.contents()
        yield from filling.contents()


@dataclass
class _Block(Generic[K]):
    """Some host memory, and what is being copied into it."""

    num_bytes: int
    device: torch.device
    _memory: Tensor = field(init=False)
    _event: torch.Event | None = field(init=False, default=None)
    _pieces: list[tuple[K, int, Tensor]] = field(init=False, default_factory=list)
    _used: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        pinned = self.device.type == "cuda"
        self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pinned)  # torch keeps it for the next
        self._event = torch.Event(self.device) if pinned else None

    def has_room(self, part: Tensor) -> bool:
        return self._used + part.numel() <= self.num_bytes

    def add(self, key: K, start: int, part: Tensor) -> None:
        """Begin to copy."""
        memory = self._memory[self._used : self._used + part.numel()]
        memory.copy_(part, non_blocking=self._event is not None)
        self._pieces.append((key, start, memory))
        self._used += -(-part.numel() // _ALIGNMENT) * _ALIGNMENT

    def close(self) -> None:
        """Nothing more is added."""
        if self._event is not None:
            self._event.record(torch.accelerator.current_stream(self.device))

    def contents(self) -> Iterator[tuple[K, int, Tensor]]:
        """Yield the copied tensors once the copy has ended; the block is empty then."""
        if self._event is not None and self._pieces:
            self._event.synchronize()
        yield from self._pieces
        self._pieces.clear()
        self._used = 0
