"""Run a script for GPUs on CPU processes: ``python without_gpus.py SCRIPT``.

Lightning's `FSDPStrategy` and `DeepSpeedStrategy` refuse the CPU before they train. This leaves out those checks and
names the device; what trains is Lightning's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch import Trainer, strategies
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, deepspeed
from torch.distributed import fsdp


class _TrainerOnCPU(Trainer):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments | {"accelerator": "cpu"})


class _FSDPStrategyOnCPU(FSDPStrategy):
    """A class of its own: Lightning refuses exactly `FSDPStrategy`."""


class _FSDPOnCPU(fsdp.FullyShardedDataParallel):
    """Lightning gives it the index of a GPU."""

    def __init__(self, module: torch.nn.Module, **arguments: Any) -> None:
        super().__init__(module, **arguments | {"device_id": torch.device("cpu")})


class _DeepSpeedStrategyOnCPU(DeepSpeedStrategy):
    root_device = torch.device("cpu", 0)


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    vars(lightning.pytorch)["Trainer"] = _TrainerOnCPU
    vars(strategies).update(FSDPStrategy=_FSDPStrategyOnCPU, DeepSpeedStrategy=_DeepSpeedStrategyOnCPU)
    vars(fsdp)["FullyShardedDataParallel"] = _FSDPOnCPU
    vars(deepspeed)["CUDAAccelerator"] = CPUAccelerator
    vars(deepspeed)["_validate_device_index_selection"] = lambda _: None  # devices of the Trainer have no index
    script = Path(sys.argv[1])
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"))
