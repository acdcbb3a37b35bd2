"""Signals that are noted now and acted upon later: a handler may run between any two lines of training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

_NEVER = frozenset({"SIGKILL", "SIGSTOP"})


class SignalNotes:
    """Replaces the handlers of some signals by one that only remembers them.

    Args:
        signals: Which ones.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signals = tuple(dict.fromkeys(signals))
        self._previous: dict[signal.Signals, Any] = {}
        self._noted: list[signal.Signals] = []

    def install(self) -> None:
        """Replace the handlers; those that are ours already stay.

        Raises:
            RuntimeError: Outside of the main thread, where Python sets no handlers.
        """
        if self.signals and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "stop_on_signals needs Trainer.fit in the main thread: Python sets signal handlers nowhere else. "
                "Call fit there, or set_trigger() in a handler of your own."
            )
        for number in self.signals:
            if signal.getsignal(number) != self._note:
                self._previous[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Put the replaced handlers back."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note:  # else somebody else has taken over since
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def take(self) -> list[signal.Signals]:
        """Return what has come since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted.append(signal.Signals(number))


def parse_signals(values: Iterable[int | str], argument: str) -> list[signal.Signals]:
    """Return the signals that a user names.

    Args:
        values: Each as ``signal.SIGTERM``, its number, or its name.
        argument: Names them in errors.

    Raises:
        TypeError: If it is a single one.
        ValueError: If one is unknown here, or cannot be caught.
    """
    if isinstance(values, int | str):
        raise TypeError(f"{argument} must be a list of signals, got {values!r}.")
    return [_parse(value, argument) for value in values]


def _parse(value: int | str, argument: str) -> signal.Signals:
    try:
        number = signal.Signals[value] if isinstance(value, str) else signal.Signals(value)
    except (KeyError, ValueError):
        known = ", ".join(sorted(number.name for number in signal.Signals if number.name not in _NEVER))
        raise ValueError(f"{argument}: there is no signal {value!r} here. Use some of {known}.") from None
    if number.name in _NEVER:
        raise ValueError(f"{argument}: {number.name} cannot be caught. Use SIGTERM or SIGUSR1.")
    return number
