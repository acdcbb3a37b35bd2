"""Copies of host memory that a thread makes while training goes on, of what was there when they were asked for.

[Note: copy on write] torch lets two storages share memory until somebody writes to one of them, whichever view it is
written through, ``.data`` too: the writer gets memory of its own first (``c10/core/impl/COW.h``, torch 2.13). So what
is to be copied is shared, which takes a microsecond, and the thread copies what it shares. Who writes before the thread
was there pays with a copy; the optimizer waits for the thread instead (`PendingCopies.wait`). Afterwards all is as if
nothing had been shared: the same addresses, and no mark left for the next writer to find (who resizes to nothing and
back meets an assertion of torch's). What is written past torch before the wait cannot be seen: through a NumPy view or
an address from before the save.

Host memory alone: kernels on CUDA write to several tensors at once through addresses that count as read
(``_foreach_*``, ``MultiTensorApply.cuh``), and so to what they share.
"""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

_FROM_BYTES = 2**16  # less is copied sooner than handed to a thread


class PendingCopies:
    """Copies on their way, from `add` to `run`."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Tensor, Tensor]] = deque()
        self._sources: list[StorageWeakRef] = []
        """What is shared; what was gathered for the save alone is gone when it is copied."""
        self._done = threading.Event()

    def add(self, source: UntypedStorage, memory: UntypedStorage) -> bool:
        """Let ``memory`` get what ``source`` holds now, whatever is written to it afterwards.

        Returns:
            Whether it will; what is small, elsewhere, or not torch's own memory cannot be shared.
        """
        num_bytes = source.nbytes()
        if source.device.type != "cpu" or num_bytes < _FROM_BYTES:
            return False
        contents = _bytes_of(source)
        if contents.is_pinned():  # a GPU may be reading it: it has to stay where it is, whoever writes
            return False
        try:
            shared = torch._lazy_clone(contents)
        except RuntimeError:  # of NumPy, mapped from a file or shared with other processes
            return False
        self._copies.append((shared, _bytes_of(memory)))
        self._sources.append(StorageWeakRef(source))  # type: ignore[no-untyped-call]
        return True

    def run(self) -> None:
        """Copy; in a thread."""
        try:
            while self._copies:
                shared, memory = self._copies.popleft()
                memory.copy_(shared)  # lets other threads go on, as UntypedStorage.copy_() does not
        finally:
            self._copies.clear()
            self._done.set()

    def wait(self) -> None:
        """Return when `run` has, whether or not it could; only where nobody else uses what was copied."""
        self._done.wait()
        for reference in self._sources:
            source = UntypedStorage._new_with_weak_ptr(reference.cdata)
            if source is not None and source.nbytes() > 0:
                source.data_ptr()  # asking is enough for it to be its own again
        self._sources.clear()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
