"""Callbacks for Lightning's Trainer: for accelight's strategies, Lightning's ``ddp`` and a single device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exact_evaluation import ExactEvaluation
    from .grad_norm_monitor import GradNormMonitor
    from .merge_sharded_checkpoint import MergeShardedCheckpoint
    from .trigger_early_stopping import TriggerEarlyStopping

__all__ = ["ExactEvaluation", "GradNormMonitor", "MergeShardedCheckpoint", "TriggerEarlyStopping"]

_FILES = {
    "ExactEvaluation": "exact_evaluation",
    "GradNormMonitor": "grad_norm_monitor",
    "MergeShardedCheckpoint": "merge_sharded_checkpoint",
    "TriggerEarlyStopping": "trigger_early_stopping",
}


def __getattr__(name: str) -> Any:  # Lightning takes seconds to import
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_FILES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
