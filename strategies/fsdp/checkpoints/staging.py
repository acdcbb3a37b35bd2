"""Copies of a state in host memory, for saves in the background: the memory of one copy is used again for the next."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...common.flat_shards import FlatShard
from ...upstream.torch_core import StateDictStager
from .pending_copies import PendingCopies

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
        self._pending: PendingCopies | None = None

    def copy(self, state: dict[str, Any], pending: PendingCopies | None = None) -> dict[str, Any]:
        """Return a copy of ``state`` in host memory, in place of the one before: nobody may read that any more.

        Args:
            state: Nested, of any kind.
            pending: Takes what can be copied later; None copies all of it now.
        """
        self._kept, self._used = self._used, defaultdict(list)
        self._pending = pending
        try:
            copied = self.stage(state)
            if self._is_pinned:
                torch.accelerator.current_stream().synchronize()
        finally:
            self._pending = None
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
        else:
            return super().deepcopy_with_tensor_offload(x, memo, non_blocking=non_blocking)  # type: ignore[no-untyped-call]
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
        identity = storage._cdata  # asking for its address would end sharing: see [Note: copy on write]
        if identity in self._copied:
            return self._copied[identity][1]
        pinned = storage.device.type == "cuda" and storage.nbytes() >= _PINNED_FROM_BYTES
        memory = self._memory(storage.nbytes(), pinned)
        if self._pending is None or not self._pending.add(storage, memory):
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


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is its bytes and their layout, with nothing that a user has hung on it."""
    return (
        not (tensor.requires_grad or tensor.is_quantized)
        and tensor.layout == torch.strided
        and not getattr(tensor, "__dict__", None)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def pin(address: int, num_bytes: int) -> None:
    """Let CUDA copy to this host memory by itself.

    Raises:
        RuntimeError: If it cannot.
    """
    error = int(_cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
    if error:
        raise RuntimeError(
            f"async_save copies the state to pinned host memory, and CUDA could not pin {num_bytes} bytes "
            f"(cudaError {error}). Free host memory, or use async_save=False."
        )


def unpin(address: int, num_bytes: int) -> None:
    """Undo `pin`, before the memory is freed."""
    error = int(_cuda.cudart().cudaHostUnregister(address))
    if error:  # of an earlier call, as a rule, whose error arrives by itself
        _log.warning("CUDA could not unpin %s bytes of host memory (cudaError %s).", num_bytes, error)
