"""Splitting the output over files, as Hugging Face does.

Source: huggingface_hub 2.4 ``serialization/_base.py`` (``split_state_dict_into_shards_factory``); accelerate 1.15
``Accelerator.save_model`` for the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")


def parse_size(size: str | int) -> int:
    """Return the bytes of ``"5GB"`` (10**9, as Hugging Face counts), ``"5GiB"`` or a number.

    Raises:
        ValueError: If it is neither, or less than one byte.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size.strip().upper()) if isinstance(size, str) else None
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"A size is a number of bytes or text like '5GB', '500MB' or '2GiB', got {size!r}.")
        num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes < 1:
        raise ValueError(f"A size must be at least one byte, got {size!r}.")
    return num_bytes


def split(sizes: Mapping[str, int], max_shard_bytes: int | None) -> list[list[str]]:
    """Return the names of each file: filled in the given order; a tensor above the limit has a file of its own."""
    if max_shard_bytes is None:
        return [list(sizes)]
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, size in sizes.items():
        if size > max_shard_bytes:
            shards.append([name])
            continue
        if current_bytes + size > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size
    if current:
        shards.append(current)
    return shards


def file_names(count: int, stem: str, suffix: str) -> list[str]:
    """Return ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def index_bytes(file_of: Mapping[str, str], total_size: int) -> bytes:
    """Return the content of the index that names each tensor's file."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(file_of)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
