"""DeepSpeed: `AccelDeepSpeedStrategy`, its plugin, and what a DeepSpeed config needs in the code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.active_plugin import get_active_deepspeed_plugin
    from .config.dummies import DummyOptim, DummyScheduler
    from .config.hf_config import HfDeepSpeedConfig
    from .config.plugin import DeepSpeedPlugin
    from .engines.wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
    from .strategy import AccelDeepSpeedStrategy

__all__ = [
    "AccelDeepSpeedStrategy",
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedPlugin",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
]

_HOMES = {  # the plugin must import without Lightning and DeepSpeed, so each name comes when it is asked for
    "AccelDeepSpeedStrategy": ".strategy",
    "DeepSpeedEngineWrapper": ".engines.wrappers",
    "DeepSpeedOptimizerWrapper": ".engines.wrappers",
    "DeepSpeedPlugin": ".config.plugin",
    "DeepSpeedSchedulerWrapper": ".engines.wrappers",
    "DummyOptim": ".config.dummies",
    "DummyScheduler": ".config.dummies",
    "HfDeepSpeedConfig": ".config.hf_config",
    "get_active_deepspeed_plugin": ".config.active_plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
