"""The one error of this package's readers and of the merge."""

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
