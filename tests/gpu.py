"""What tests marked ``gpu`` run on: all GPUs, or for a try two CPU processes (``ACCELIGHT_TRY_GPU_TESTS=1``).

The try shows that the tests themselves run; of CUDA it shows nothing. Tests that ask for CUDA by name are left out.
"""

from __future__ import annotations

import os

import torch

# Asked otherwise whether it is there, CUDA is of no use in processes that are forked afterwards.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
TRIED_ON_CPU = os.environ.get("ACCELIGHT_TRY_GPU_TESTS") == "1" and not torch.cuda.is_available()
ACCELERATOR = "cpu" if TRIED_ON_CPU else "gpu"
NUM_DEVICES = 2 if TRIED_ON_CPU else torch.cuda.device_count()
"""On one GPU FSDP1 shards nothing, and collectives have one rank: kernels, copies and streams are what that proves."""
