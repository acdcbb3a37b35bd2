"""What tests marked ``gpu`` run on: all GPUs, or for a try two CPU processes (``ACCELIGHT_TRY_GPU_TESTS=1``).

The try shows that the tests themselves run; of CUDA it shows nothing. Tests that ask for CUDA by name are left out.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

# Asked otherwise whether it is there, CUDA is of no use in processes that are forked afterwards.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
TRIED_ON_CPU = os.environ.get("ACCELIGHT_TRY_GPU_TESTS") == "1" and not torch.cuda.is_available()
ACCELERATOR = "cpu" if TRIED_ON_CPU else "gpu"
NUM_DEVICES = 2 if TRIED_ON_CPU else torch.cuda.device_count()
"""On one GPU FSDP1 shards nothing, and collectives have one rank: kernels, copies and streams are what that proves."""


def share_a_device() -> dict[str, Any]:
    """Make each process of a group a node of its own, on its first device, which is the other's, too.

    gloo alone lets processes share one; of NCCL this shows nothing.

    Returns:
        Settings for the Trainer.
    """
    if ACCELERATOR == "gpu":
        _let_gloo_gather_dtensors()
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank, NODE_RANK=rank)
    return {"accelerator": ACCELERATOR, "devices": 1, "num_nodes": int(os.environ["WORLD_SIZE"])}


@cache
def _let_gloo_gather_dtensors() -> torch.library.Library:
    """Replace torch's functional all-gather: gloo's takes device memory for the host's (2.11), and the process ends."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    library = torch.library.Library("_c10d_functional", "IMPL")

    def all_gather_into_tensor(part: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
        whole = part.new_empty((group_size * part.shape[0], *part.shape[1:]))
        group: Any = resolve(group_name)
        group._allgather_base(whole, part.contiguous()).wait()
        return whole

    library.impl("all_gather_into_tensor", all_gather_into_tensor, "CUDA")
    return library
