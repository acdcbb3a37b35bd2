"""DeepSpeed's tag folders as a format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...manifest import MANIFEST_NAME, Manifest, read_manifest
from ..description import CheckpointInfo
from ..format import Format
from ..safe_paths import file_inside
from ..source import Source
from ..torch_save.torch_file import check_written
from .description import describe_zero, left_out
from .files import LATEST_NAME, has_zero_files, latest_tag, remove_pointers
from .reader import read_zero


class ZeROFormat(Format):
    """Model and optimizer states in ``*_states.pt`` files, beside a ``latest`` file that names the newest folder."""

    signs = ("DeepSpeed's *_states.pt files", f"its file {LATEST_NAME!r}")

    def detect(self, folder: Path) -> bool:
        """Whether there are files named as DeepSpeed names them."""
        return has_zero_files(folder)

    def open(self, folder: Path) -> tuple[Source, Manifest | None]:
        """Read all ranks' states; DeepSpeed says itself what is tied, but for modules that have two names."""
        manifest = _manifest(folder)
        source = read_zero(folder).source()
        more = {alias: name for alias, name in manifest.ties.items() if alias not in source.tensors}
        skipped = {**source.skipped, **left_out(manifest, source.tensors)}
        return replace(source, skipped=skipped), replace(manifest, ties={**more, **source.ties})

    def describe(self, folder: Path) -> CheckpointInfo:
        """Describe it from its states, and from ``accelight.json`` in or above the folder."""
        manifest = _manifest(folder)
        return describe_zero(read_zero(folder), manifest)

    def remove(self, folder: Path) -> None:
        """Remove it; ``latest`` goes with the folder that it names."""
        remove_pointers(folder)
        super().remove(folder)

    def named_inside(self, folder: Path) -> Path | None:
        """Return the tag folder that ``latest`` or ``latest_universal`` names."""
        return latest_tag(folder)


def _manifest(folder: Path) -> Manifest:
    """Return the module's attribute and the digests of ``accelight.json``, in a tag folder or above it.

    Raises:
        CheckpointError: If a file is not the one that was written; its tensors are not looked at.
    """
    found, place = read_manifest(folder), folder
    if found is None and (folder.parent / LATEST_NAME).is_file():
        found, place = read_manifest(folder.parent), folder.parent
    if found is None:
        return Manifest("module")
    for name, digest in found.digests.items():
        path = place / name
        if path.parent == folder:
            check_written(file_inside(folder, path.name, str(place / MANIFEST_NAME)), digest)
    return replace(found, model_prefix="module")
