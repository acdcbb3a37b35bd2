"""Makes the thread of a save in the background copy as late as it can."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accelight.strategies.fsdp.checkpoint import async_save, staging
from accelight.strategies.fsdp.checkpoint.async_save import AsyncSaver
from accelight.strategies.fsdp.checkpoint.staging import PendingCopies


@contextmanager
def late_copies(*, optimizer_waits: bool) -> Iterator[list[PendingCopies]]:
    """Let copies be made when somebody waits for them, and not before.

    Args:
        optimizer_waits: Whether the optimizer does, as it should; or only the next save, when all is written over.

    Yields:
        One for each save, and those that no save had.
    """
    made: list[PendingCopies] = []
    wait_for_saves = AsyncSaver.wait

    class Late(PendingCopies):
        def __init__(self) -> None:
            super().__init__()
            self.asked = threading.Event()
            self.num_copies = 0
            made.append(self)

        def run(self) -> None:
            assert self.asked.wait(100)
            self.num_copies = len(self._copies)
            super().run()

        def wait(self) -> None:
            if optimizer_waits:
                self.asked.set()
                super().wait()

    def wait(self: AsyncSaver) -> None:
        if self._current is not None:
            assert isinstance(self._current.copies, Late)
            self._current.copies.asked.set()
        wait_for_saves(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "PendingCopies", Late)
        patch.setattr(AsyncSaver, "wait", wait)
        patch.setattr(staging, "_FROM_BYTES", 1)
        yield made
