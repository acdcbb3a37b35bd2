"""``accelight.json``: what a sharded checkpoint's own files do not say, written by the strategies, read by the merge.

No torch: the merge reads it on the fast path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .files import is_regular, read_regular

MANIFEST_NAME = "accelight.json"
FORMAT_VERSION = 1
_KEYS = {"format_version", "ties", "model_prefix", "module_attribute"}
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Manifest:
    """The content of ``accelight.json``."""

    model_prefix: str
    """Key of the saved state dict under which the weights are: ``model``, ``state_dict``, or DeepSpeed's ``module``."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Alias to the fqn whose tensor it shares, both as in the module's ``state_dict()``."""
    module_attribute: str | None = None
    """Attribute under which the LightningModule holds its model, e.g. ``model``; empty if it holds layers itself."""

    def __post_init__(self) -> None:
        if self.model_prefix not in ("model", "state_dict", "module"):
            raise ValueError(f"model_prefix must be 'model', 'state_dict' or 'module', got {self.model_prefix!r}.")
        if not isinstance(self.module_attribute, str | None):
            raise ValueError(f"module_attribute must be an attribute's name or None, got {self.module_attribute!r}.")
        if not isinstance(self.ties, Mapping):
            raise ValueError(f"ties must map alias to fqn, got {self.ties!r}.")
        for alias, fqn in self.ties.items():
            if not (isinstance(alias, str) and isinstance(fqn, str) and alias and fqn):
                raise ValueError(f"ties must map names to names, got {alias!r}: {fqn!r}.")
            if fqn in self.ties:
                raise ValueError(
                    f"{alias!r} is tied to {fqn!r}, which is an alias itself. Name the tensor that is kept."
                )


def write_manifest(
    checkpoint_dir: str | os.PathLike[str],
    *,
    model_prefix: str,
    ties: Mapping[str, str] | None = None,
    module_attribute: str | None = None,
) -> Path:
    """Write ``accelight.json`` into a checkpoint's folder; one process calls it, after the folder exists.

    Args:
        checkpoint_dir: The folder with ``.metadata``.
        model_prefix: Key of the saved state dict under which the weights are.
        ties: Alias to the fqn of the tensor it shares, without wrapper names.
        module_attribute: Attribute of the LightningModule that is its model, for ``strip_prefix="auto"``; empty if it
            holds layers itself, None if that is not known.

    Returns:
        The file's path.
    """
    manifest = Manifest(model_prefix, dict(ties or {}), module_attribute)
    content = {
        "format_version": FORMAT_VERSION,
        "model_prefix": manifest.model_prefix,
        "ties": dict(sorted(manifest.ties.items())),
        "module_attribute": manifest.module_attribute,
    }
    path = Path(checkpoint_dir) / MANIFEST_NAME
    temporary = path.with_name(f".{MANIFEST_NAME}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_manifest(checkpoint_dir: str | os.PathLike[str]) -> Manifest | None:
    """Read ``accelight.json``; None where the folder has none.

    Raises:
        CheckpointError: If it is not what `write_manifest` writes.
    """
    path = Path(checkpoint_dir) / MANIFEST_NAME
    if not is_regular(path):
        return None
    text = read_regular(path, _MAX_BYTES, "a manifest")
    try:
        return _parse(json.loads(text.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _parse(content: Any) -> Manifest:
    if not isinstance(content, dict):
        raise ValueError(f"a JSON object was expected, found {type(content).__name__}.")
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"format_version is {content.get('format_version')!r}, this release reads {FORMAT_VERSION}. "
            f"Upgrade accelight."
        )
    if unknown := set(content) - _KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)}; known are {sorted(_KEYS)}.")
    return Manifest(content.get("model_prefix", ""), content.get("ties", {}), content.get("module_attribute"))
