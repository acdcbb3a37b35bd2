"""The user's own model inside of what strategies and ``torch.compile`` put around it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .fsdp.units.sharded_root import ShardedRoot

_COMPILED = "_orig_mod"  # where torch keeps what `torch.compile` wraps; importing its class costs seconds


def unwrap_model(model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
    """Return what is inside of the wrappers for training on several processes, such as ``trainer.strategy.model``.

    Those of FSDP1 and of DDP, DeepSpeed's engine, the root that FSDP2's hooks are on. Sharded parameters stay sharded:
    save and merge them, or call the model on every process, to use the weights.

    Args:
        model: The outermost module.
        keep_fp32_wrapper: Takes what Accelerate's callers pass; nothing here wraps a model's outputs.
        keep_torch_compile: Keep the wrapper of ``torch.compile`` where it stands directly around the user's model; one
            around the wrappers for training goes with them.

    Source: accelerate 1.15 ``utils/other.py`` (``extract_model_from_parallel``).
    """
    kept = model
    while (inner := _inside(model)) is not None:
        if not _is_compiled(model):
            kept = inner
        model = inner
    return kept if keep_torch_compile else model


def _is_compiled(model: nn.Module) -> bool:
    return _COMPILED in model._modules


def _inside(model: nn.Module) -> Any:
    """Return the module in a wrapper, or None of what is no wrapper."""
    if _is_compiled(model):
        return model._modules[_COMPILED]
    return model.module if isinstance(model, _wrappers()) else None


def _wrappers() -> tuple[type[nn.Module], ...]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = [DistributedDataParallel, torch.nn.DataParallel, FullyShardedDataParallel, ShardedRoot]
    deepspeed = sys.modules.get("deepspeed")  # else there is no engine
    return (*found, deepspeed.DeepSpeedEngine) if deepspeed is not None else tuple(found)
