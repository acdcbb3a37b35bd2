"""``storage://``: a store that all processes reach by a URL alone, on this machine's disk; importing registers it."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

URL = "storage://"


class Storage(LocalFileSystem):  # type: ignore[misc]
    """Takes paths such as ``storage:///folder``."""

    protocol = "storage"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return os.fspath(path).removeprefix(URL)


fsspec.register_implementation("storage", Storage, clobber=True)
