"""Makes the thread of an asynchronous save write as late as it can."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from accelight.strategies.saving import async_save
from accelight.strategies.saving.async_save import AsyncSaver


@contextmanager
def late_saves() -> Iterator[list[str]]:
    """Let each asynchronous save begin when something waits for it: the next save, or the end of ``fit``.

    Yields:
        What was saved so.
    """
    asked, saved = threading.Event(), list[str]()
    run, wait = async_save._run, AsyncSaver.wait

    def run_late(current: Any, *args: Any) -> None:
        saved.append(current.what)
        assert asked.wait(100)
        run(current, *args)

    def ask_and_wait(self: AsyncSaver) -> None:
        asked.set()
        wait(self)
        asked.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "_run", run_late)
        patch.setattr(AsyncSaver, "wait", ask_and_wait)
        yield saved
