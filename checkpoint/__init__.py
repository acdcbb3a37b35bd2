"""Sharded checkpoints in, safetensors out: safe reading and a streaming merge, without torch on that path."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import CheckpointError
    from .formats.description import CheckpointInfo
    from .inspect import inspect_checkpoint
    from .load import load_state_dict
    from .manifest import Manifest, read_manifest, write_manifest
    from .merge import merge_fsdp_weights
    from .report import MergeReport
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
    "MergeReport": "report",
    "verify_merged": "verify",
    "VerifyReport": "verify",
    "load_state_dict": "load",
    "inspect_checkpoint": "inspect",
    "CheckpointInfo": "formats.description",
    "CheckpointError": "errors",
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
