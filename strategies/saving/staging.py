"""Copies of a state in host or shared memory for asynchronous saves; the next save reuses the memory."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...checkpoint.files import human_bytes
from ..sharded_tensors.shards import FlatShard
from ..upstream.torch_core import ShardedTensor, StateDictStager, tree_leaves

_log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # its cudart() has no types
_PINNED_FROM_BYTES = 4096  # less is not worth a page of its own
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for whichever thread
_ATOMIC = frozenset({type(None), bool, int, float, str, bytes})


class Stager(StateDictStager):
    """Copies nested states, with torch's way through them, into memory that it keeps.

    torch 2.13 keeps memory for as long as the tensor lives that was copied into it. State dicts that are gathered hold
    new tensors each time: all their memory would be allocated, and on CUDA pinned, again at each save. Here a
    copy takes any memory of its size; what the latest state has no use for is freed.

    What most states are made of, dictionaries of plain tensors and of shards, goes a shorter way: torch's takes longer
    for a DTensor of 4 MB than its bytes do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: defaultdict[tuple[int, bool], list[UntypedStorage]] = defaultdict(list)
        self._used: defaultdict[tuple[int, bool], list[UntypedStorage]] = defaultdict(list)
        self._copied: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        """By their identity, storages and their copies, while a state is copied: several tensors may share one."""

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state`` in host memory, in place of the previous one, which must not be read any more."""
        self._kept, self._used = self._used, defaultdict(list)
        try:
            copied = self.stage(state)
            if self._is_pinned:
                torch.accelerator.current_stream().synchronize()
        finally:
            self._copied.clear()
            self._free()
        if not isinstance(copied, dict):
            raise TypeError(f"expected a copy of the state, got {type(copied).__name__}.")
        return copied

    @override
    def deepcopy_with_tensor_offload(
        self, x: Any, memo: dict[int, Any] | None = None, _nil: Any = (), non_blocking: bool = False
    ) -> Any:
        kind = type(x)
        if kind in _ATOMIC:
            return x
        memo = {} if memo is None else memo
        if id(x) in memo:
            return memo[id(x)]
        if kind is dict:
            copied: Any = {}
            memo[id(x)] = copied
            for key, value in x.items():
                copied[self.deepcopy_with_tensor_offload(key, memo)] = self.deepcopy_with_tensor_offload(value, memo)
        elif kind is FlatShard:
            copied = memo[id(x)] = FlatShard(self.deepcopy_with_tensor_offload(x.held, memo), x.place)
        elif kind in (Tensor, DTensor) and _is_plain(x):
            copied = memo[id(x)] = self._copied_tensor(x, memo)
        elif kind is Tensor and (x.is_conj() or x.is_neg()):  # torch would copy the memory, and lose that
            resolved = x.detach().resolve_conj().resolve_neg().requires_grad_(x.requires_grad)
            resolved.__dict__ = vars(x)
            copied = memo[id(x)] = self.deepcopy_with_tensor_offload(resolved, memo)
        else:
            copied = super().deepcopy_with_tensor_offload(x, memo, non_blocking=non_blocking)  # type: ignore[no-untyped-call]
            return _as_of_user(x, copied, memo) if isinstance(x, Tensor) else copied
        memo.setdefault(id(memo), []).append(x)  # alive: another object could get its id
        return copied

    def _copied_tensor(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if isinstance(tensor, DTensor):
            local = self.deepcopy_with_tensor_offload(tensor.to_local(), memo)
            # from_local() takes thrice as long
            return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        copied = torch.empty(0, dtype=tensor.dtype)
        memory = self._stage_untyped_storage(tensor.untyped_storage())
        return copied.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    @property
    def _is_pinned(self) -> bool:
        return any(pinned for _, pinned in self._used)

    @property
    def num_bytes(self) -> int:
        """Of the memory that it keeps."""
        return sum(size * len(storages) for (size, _), storages in self._used.items())

    @override
    def close(self) -> None:
        """Free the memory; what was copied must not be read any more."""
        self._kept, self._used = self._used, defaultdict(list)
        self._free()
        super().close()  # type: ignore[no-untyped-call]

    @override
    def _stage_untyped_storage(self, storage: UntypedStorage, non_blocking: bool = False) -> UntypedStorage:
        identity = storage._cdata
        if identity in self._copied:
            return self._copied[identity][1]
        pinned = storage.device.type == "cuda" and storage.nbytes() >= _PINNED_FROM_BYTES
        memory = self._memory(storage.nbytes(), pinned)
        memory.copy_(storage, non_blocking=pinned)
        self._copied[identity] = storage, memory
        return memory

    def _memory(self, num_bytes: int, pinned: bool) -> UntypedStorage:
        size = num_bytes, pinned
        kept = self._kept[size]
        memory = kept.pop(0) if kept else _allocated(*size)  # in order: the same for the same tensor
        self._used[size].append(memory)
        return memory

    def _free(self) -> None:
        for (num_bytes, pinned), storages in self._kept.items():
            for storage in storages if pinned else ():
                unpin(storage.data_ptr(), num_bytes)
        self._kept.clear()


def _allocated(num_bytes: int, pinned: bool) -> UntypedStorage:
    storage = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
    if pinned:
        pin(storage.data_ptr(), num_bytes)
    return storage


def _as_of_user(tensor: Tensor, copied: Any, memo: dict[int, Any]) -> Any:
    """Return torch's copy with what it leaves out: whether it is a parameter, and whether it requires a gradient."""
    if type(tensor) is nn.Parameter:
        attributes = vars(copied)
        copied = memo[id(tensor)] = nn.Parameter(copied, requires_grad=False)
        vars(copied).update(attributes)
    return copied.requires_grad_(tensor.requires_grad)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is its bytes and their layout, with nothing that a user has hung on it."""
    return (
        not (tensor.requires_grad or tensor.is_quantized)
        and tensor.layout == torch.strided
        and not getattr(tensor, "__dict__", None)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def pin(address: int, num_bytes: int) -> None:
    """Pin this host memory for CUDA.

    Raises:
        RuntimeError: If it cannot.
    """
    error = int(_cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
    if error:
        raise RuntimeError(
            f"async_save copies the state to pinned host memory, but CUDA could not pin {num_bytes} bytes "
            f"(cudaError {error}). Free host memory, or use async_save=False."
        )


def unpin(address: int, num_bytes: int) -> None:
    """Undo `pin`, before the memory is freed."""
    error = int(_cuda.cudart().cudaHostUnregister(address))
    if error:  # of an earlier call, as a rule, whose error arrives by itself
        _log.warning("CUDA could not unpin %s bytes of host memory (cudaError %s).", num_bytes, error)


# ------------------------------------------------------------------------------------------------
# Shared memory without a name, passed by its descriptor; the system frees it with the last process that has it open.
#
# On Linux it is a ``memfd``, which the size of ``/dev/shm`` does not limit; elsewhere a temporary file without a name.


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
        """Return the offset of a storage in it; None if that is elsewhere."""
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
    """Return the room that so many bytes take."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Reserve the file's pages: writing where there are none ends a process by a signal."""
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
        f"async_save='process' copies the state of this process, {human_bytes(num_bytes)}, to shared memory: {found}. "
        "Free host memory, or use async_save=False."
    )


def _available() -> int | None:
    """Return how much memory the system could give, where it reports it."""
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
        """The memory of the last copy; None if it has no tensors."""

    @override
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        storages = {(one.device, one.data_ptr(), one.nbytes()): one for one in _storages(state)}
        needed = sum(aligned(one.nbytes()) for one in storages.values())
        pinned = any(one.device.type == "cuda" for one in storages.values())
        if self.memory is not None and not needed <= self.memory.num_bytes <= _TOO_LARGE * needed:
            self._release_memory()
        if self.memory is None and needed:
            self.memory = SharedMemory(needed, pinned=pinned)
        elif self.memory is not None:
            self.memory.restart()
        return super().copy(state)

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
        self._release_memory()
        super().close()

    def _release_memory(self) -> None:
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
