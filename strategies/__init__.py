"""Strategies for Lightning's Trainer. Importing this makes their names known to ``Trainer(strategy="...")``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.config import lazy_names
from .registration import register_strategies

if TYPE_CHECKING:
    from .batch_size import Tuner, find_executable_batch_size
    from .deepspeed import (
        AccelDeepSpeedStrategy,
        DeepSpeedPlugin,
        DummyOptim,
        DummyScheduler,
        HfDeepSpeedConfig,
        get_active_deepspeed_plugin,
    )
    from .fsdp import AccelFSDPStrategy, FullyShardedDataParallelPlugin
    from .loading import load_from_checkpoint, newest_checkpoint, unwrap_model
    from .notebook import notebook_launcher
    from .parallelism.config import ParallelismConfig
    from .ray_train import RayAccelDeepSpeedStrategy as RayAccelDeepSpeedStrategy
    from .ray_train import RayAccelFSDPStrategy as RayAccelFSDPStrategy
    from .ray_train import reported_checkpoint
    from .sharded_tensors.user_code import full_gradients, full_parameters, full_state_dict

__all__ = [
    "AccelDeepSpeedStrategy",
    "AccelFSDPStrategy",
    "DeepSpeedPlugin",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "HfDeepSpeedConfig",
    "ParallelismConfig",
    "Tuner",
    "find_executable_batch_size",
    "full_gradients",
    "full_parameters",
    "full_state_dict",
    "get_active_deepspeed_plugin",
    "load_from_checkpoint",
    "newest_checkpoint",
    "notebook_launcher",
    "reported_checkpoint",
    "unwrap_model",
]  # Ray's strategies are here, too, but `import *` must work without Ray, of whose classes they are made

_HOMES = {  # the plugins must import without Lightning, so each name comes when it is asked for
    "AccelDeepSpeedStrategy": ".deepspeed",
    "AccelFSDPStrategy": ".fsdp",
    "DeepSpeedPlugin": ".deepspeed",
    "DummyOptim": ".deepspeed",
    "DummyScheduler": ".deepspeed",
    "FullyShardedDataParallelPlugin": ".fsdp",
    "HfDeepSpeedConfig": ".deepspeed",
    "ParallelismConfig": ".parallelism.config",
    "Tuner": ".batch_size",
    "find_executable_batch_size": ".batch_size",
    "full_gradients": ".sharded_tensors.user_code",
    "full_parameters": ".sharded_tensors.user_code",
    "full_state_dict": ".sharded_tensors.user_code",
    "get_active_deepspeed_plugin": ".deepspeed",
    "load_from_checkpoint": ".loading",
    "newest_checkpoint": ".loading",
    "notebook_launcher": ".notebook",
    "RayAccelDeepSpeedStrategy": ".ray_train",
    "RayAccelFSDPStrategy": ".ray_train",
    "reported_checkpoint": ".ray_train",
    "unwrap_model": ".loading",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)


register_strategies()
