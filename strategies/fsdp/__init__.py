"""Fully sharded training: `AccelFSDPStrategy` and its plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.config import lazy_names

if TYPE_CHECKING:
    from .fsdp2 import fsdp2_prepare_model
    from .plugin import (
        FullyShardedDataParallelPlugin,
        disable_fsdp_ram_efficient_loading,
        enable_fsdp_ram_efficient_loading,
    )
    from .settings import fsdp2_prepare_auto_wrap_policy
    from .sharded_model import fsdp2_switch_optimizer_parameters, map_parameters, parameters_by_name
    from .strategy import AccelFSDPStrategy
    from .weights import fsdp2_load_full_state_dict, fsdp2_load_safetensors

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
    "FullyShardedDataParallelPlugin": ".plugin",
    "disable_fsdp_ram_efficient_loading": ".settings",
    "enable_fsdp_ram_efficient_loading": ".settings",
    "fsdp2_load_full_state_dict": ".weights",
    "fsdp2_load_safetensors": ".weights",
    "fsdp2_prepare_auto_wrap_policy": ".settings",
    "fsdp2_prepare_model": ".fsdp2",
    "fsdp2_switch_optimizer_parameters": ".sharded_model",
    "map_parameters": ".sharded_model",
    "parameters_by_name": ".sharded_model",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
