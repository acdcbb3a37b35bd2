"""Hugging Face's index of a model that is split over several files: ``model.safetensors.index.json`` and the like."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import CheckpointError
from ..files import is_regular, read_regular

_MAX_INDEX_BYTES = 256 * 2**20


def read_weight_map(path: Path) -> dict[str, str]:
    """Return each tensor's file, by the tensor's name, as an index says; the files' names are not checked.

    Raises:
        CheckpointError: If it is not an index.
    """
    if not is_regular(path):
        raise CheckpointError(f"{path} is not there, and an index of files is wanted.")
    text = read_regular(path, _MAX_INDEX_BYTES, "an index")
    try:
        weight_map = json.loads(text.decode("utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(one, str) for one in weight_map.values()):
            raise TypeError("weight_map must map names to files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of files ({error}).") from error
    return weight_map
