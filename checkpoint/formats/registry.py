"""Every checkpoint format that can be read. Finding, merging, comparing and describing ask this list and nothing else.

A new format is a folder beside this file, with a subclass of `Format` in its ``format.py``, and a line in `FORMATS`.
"""

from __future__ import annotations

from pathlib import Path

from .dcp.format import DCPFormat, DCPSafetensorsFormat
from .format import Format
from .zero.format import ZeROFormat

FORMATS: tuple[Format, ...] = (
    DCPFormat(),
    DCPSafetensorsFormat(),
    ZeROFormat(),
)
"""In the order in which a folder is tried."""


def detect(folder: Path) -> Format | None:
    """Return the format of the checkpoint in ``folder``; None if there is none in it."""
    return next((one for one in FORMATS if one.detect(folder)), None)
