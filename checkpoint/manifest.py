"""``accelight.json``: what a sharded checkpoint's own files do not say, written by the strategies, read by the merge.

No torch: the merge reads it on the fast path.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from .files import CheckpointError, brief, is_regular, read_regular, translate_full_disk
from .object_path import ObjectPath

MANIFEST_NAME = "accelight.json"
FORMAT_VERSION = 2
_FIRST_VERSION = 1  # without digests
_KEYS = {"format_version", "ties", "model_prefix", "module_attribute", "left_out", "adapters", "digests", "crc32"}
_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Adapter:
    """One of PEFT's adapters in the model."""

    config: Mapping[str, Any]
    """The content of ``adapter_config.json``."""
    names: Mapping[str, str]
    """Name in ``adapter_model.safetensors`` to name in the model."""

    def __post_init__(self) -> None:
        pairs = self.names.items() if isinstance(self.names, Mapping) else [(None, None)]
        if not isinstance(self.config, Mapping) or not all(isinstance(one, str) for pair in pairs for one in pair):
            raise ValueError("adapters must have a config and names that map to names.")


@dataclass(frozen=True)
class Manifest:
    """The content of ``accelight.json``."""

    model_prefix: str
    """Key of the saved state dict under which the weights are: ``model``, ``state_dict``, or DeepSpeed's ``module``."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Alias to the fqn whose tensor it shares, both as in the module's ``state_dict()``."""
    module_attribute: str | None = None
    """Attribute under which the LightningModule holds its model, e.g. ``model``; empty if it holds layers itself."""
    digests: Digests = field(default_factory=dict)
    """Of the checkpoint's other files; empty where they are not known."""
    left_out: tuple[str, ...] = ()
    """Parameters of the module that were not saved: frozen ones, where the user asked for that."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """PEFT's, by their names."""

    def left_out_of(self, stored: Container[str]) -> dict[str, str]:
        """Return the parameters that a checkpoint lacks on the user's request, with the reason."""
        reason = "frozen, and not in the checkpoint (saved with save_trainable_only)"
        return {name: reason for name in self.left_out if name not in stored}

    def __post_init__(self) -> None:
        if self.model_prefix not in ("model", "state_dict", "module"):
            raise ValueError(f"model_prefix must be 'model', 'state_dict' or 'module', got {self.model_prefix!r}.")
        if not isinstance(self.module_attribute, str | None):
            raise ValueError(f"module_attribute must be an attribute's name or None, got {self.module_attribute!r}.")
        if not isinstance(self.ties, Mapping):
            raise ValueError(f"ties must map alias to fqn, got {self.ties!r}.")
        if not all(isinstance(name, str) for name in self.left_out):
            raise ValueError(f"left_out must be names, got {brief(self.left_out)}.")
        for alias, fqn in self.ties.items():
            if not (isinstance(alias, str) and isinstance(fqn, str) and alias and fqn):
                raise ValueError(f"ties must map names to names, got {alias!r}: {fqn!r}.")
            if fqn in self.ties:
                raise ValueError(
                    f"{alias!r} is tied to {fqn!r}, which is an alias itself. Name the tensor that is stored."
                )


def write_manifest(
    checkpoint_dir: str | os.PathLike[str],
    *,
    model_prefix: str,
    ties: Mapping[str, str] | None = None,
    module_attribute: str | None = None,
    digests: Digests | None = None,
    left_out: Sequence[str] = (),
    adapters: Mapping[str, Adapter] | None = None,
) -> Path:
    """Write ``accelight.json`` into a checkpoint's folder; one process calls it, after the folder exists.

    Args:
        checkpoint_dir: The folder with ``.metadata``.
        model_prefix: Key of the saved state dict under which the weights are.
        ties: Alias to the fqn of the tensor it shares, without wrapper names.
        module_attribute: Attribute of the LightningModule that is its model, for ``strip_prefix="auto"``; empty if it
            holds layers itself, None if that is not known.
        digests: Of the other files, where they are known.
        left_out: Parameters that were not saved.
        adapters: PEFT's adapters in the model.

    Returns:
        The file's path.
    """
    return save_manifest(
        checkpoint_dir,
        Manifest(model_prefix, dict(ties or {}), module_attribute, digests or {}, tuple(left_out), adapters or {}),
    )


