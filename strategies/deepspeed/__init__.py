"""DeepSpeed: `AccelDeepSpeedStrategy`, its plugin, and what a DeepSpeed config needs in the code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .active import get_active_deepspeed_plugin
    from .config import HfDeepSpeedConfig
    from .dummies import DummyOptim, DummyScheduler
    from .plugin import DeepSpeedPlugin
    from .strategy import AccelDeepSpeedStrategy
    from .wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

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
    "DeepSpeedEngineWrapper": ".wrappers",
    "DeepSpeedOptimizerWrapper": ".wrappers",
    "DeepSpeedPlugin": ".plugin",
    "DeepSpeedSchedulerWrapper": ".wrappers",
    "DummyOptim": ".dummies",
    "DummyScheduler": ".dummies",
    "HfDeepSpeedConfig": ".config",
    "get_active_deepspeed_plugin": ".active",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
