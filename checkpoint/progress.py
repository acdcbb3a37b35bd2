"""Progress of a merge: a bar on a terminal, a callable for programs, silence otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from .report import human_bytes

ProgressCallback = Callable[[int, int], object]
"""Called with the bytes done and the bytes in all; the last call has both equal."""

_DELAY_S = 0.7  # a short merge shows no bar, and does not import what draws one
_INTERVAL_S = 0.1
_WIDTH = 30


class Progress:
    """Counts bytes and reports them to the listener, if there is one."""

    def __init__(self, progress: ProgressCallback | bool | None, label: str = "merging"):
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise TypeError(f"progress must be a callable, True, False or None, got {type(progress).__name__}.")
        if progress is None:
            progress = sys.stderr is not None and sys.stderr.isatty()
        self._listener: ProgressCallback | None
        self._bar = _Bar(label) if progress is True else None
        self._listener = self._bar.show if self._bar else progress if callable(progress) else None
        self._done = 0
        self._total = 0
        self._last = 0.0

    def start(self, total: int) -> None:
        """Set how many bytes there will be."""
        self._total = total

    def add(self, num_bytes: int) -> None:
        """Count bytes; the listener is called at most ten times a second."""
        self._done = min(self._done + num_bytes, self._total)  # what is looked at beside the tensors was not foreseen
        if self._listener is None:
            return
        now = time.monotonic()
        if now - self._last >= _INTERVAL_S and self._done < self._total:
            self._last = now
            self._listener(self._done, self._total)

    def finish(self) -> None:
        """Tell the listener that all bytes are done."""
        if self._listener is not None:
            self._listener(self._total, self._total)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()


class _Bar:
    """A bar on stderr: rich's where rich is installed, else one line of text."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = time.monotonic()
        self._rich: Any = None
        self._task: Any = None
        self._is_shown = False

    def show(self, done: int, total: int) -> None:
        if not self._is_shown:
            if time.monotonic() - self._start < _DELAY_S or done >= total:
                return
            self._is_shown = True
            self._open(total)
        if self._rich is not None:
            self._rich.update(self._task, completed=done)
            return
        filled = _WIDTH * done // max(total, 1)
        text = f"\r{self._label} [{'#' * filled}{' ' * (_WIDTH - filled)}] {human_bytes(done)} of {human_bytes(total)} "
        print(text, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._is_shown = False

    def _open(self, total: int) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as RichProgress
        except ModuleNotFoundError:
            return
        columns = (self._label, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._rich = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._rich.add_task(self._label, total=total)
        self._rich.start()