def save_manifest(checkpoint_dir: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Write a manifest as `write_manifest` does; return the file's path."""
    path = Path(checkpoint_dir) / MANIFEST_NAME
    temporary = path.with_name(f".{MANIFEST_NAME}.{os.getpid()}.tmp")
    text = manifest_text(manifest)
    try:
        with translate_full_disk(path, len(text)):
            temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def manifest_text(manifest: Manifest) -> str:
    """Return the content of ``accelight.json``."""
    content: dict[str, object] = {
        "format_version": FORMAT_VERSION if manifest.digests else _FIRST_VERSION,
        "model_prefix": manifest.model_prefix,
        "ties": dict(sorted(manifest.ties.items())),
        "module_attribute": manifest.module_attribute,
    }
    if manifest.left_out:
        content["left_out"] = sorted(manifest.left_out)
    if manifest.adapters:
        content["adapters"] = {name: asdict(adapter) for name, adapter in sorted(manifest.adapters.items())}
    if manifest.digests:
        content["digests"] = {name: manifest.digests[name].to_json() for name in sorted(manifest.digests)}
        content["crc32"] = _own_crc32(content)
    return json.dumps(content, indent=2) + "\n"


GENERATION = re.compile(r"[0-9a-f]{32}")
"""The prefix of the objects of one save, see [Note: generations] in ``storage.py``; a download has it as a folder."""


def description_folder(checkpoint_dir: str | os.PathLike[str]) -> Path:
    """Return the folder of a checkpoint's ``accelight.json`` and ``meta.pt``: as a rule next to ``.metadata``."""
    folder = checkpoint_dir if isinstance(checkpoint_dir, ObjectPath) else Path(checkpoint_dir)
    metadata = folder / ".metadata"
    if (folder / MANIFEST_NAME).is_file() or not metadata.is_file():
        return folder
    inside = [one for one in folder.iterdir() if GENERATION.fullmatch(one.name) and (one / MANIFEST_NAME).is_file()]
    if len(inside) > 1:  # another one is of a save that was killed
        content = read_regular(metadata, 2**31, "a description")
        inside = [one for one in inside if f"{one.name}/".encode() in content]
    return inside[0] if len(inside) == 1 else folder


def read_manifest(checkpoint_dir: str | os.PathLike[str]) -> Manifest | None:
    """Read ``accelight.json``; None where the folder has none.

    Raises:
        CheckpointError: If it is not what `write_manifest` writes.
    """
    path = description_folder(checkpoint_dir) / MANIFEST_NAME
    if not is_regular(path):
        return None
    return parse_manifest(read_regular(path, _MAX_BYTES, "a manifest"), str(path))


def parse_manifest(text: bytes, what: str) -> Manifest:
    """Check the content of ``accelight.json``.

    Args:
        text: All of it.
        what: Names the file in errors.

    Raises:
        CheckpointError: If it is not what `write_manifest` writes.
    """
    try:
        return _parse(json.loads(text.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: {error}") from error


def _parse(content: Any) -> Manifest:
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, found {type(content).__name__}.")
    if content.get("format_version") not in (_FIRST_VERSION, FORMAT_VERSION):
        raise ValueError(
            f"format_version is {brief(content.get('format_version'))}, but this release reads {_FIRST_VERSION} and "
            f"{FORMAT_VERSION}. Upgrade accelight."
        )
    if unknown := set(content) - _KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)}; known keys are {sorted(_KEYS)}.")
    if "crc32" in content and content["crc32"] != (found := _own_crc32(content)):
        raise ValueError(
            f"crc32 is {brief(content['crc32'])}, but the content gives {found!r}: it is damaged. If you edited it, "
            "remove 'crc32'."
        )
    digests = content.get("digests", {})
    if not isinstance(digests, dict):
        raise ValueError(f"digests must map files to digests, got {brief(digests)}.")
    left_out = content.get("left_out", [])
    if not isinstance(left_out, list):
        raise ValueError(f"left_out must list names, got {brief(left_out)}.")
    adapters = content.get("adapters", {})
    if not isinstance(adapters, dict) or not all(
        isinstance(one, dict) and set(one) == {"config", "names"} for one in adapters.values()
    ):
        raise ValueError(f"adapters must map names to config and names, got {brief(adapters)}.")
    return Manifest(
        content.get("model_prefix", ""),
        content.get("ties", {}),
        content.get("module_attribute"),
        {name: FileDigest.from_json(one) for name, one in digests.items()},
        tuple(left_out),
        {str(name): Adapter(**one) for name, one in content.get("adapters", {}).items()},
    )


def _own_crc32(content: Mapping[str, object]) -> str:
    rest = {key: value for key, value in content.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True, separators=(',', ':')).encode()):08x}"


# ------------------------------------------------------------------------------------------------
# Digests in ``accelight.json`` of the other files, which reveal damage since the save.
#
# torch writes a CRC-32 of each tensor's bytes into the zip that it keeps them in, at the zip's end, and never looks at
# it again. So nothing need be computed while a checkpoint is saved: a digest of each zip's end is enough. It says that
# this is the zip that was written, and not one of another save; and the zip says what its bytes are.


