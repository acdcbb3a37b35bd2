"""Opens a checkpoint of any format: its description, and what is known of ties and of the module's attribute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..manifest import Manifest, read_manifest
from .dcp.reader import read_dcp
from .layout import Source
from .zero.files import LATEST_NAME, has_zero_files
from .zero.reader import read_zero


def open_source(folder: Path) -> tuple[Source, Manifest | None]:
    """Read the description of the checkpoint in ``folder``, as `find_checkpoint` returned it.

    Raises:
        CheckpointError: If it is damaged, or the model cannot be told in it.
    """
    if not has_zero_files(folder):
        manifest = read_manifest(folder)
        return read_dcp(folder, None if manifest is None else manifest.model_prefix), manifest
    source = read_zero(folder).source()
    return source, zero_manifest(folder, source.ties)


def zero_manifest(folder: Path, ties: Mapping[str, str]) -> Manifest:
    """Return DeepSpeed's own ties, and the module's attribute of ``accelight.json`` in or above its tag folder."""
    found = read_manifest(folder)
    if found is None and (folder.parent / LATEST_NAME).is_file():
        found = read_manifest(folder.parent)
    return Manifest("module", ties, None if found is None else found.module_attribute)
