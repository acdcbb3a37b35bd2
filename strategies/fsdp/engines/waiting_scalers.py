"""Gradient scalers for fp16 whose gradients lie in host memory (``cpu_offload=True``) while the scale is on a device.

torch's copy the inverse scale to host memory without waiting for it. The CPU may divide by what lay there before, and a
copy that comes late may overwrite what was found out about overflows (github.com/pytorch/pytorch/issues/176429).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override


class WaitingGradScaler(torch.amp.GradScaler):
    """torch's, dividing by a scale that has arrived."""

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *more: Any
    ) -> Any:
        # What starts in host memory is copied to devices in order, and to host memory at once.
        return super()._unscale_grads_(optimizer, inv_scale.cpu(), found_inf.cpu(), *more)


class WaitingShardedGradScaler(ShardedGradScaler):
    """FSDP1's, dividing by a scale that has arrived."""

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *more: Any
    ) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale.cpu(), found_inf.cpu(), *more)
