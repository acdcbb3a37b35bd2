"""The one error of this package's readers and of the merge, and how it shows values from checkpoints."""

from __future__ import annotations

import re

_MAX_NAME = 160
_MAX_MESSAGE = 500
_NAME = re.compile(rf"\S{{{_MAX_NAME + 1},}}")
_NOT_PLAIN = re.compile(r"[^ -~]")


class CheckpointError(ValueError):
    """The checkpoint, or the pair of checkpoint and request, cannot give a right result.

    The message names file, tensor and both values of a mismatch. A ``ValueError``, because that is what Accelerate's
    ``merge_fsdp_weights`` raises for a folder it cannot read. Wrong arguments are plain ``ValueError`` or
    ``TypeError``; a full disk or a missing permission stays the ``OSError`` it is.

    Whatever names the message has, it is one line of at most 500 characters that a terminal can show.
    """

    def __init__(self, message: str):
        super().__init__(printable_message(message))


def printable(text: str) -> str:
    """Return text from a checkpoint as a terminal may have it: what is no printable character is written as an escape.

    Names may neither break the line nor send commands to the terminal. A very long one is shortened in the middle.
    """
    if not text.isprintable():
        text = _NOT_PLAIN.sub(lambda found: found[0] if found[0].isprintable() else ascii(found[0])[1:-1], text)
    return _NAME.sub(lambda found: _shortened(found[0], _MAX_NAME), text) if len(text) > _MAX_NAME else text


def printable_message(text: str) -> str:
    """Return a message that names things from a checkpoint, `printable` and of a length that people read."""
    return _shortened(printable(text), _MAX_MESSAGE)


def _shortened(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half = (length - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def brief(value: object) -> str:
    """Return a value from a pickle for an error: never the content of containers, which may be without end."""
    if value is None or isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < 2**128):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}..."
    if type(value) is tuple or type(value) is list:
        shown = [brief(one) if not isinstance(one, tuple | list) else type(one).__name__ for one in value[:8]]
        text = f"{', '.join(shown)}{', ...' if len(value) > 8 else ''}"
        return f"[{text}]" if type(value) is list else f"({text})"
    return type(value).__name__
