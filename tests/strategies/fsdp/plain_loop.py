"""What a plain loop hands to `fsdp2_prepare_model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelight.strategies.fsdp import FullyShardedDataParallelPlugin


@dataclass
class Accelerator:
    fsdp_plugin: FullyShardedDataParallelPlugin
    is_main_process: bool
    device: torch.device
    device_mesh: Any


def accelerator(device_mesh: Any = None, **fields: Any) -> Accelerator:
    given: dict[str, Any] = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
    }
    plugin = FullyShardedDataParallelPlugin(**given | fields)
    return Accelerator(plugin, dist.is_initialized() and dist.get_rank() == 0, torch.device("cpu"), device_mesh)
