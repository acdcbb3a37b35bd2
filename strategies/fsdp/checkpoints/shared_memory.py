"""Memory that another process is given by its descriptor: it has no name, and the last process that ends gives it back.

On Linux it is a ``memfd``, which the size of ``/dev/shm`` does not limit; elsewhere a temporary file without a name.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ....checkpoint.report import human_bytes
from ...common.flat_shards import FlatShard
from ...upstream.torch_core import ShardedTensor, tree_leaves
from .pending_copies import PendingCopies
from .staging import Stager, pin, unpin

_ALIGNMENT = 64
_TOO_LARGE = 2  # times what the present state needs


def unnamed_file() -> int:
    """Return the descriptor of an empty file in memory, which is gone when nobody has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("accelight-save")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedMemory:
    """Host memory of one size, handed out from its beginning on.

    Args:
        num_bytes: All of it is there when this returns.
        pinned: Whether CUDA copies to it by itself.

    Raises:
        RuntimeError: If the machine has less, or CUDA cannot pin it.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._used = 0
        self._pinned = False
        self.descriptor = unnamed_file()
        """To be given to another process."""
        try:
            _reserve(self.descriptor, num_bytes)
            self._map = mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
            if pinned:
                pin(self._address, num_bytes)
                self._pinned = True
        except BaseException:
            os.close(self.descriptor)
            raise

    def restart(self) -> None:
        """Hand all of it out again; what was there must not be read any more."""
        self._used = 0

    def allocate(self, num_bytes: int) -> UntypedStorage | None:
        """Return some of it; None if that is not there any more, or nothing is asked for."""
        start = self._used
        if num_bytes == 0 or start + num_bytes > self.num_bytes:
            return None
        self._used = aligned(start + num_bytes)
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=num_bytes).untyped_storage()

    def place_of(self, storage: UntypedStorage) -> int | None:
        """Return where in it a storage lies; None if that is elsewhere."""
        place = storage.data_ptr() - self._address
        return place if 0 <= place < self.num_bytes else None

    def close(self) -> None:
        """Give it back, though copies that wait for the garbage collector still map it: they must not be read."""
        if self._pinned:
            unpin(self._address, self.num_bytes)
            self._pinned = False
        os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)
        del self._map


def aligned(num_bytes: int) -> int:
    """Return what so many bytes take."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Let the file have its pages: writing where there are none ends a process by a signal."""
    available = _available()
    if available is not None and num_bytes > available:
        raise RuntimeError(_too_little(num_bytes, f"{human_bytes(available)} are available"))
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise RuntimeError(_too_little(num_bytes, os.strerror(error.errno))) from error


def _too_little(num_bytes: int, found: str) -> str:
    return (
        f"async_save='process' copies what this process saves, {human_bytes(num_bytes)}, to shared memory: {found}. "
        "Free host memory, or use async_save=False."
    )


def _available() -> int | None:
    """Return how much memory the system could give, where it tells."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    found = lines.get("MemAvailable")
    return None if found is None else int(found.split()[0]) * 1024


class SharedStager(Stager):
    """Copies states into shared memory, which it keeps for the next.

    What `SharedMemory` has no room for, tensors inside of unknown classes, is copied to memory of this process alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: SharedMemory | None = None
        """Where the last copy lies; None if it has no tensors."""

    @override
    def copy(self, state: dict[str, Any], pending: PendingCopies | None = None) -> dict[str, Any]:
        storages = {(one.device, one.data_ptr(), one.nbytes()): one for one in _storages(state)}
        needed = sum(aligned(one.nbytes()) for one in storages.values())
        pinned = any(one.device.type == "cuda" for one in storages.values())
        if self.memory is not None and not needed <= self.memory.num_bytes <= _TOO_LARGE * needed:
            self._give_back()
        if self.memory is None and needed:
            self.memory = SharedMemory(needed, pinned=pinned)
        elif self.memory is not None:
            self.memory.restart()
        return super().copy(state, pending)

    @property
    @override
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self.memory is None else self.memory.num_bytes)

    @property
    @override
    def _is_pinned(self) -> bool:
        return super()._is_pinned or (self.memory is not None and self.memory._pinned)

    @override
    def _memory(self, num_bytes: int, pinned: bool) -> UntypedStorage:
        shared = None if self.memory is None else self.memory.allocate(num_bytes)
        return super()._memory(num_bytes, pinned) if shared is None else shared

    @override
    def close(self) -> None:
        self._give_back()
        super().close()

    def _give_back(self) -> None:
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()


def _storages(state: dict[str, Any]) -> Iterator[UntypedStorage]:
    for leaf in tree_leaves(state):
        if isinstance(leaf, ShardedTensor):
            tensors = [shard.tensor for shard in leaf.local_shards()]
        elif isinstance(leaf, DTensor):
            tensors = [leaf.to_local()]
        elif isinstance(leaf, FlatShard):
            tensors = [leaf.held]
        else:
            tensors = [leaf] if isinstance(leaf, Tensor) else []
        for tensor in tensors:
            if tensor.data_ptr() != 0:
                yield tensor.untyped_storage()
