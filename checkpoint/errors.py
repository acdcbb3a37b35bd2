"""The one error of this package's readers and of the merge, and how it shows values from checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The checkpoint, or the pair of checkpoint and request, cannot give a right result.

    The message names file, tensor and both values of a mismatch. A ``ValueError``, because that is what Accelerate's
    ``merge_fsdp_weights`` raises for a folder it cannot read. Wrong arguments are plain ``ValueError`` or
    ``TypeError``; a full disk or a missing permission stays the ``OSError`` it is.
    """

    def __init__(self, message: str):
        # Names come from checkpoints: they may neither break the line nor send commands to the terminal.
        super().__init__("".join(one if one.isprintable() else ascii(one)[1:-1] for one in message))


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
