"""What a fit with DeepSpeed tells of itself at its start."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..common.run_summary import RunSummary
from .config.settings import DeepSpeedSettings
from .engines.library import deepspeed_library
from .engines.partitions import is_partitioned_optimizer, pieces


def summarise_run(
    strategy: str, engine: Any, settings: DeepSpeedSettings, device: torch.device, precision: str
) -> RunSummary:
    """Return what a fit tells.

    Args:
        strategy: Name of its class.
        engine: DeepSpeed's.
        settings: Of the engine.
        device: Of this process.
        precision: The Trainer's.
    """
    whole = sum(_numel(one) for one in engine.module.parameters())
    here = sum(_held(one) for one in engine.module.parameters())
    parts = [f"{whole:,} parameters, {here:,} of them on rank 0"]
    if is_partitioned_optimizer(engine.optimizer):
        stepped = sum(piece.numel for piece in pieces(engine.optimizer))
        parts.append(f"optimizer state of {stepped:,} on rank 0")
    offloads = {"optimizer": settings.offload_optimizer_device, "parameters": settings.offload_param_device}
    return RunSummary(
        strategy=strategy,
        engine=f"ZeRO-{settings.zero_stage} of DeepSpeed {deepspeed_library().__version__}",
        device=device,
        world_size=dist.get_world_size(),
        details=[f"{what} offloaded to {where}" for what, where in offloads.items() if where != "none"],
        parts=parts,
        precision=precision,
        checkpoints="folder of DeepSpeed's",
    )


def _numel(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _held(parameter: nn.Parameter) -> int:
    """Return the number of elements that this process holds at rest, with padding."""
    partition = getattr(parameter, "ds_tensor", None)
    return parameter.numel() if partition is None else int(partition.ds_numel)
