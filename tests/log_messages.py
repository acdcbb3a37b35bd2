"""What loggers are given to say, for tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

RANK_ZERO = "lightning.pytorch.utilities.rank_zero"
"""Where Lightning's `rank_zero_info` and `rank_zero_warn` log."""


class _Messages(logging.Handler):
    def __init__(self, level: int, without: tuple[str, ...]) -> None:
        super().__init__(level)
        self.messages: list[str] = []
        self._without = without

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(self._without):
            self.messages.append(record.getMessage())


@contextmanager
def log_messages(*names: str, level: int = logging.NOTSET, without: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Collect the messages of loggers inside of the context.

    Args:
        *names: Of the loggers, whose own levels count; ``""`` is the root's.
        level: The lowest that is collected.
        without: Loggers below them that are left out, by the beginnings of their names.
    """
    handler = _Messages(level, without)
    with ExitStack() as stack:
        for name in names:
            logging.getLogger(name).addHandler(handler)
            stack.callback(logging.getLogger(name).removeHandler, handler)
        yield handler.messages
