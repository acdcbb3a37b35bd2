"""Consolidated 16-bit weights of a model that ZeRO-3 has partitioned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from ....checkpoint.disk_space import telling_full_disk
from ...common.torch_files import num_bytes_of
from ..engines.library import deepspeed_library

FILE = "model.safetensors"


def gather_16bit(engine: Any) -> dict[str, Tensor]:
    """Return all weights and buffers in 16 bits on rank 0, nothing elsewhere; every rank must call it.

    One layer after the other is gathered. Weights that compute in fp32 become bf16. A tied weight is there once.
    """
    gathered = deepspeed_library().zero.GatheredParameters
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16
    is_writer, seen, weights = dist.get_rank() == 0, set(), {}
    for prefix, module in engine.module.named_modules():
        parameters = list(module.parameters(recurse=False))
        own = {*(name for name, _ in module.named_parameters(recurse=False))}
        own |= {name for name, _ in module.named_buffers(recurse=False)} - module._non_persistent_buffers_set
        with gathered(parameters, enabled=engine.zero_optimization_partition_weights()):
            for name in sorted(own) if is_writer else ():
                tensor = getattr(module, name)
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    to = dtype if tensor.is_floating_point() else tensor.dtype
                    full = f"{prefix}.{name}" if prefix else name
                    weights[full] = tensor.detach().to("cpu", to, copy=True).contiguous()
    return weights


def write_16bit(weights: dict[str, Tensor], folder: Path) -> None:
    """Write what `gather_16bit` gave rank 0."""
    path = folder / FILE
    with telling_full_disk(path, num_bytes_of(weights)):
        save_file(weights, path, metadata={"format": "pt"})
