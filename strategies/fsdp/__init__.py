"""Fully sharded training: `AccelFSDPStrategy` and its plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_names import lazy_names

if TYPE_CHECKING:
    from .config.plugin import (
        FullyShardedDataParallelPlugin,
        disable_fsdp_ram_efficient_loading,
        enable_fsdp_ram_efficient_loading,
    )
    from .config.wrapping import fsdp2_prepare_auto_wrap_policy
    from .prepare import fsdp2_prepare_model
    from .strategy import AccelFSDPStrategy
    from .units.optimizer_parameters import fsdp2_switch_optimizer_parameters, map_parameters, parameters_by_name
    from .weights.full_state_dict import fsdp2_load_full_state_dict
    from .weights.safetensors_loading import fsdp2_load_safetensors

__all__ = [
    "AccelFSDPStrategy",
    "FullyShardedDataParallelPlugin",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "fsdp2_load_full_state_dict",
    "fsdp2_load_safetensors",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "map_parameters",
    "parameters_by_name",
]

_HOMES = {  # the plugin must import without Lightning, so each name comes when it is asked for
    "AccelFSDPStrategy": ".strategy",
    "FullyShardedDataParallelPlugin": ".config.plugin",
    "disable_fsdp_ram_efficient_loading": ".config.environment",
    "enable_fsdp_ram_efficient_loading": ".config.environment",
    "fsdp2_load_full_state_dict": ".weights.full_state_dict",
    "fsdp2_load_safetensors": ".weights.safetensors_loading",
    "fsdp2_prepare_auto_wrap_policy": ".config.wrapping",
    "fsdp2_prepare_model": ".prepare",
    "fsdp2_switch_optimizer_parameters": ".units.optimizer_parameters",
    "map_parameters": ".units.optimizer_parameters",
    "parameters_by_name": ".units.optimizer_parameters",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
