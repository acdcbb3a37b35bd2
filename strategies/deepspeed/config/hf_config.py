"""`HfDeepSpeedConfig`: a DeepSpeed config with questions answered by dotted key."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.spelling import source

AUTO = "auto"


class HfDeepSpeedConfig:
    """A copy of a DeepSpeed config, asked and changed by keys such as ``"zero_optimization.stage"``.

    Args:
        config_file_or_dict: Path of a JSON file, a dict, JSON text (plain or in base64), or another config object: one
            of this class, or of Accelerate's or transformers'. What is given is never modified.

    Raises:
        ValueError: If the text is no file and no JSON object, or an object in it has a key twice.
        TypeError: If it is of another type.

    Source: accelerate 1.15 ``utils/deepspeed.py``. Different here: stage and offload are read anew each time, so a
    changed ``config`` never disagrees with them, and `is_true` and `is_false` both deny an open ``"auto"``.
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any] | HfDeepSpeedConfig) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)

    def set_stage_and_offload(self) -> None:
        """Do nothing: `is_zero2`, `is_zero3` and `is_offload` read the config as it is. For callers of Accelerate's."""

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that holds a key (None where there is no such dict), and the key's last part."""
        *sections, ds_key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if not isinstance(node, dict):
                return None, ds_key
        return node, ds_key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` where it is not set."""
        node, ds_key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(ds_key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set a key, making the sections around it where they are missing.

        Raises:
            ValueError: If something that is no section stands in the way.
        """
        *sections, ds_key = ds_key_long.split(".")
        node = self.config
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ValueError(f"{ds_key_long!r} cannot be set: {section!r} is {node!r} in the DeepSpeed config.")
        node[ds_key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a key, with everything below it.

        Args:
            ds_key_long: The key.
            must_exist: Whether it is an error if the key is not there.

        Raises:
            ValueError: If it must exist and does not.
        """
        node, ds_key = self.find_config_node(ds_key_long)
        if node is not None and ds_key in node:
            del node[ds_key]
        elif must_exist:
            raise ValueError(f"There is no {ds_key_long!r} to delete in the DeepSpeed config: {self.config}.")

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key is left open with ``"auto"``."""
        return is_auto_value(self.get_value(ds_key_long))

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is set to something true. Not set and ``"auto"`` are neither true nor false."""
        value = self.get_value(ds_key_long)
        return value is not None and not is_auto_value(value) and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is set to something false. Not set and ``"auto"`` are neither true nor false."""
        value = self.get_value(ds_key_long)
        return value is not None and not is_auto_value(value) and not value

    def is_zero2(self) -> bool:
        """Whether this is ZeRO stage 2."""
        return self.get_value("zero_optimization.stage") == 2

    def is_zero3(self) -> bool:
        """Whether this is ZeRO stage 3."""
        return self.get_value("zero_optimization.stage") == 3

    def is_offload(self) -> bool:
        """Whether stage 2 or 3 moves optimizer state or parameters to the CPU or to NVMe."""
        devices = {self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")}
        return (self.is_zero2() or self.is_zero3()) and bool(devices & {"cpu", "nvme"})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"


def is_auto_value(value: object) -> bool:
    """Whether a value is ``"auto"``: to be filled in by whoever knows it."""
    return isinstance(value, str) and value == AUTO


def _read(given: object) -> dict[str, Any]:
    inner = getattr(given, "config", None)
    if isinstance(inner, Mapping):
        given = inner
    if isinstance(given, Mapping):
        return {name: _copied(value) for name, value in given.items()}
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            "A DeepSpeed config must be a path, a dict, JSON or base64 text or an HfDeepSpeedConfig; "
            f"got {given!r} of type {type(given).__name__}."
        )
    if os.path.exists(given):
        return _parse(Path(given).read_text(encoding="utf-8"), f"the file {os.fspath(given)!r}")
    text = os.fspath(given)
    if text.lstrip().startswith("{"):
        return _parse(text, "the JSON text")
    return _parse(_decoded(text), "the base64 text")


def _copied(value: Any) -> Any:
    """Copy as JSON would: a section that the user has put in two places becomes two, each filled on its own."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else copy.deepcopy(value)


def _decoded(text: str) -> str:
    """Return what ``text`` is in base64, in the alphabet for URLs or the standard one."""
    try:
        return base64.b64decode(text.strip().replace("-", "+").replace("_", "/"), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        raise ValueError(
            f"{source('hf_ds_config', text)}={text!r} is no existing file, no JSON object and no base64 of one. "
            "Give the path of a DeepSpeed config file, a dict, or its JSON."
        ) from None


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"The DeepSpeed config in {source} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"The DeepSpeed config in {source} must be a JSON object, got {config!r}.")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"key(s) given twice in one object: {', '.join(map(repr, twice))}. Keep one of each.")
    return dict(pairs)
