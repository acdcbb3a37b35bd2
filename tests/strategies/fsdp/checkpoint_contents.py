"""What is in a checkpoint, read by other code than that which wrote it, for comparisons."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies.fsdp.checkpoint.writer import METADATA_FILE


def everything_in(path: Path) -> Any:
    """Read a sharded checkpoint, or one in a file, in one process."""
    if path.is_file():
        return torch.load(path, weights_only=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        merge_fsdp_weights(path, scratch, progress=False)
        dcp_to_torch_save(path, scratch / "all.pt")
        return {
            "merged": {name: one.clone() for name, one in load_file(scratch / "model.safetensors").items()},
            "all": torch.load(scratch / "all.pt", weights_only=True),
            "meta": torch.load(path / METADATA_FILE, weights_only=True),
        }


def files_of(path: Path) -> dict[str, Any]:
    """Return everything that a sharded checkpoint's files hold but for the time and place of the save."""
    found: dict[str, Any] = {one.name: one.read_bytes() for one in sorted(path.iterdir())}
    metadata = FileSystemReader(path).read_metadata()
    metadata.storage_meta = None
    found[".metadata"] = pickle.loads(pickle.dumps(metadata))
    manifest = json.loads(found.pop("accelight.json"))
    assert manifest["digests"].pop(".metadata")
    assert manifest.pop("crc32")
    return {**found, "accelight.json": manifest}


def assert_equal(found: Any, expected: Any) -> None:
    """Compare nested states, bit for bit."""
    (found, form), (expected, expected_form) = tree_flatten(found), tree_flatten(expected)
    assert form == expected_form
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other
