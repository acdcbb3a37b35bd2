"""Callbacks for Lightning's Trainer: for accelight's strategies, Lightning's ``ddp`` and a single device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..strategies.common.config import lazy_names

if TYPE_CHECKING:
    from .elastic_training import ElasticTraining
    from .exact_evaluation import ExactEvaluation
    from .grad_norm_monitor import GradNormMonitor
    from .merge_sharded_checkpoint import MergeShardedCheckpoint
    from .ray_report_checkpoint import RayReportCheckpoint
    from .replica_check import ReplicaCheck
    from .sharded_ema import ShardedEMA
    from .step_guard import StepGuard
    from .trigger_early_stopping import TriggerEarlyStopping
    from .watchdog import Watchdog

__all__ = [
    "ElasticTraining",
    "ExactEvaluation",
    "GradNormMonitor",
    "MergeShardedCheckpoint",
    "RayReportCheckpoint",
    "ReplicaCheck",
    "ShardedEMA",
    "StepGuard",
    "TriggerEarlyStopping",
    "Watchdog",
]

_HOMES = {  # Lightning takes seconds to import
    "ElasticTraining": ".elastic_training",
    "ExactEvaluation": ".exact_evaluation",
    "GradNormMonitor": ".grad_norm_monitor",
    "MergeShardedCheckpoint": ".merge_sharded_checkpoint",
    "RayReportCheckpoint": ".ray_report_checkpoint",
    "ReplicaCheck": ".replica_check",
    "ShardedEMA": ".sharded_ema",
    "StepGuard": ".step_guard",
    "TriggerEarlyStopping": ".trigger_early_stopping",
    "Watchdog": ".watchdog",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