_WIDTH = 4
_BLOCK = 2**20


@dataclass(frozen=True)
class FileDigest:
    """One file, as it was written."""

    num_bytes: int
    crc32: int | None = None
    """Of all of its bytes; None for a file of zips."""
    records: bytes = b""
    """CRC-32 of each zip's directory, four bytes each, in the order in which they lie in the file."""

    def __post_init__(self) -> None:
        if type(self.num_bytes) is not int or self.num_bytes < 0 or len(self.records) % _WIDTH:
            raise ValueError(f"a file's digest cannot be {self}.")

    @classmethod
    def of(cls, content: bytes) -> FileDigest:
        """Return the digest of a file with this content."""
        return cls(len(content), zlib.crc32(content))

    @classmethod
    def of_stream(cls, stream: BinaryIO) -> FileDigest:
        """Return the digest of an open file, and go back to its beginning."""
        num_bytes = found = 0
        while block := stream.read(_BLOCK):
            num_bytes += len(block)
            found = zlib.crc32(block, found)
        stream.seek(0)
        return cls(num_bytes, found)

    @classmethod
    def of_records(cls, num_bytes: int, records: list[int]) -> FileDigest:
        """Return the digest of a file with zips that have these digests, in their order."""
        return cls(num_bytes, None, b"".join(one.to_bytes(_WIDTH, "big") for one in records))

    def record(self, number: int) -> int:
        """Return the digest of one zip."""
        return int.from_bytes(self.records[number * _WIDTH : (number + 1) * _WIDTH], "big")

    @property
    def num_records(self) -> int:
        """The number of zips."""
        return len(self.records) // _WIDTH

    def check(self, path: object, content: bytes) -> None:
        """Check the content of a file.

        Raises:
            CheckpointError: If it is another one.
        """
        self.check_size(path, len(content))
        if self.crc32 is not None and (crc32 := zlib.crc32(content)) != self.crc32:
            raise CheckpointError(
                f"{path} is damaged: its CRC-32 is {crc32:08x}, but accelight.json says {self.crc32:08x}. {HINT}"
            )

    def check_size(self, path: object, num_bytes: int) -> None:
        """Check a file's size.

        Raises:
            CheckpointError: If it is another one.
        """
        if num_bytes != self.num_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes, but accelight.json says {self.num_bytes}: it is cut off, or belongs to "
                f"another save. {HINT}"
            )

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        if self.crc32 is not None:
            return {"bytes": self.num_bytes, "crc32": f"{self.crc32:08x}"}
        return {"bytes": self.num_bytes, "records": self.records.hex()}

    @classmethod
    def from_json(cls, content: Any) -> FileDigest:
        """Return what `to_json` made plain.

        Raises:
            ValueError: If it is something else.
        """
        if not isinstance(content, dict) or set(content) not in ({"bytes", "crc32"}, {"bytes", "records"}):
            raise ValueError("a digest needs 'bytes', and 'crc32' or 'records'.")
        crc32, records = content.get("crc32"), content.get("records", "")
        if not isinstance(records, str) or not isinstance(crc32, str | None):
            raise ValueError("a digest's 'crc32' and 'records' are text.")
        return cls(content["bytes"], None if crc32 is None else int(crc32, 16), bytes.fromhex(records))


Digests = Mapping[str, FileDigest]
"""By the file's name in the checkpoint's folder, with slashes."""

HINT = "Use an earlier checkpoint, or copy the file again."


class RecordDigests:
    """The digests of records by their places.

    Args:
        digests: Of the checkpoint's files.
        offsets: Where in each file its records begin, in order.
        what: Names the file that says so, for errors.

    Raises:
        CheckpointError: If a file should have another number of records.
    """

    def __init__(self, digests: Digests, offsets: Mapping[str, Sequence[int]], what: str):
        self._digests = digests
        self._places: dict[str, Sequence[int]] = {}
        for name in offsets:
            digest = digests.get(name)
            if digest is None or digest.crc32 is not None:
                continue
            places = offsets[name]
            if digest.num_records != len(places):
                raise CheckpointError(
                    f"{what} has {len(places)} records in {name!r}, but accelight.json says {digest.num_records}. "
                    f"{HINT}"
                )
            self._places[name] = places

    def of(self, name: str, offset: int) -> int | None:
        """Return the digest of the record at a place; None where it is not known."""
        places = self._places.get(name, ())
        number = bisect_left(places, offset)
        found = number < len(places) and places[number] == offset
        return self._digests[name].record(number) if found else None
