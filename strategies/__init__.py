"""Strategies for Lightning's Trainer. Importing this makes their names known to ``Trainer(strategy="...")``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

__all__ = [
    "AccelDeepSpeedStrategy",
    "AccelFSDPStrategy",
    "DeepSpeedPlugin",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
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
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_strategies()
