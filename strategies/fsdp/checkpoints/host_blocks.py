"""Bytes of tensors in host memory, one block after the other: one is copied from the device while one is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

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
        """Yield what was copied, when it is there; the block is empty then."""
        if self._event is not None and self._pieces:
            self._event.synchronize()
        yield from self._pieces
        self._pieces.clear()
        self._used = 0
