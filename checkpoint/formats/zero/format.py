"""DeepSpeed's tag folders as a format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...manifest import Manifest, read_manifest
from ..description import CheckpointInfo
from ..format import Format
from ..source import Source
from .description import describe_zero
from .files import LATEST_NAME, has_zero_files, latest_tag, remove_pointers
from .reader import read_zero


class ZeROFormat(Format):
    """Model and optimizer states in ``*_states.pt`` files, beside a ``latest`` file that names the newest folder."""

    signs = ("DeepSpeed's *_states.pt files", f"its file {LATEST_NAME!r}")

    def detect(self, folder: Path) -> bool:
        """Whether there are files named as DeepSpeed names them."""
        return has_zero_files(folder)

    def open(self, folder: Path) -> tuple[Source, Manifest | None]:
        """Read all ranks' states; DeepSpeed says itself what is tied."""
        source = read_zero(folder).source()
        return source, _manifest(folder, source.ties)

    def describe(self, folder: Path) -> CheckpointInfo:
        """Describe it from its states, and from ``accelight.json`` in or above the folder."""
        checkpoint = read_zero(folder)
        return describe_zero(checkpoint, _manifest(folder, checkpoint.ties).module_attribute)

    def remove(self, folder: Path) -> None:
        """Remove it; ``latest`` goes with the folder that it names."""
        remove_pointers(folder)
        super().remove(folder)

    def named_inside(self, folder: Path) -> Path | None:
        """Return the tag folder that ``latest`` or ``latest_universal`` names."""
        return latest_tag(folder)


def _manifest(folder: Path, ties: Mapping[str, str]) -> Manifest:
    """Return DeepSpeed's own ties, and the module's attribute of ``accelight.json`` in or above its tag folder."""
    found = read_manifest(folder)
    if found is None and (folder.parent / LATEST_NAME).is_file():
        found = read_manifest(folder.parent)
    return Manifest("module", ties, None if found is None else found.module_attribute)
