"""Sharded checkpoints in, safetensors out: safe reading and a streaming merge, without torch on that path."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .files import CheckpointError, MergeReport
    from .formats.base import CheckpointInfo
    from .locate import inspect_checkpoint
    from .manifest import Manifest, read_manifest, write_manifest
    from .merge import load_state_dict, merge_fsdp_weights
    from .verify import VerifyReport, verify_merged

__all__ = [
    "merge_fsdp_weights",
    "MergeReport",
    "verify_merged",
    "VerifyReport",
    "load_state_dict",
    "inspect_checkpoint",
    "CheckpointInfo",
    "CheckpointError",
    "Manifest",
    "read_manifest",
    "write_manifest",
]

_HOMES = {
    "merge_fsdp_weights": "merge",
    "MergeReport": "files",
    "verify_merged": "verify",
    "VerifyReport": "verify",
    "load_state_dict": "merge",
    "inspect_checkpoint": "locate",
    "CheckpointInfo": "formats.base",
    "CheckpointError": "files",
    "Manifest": "manifest",
    "read_manifest": "manifest",
    "write_manifest": "manifest",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
