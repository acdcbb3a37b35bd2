"""DeepSpeed: `AccelDeepSpeedStrategy`, its plugin, and what a DeepSpeed config needs in the code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.config import lazy_names

if TYPE_CHECKING:
    from .ds_config import DummyOptim, DummyScheduler, HfDeepSpeedConfig
    from .plugin import (
        DeepSpeedEngineWrapper,
        DeepSpeedOptimizerWrapper,
        DeepSpeedPlugin,
        DeepSpeedSchedulerWrapper,
        get_active_deepspeed_plugin,
    )
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
    "DeepSpeedEngineWrapper": ".plugin",
    "DeepSpeedOptimizerWrapper": ".plugin",
    "DeepSpeedPlugin": ".plugin",
    "DeepSpeedSchedulerWrapper": ".plugin",
    "DummyOptim": ".ds_config",
    "DummyScheduler": ".ds_config",
    "HfDeepSpeedConfig": ".ds_config",
    "get_active_deepspeed_plugin": ".plugin",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
