"""DeepSpeed: `AccelDeepSpeedStrategy`, its plugin, and what a DeepSpeed config needs in the code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
