"""Strategies for Lightning's Trainer. Importing this makes their names known to ``Trainer(strategy="...")``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy_names import lazy_names
from .registration import register_strategies

if TYPE_CHECKING:
    from .deepspeed import (
        AccelDeepSpeedStrategy,
        DeepSpeedPlugin,
        DummyOptim,
        DummyScheduler,
        HfDeepSpeedConfig,
        get_active_deepspeed_plugin,
    )
    from .fsdp import AccelFSDPStrategy, FullyShardedDataParallelPlugin
    from .loading import load_from_checkpoint
    from .newest import newest_checkpoint
    from .unwrapping import unwrap_model

__all__ = [
    "AccelDeepSpeedStrategy",
    "AccelFSDPStrategy",
    "DeepSpeedPlugin",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
    "load_from_checkpoint",
    "newest_checkpoint",
    "unwrap_model",
]

_HOMES = {  # the plugins must import without Lightning, so each name comes when it is asked for
    "AccelDeepSpeedStrategy": ".deepspeed",
    "AccelFSDPStrategy": ".fsdp",
    "DeepSpeedPlugin": ".deepspeed",
    "DummyOptim": ".deepspeed",
    "DummyScheduler": ".deepspeed",
    "FullyShardedDataParallelPlugin": ".fsdp",
    "HfDeepSpeedConfig": ".deepspeed",
    "get_active_deepspeed_plugin": ".deepspeed",
    "load_from_checkpoint": ".loading",
    "newest_checkpoint": ".newest",
    "unwrap_model": ".unwrapping",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)


register_strategies()
