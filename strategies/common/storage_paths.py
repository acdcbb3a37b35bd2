"""Where checkpoints lie: on a file system, or in a storage that a URL names."""

from __future__ import annotations

from pathlib import Path

from fsspec.core import strip_protocol
from fsspec.utils import get_protocol


def is_remote(path: str) -> bool:
    """Return whether ``path`` is a URL of something else than the file system (``s3://...``)."""
    return get_protocol(path) not in ("file", "local")


def local_path(path: str, what: str, instead: str = "") -> Path:
    """Return ``path`` on the file system; ``file://`` may stand before it.

    Args:
        path: A path or URL.
        what: What lies there, for the error.
        instead: What else to do, for the error; a sentence.

    Raises:
        ValueError: If it is a URL of something else. As a path, it would be a folder ``s3:`` right here.
    """
    if is_remote(path):
        raise ValueError(
            f"{path}: {what} have to be on a file system that all processes see, not behind "
            f"{get_protocol(path)}://. Give a path{f', or {instead}' if instead else ''}."
        )
    return Path(strip_protocol(path) if "://" in path else path)
