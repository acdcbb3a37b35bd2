"""What a checkpoint format can do: one subclass in each format's folder, one line for each in `registry`."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path

from ..manifest import Manifest
from .description import CheckpointInfo
from .source import Source


class Format(ABC):
    """A way to keep a sharded checkpoint in a folder."""

    signs: tuple[str, ...]
    """What such a folder is told by, as an error says that finds none of it."""

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Whether ``folder`` holds a checkpoint of this format; looks at names alone."""

    @abstractmethod
    def open(self, folder: Path) -> tuple[Source, Manifest | None]:
        """Read the description of the checkpoint in ``folder``, and what is known of ties and the module's attribute.

        Raises:
            CheckpointError: If it is damaged, or the model cannot be told in it.
        """

    @abstractmethod
    def describe(self, folder: Path) -> CheckpointInfo:
        """Say what the checkpoint in ``folder`` holds.

        Raises:
            CheckpointError: As `open`, and if a file that the description names is missing or too short.
        """

    def remove(self, folder: Path) -> None:
        """Remove the checkpoint in ``folder``, and before it what would point at nothing without it."""
        shutil.rmtree(folder)

    def named_inside(self, folder: Path) -> Path | None:
        """Return the folder of this format that a file in ``folder`` names; None where none does."""
        return None

    def why_unreadable(self, folder: Path) -> str | None:
        """Say why ``folder``, which is much like one of this format, cannot be read; None where it is not like one."""
        return None
