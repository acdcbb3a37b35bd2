"""Engines and networks for tests of manual optimization."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.strategies.fsdp.engines import BLOCKS
from tests.strategies.oracle import WIDTH, Block

SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, "use_orig_params": False, **BLOCKS},
    "fsdp1_orig_params": {"fsdp_version": 1, "use_orig_params": True, **BLOCKS},
    "fsdp1_ignored": {"fsdp_version": 1, "ignored_modules": r"critic\.(head|block)", **BLOCKS},
    "fsdp2": {"fsdp_version": 2, **BLOCKS},
    "fsdp2_kept_gathered": {"fsdp_version": 2, "reshard_after_forward": False, **BLOCKS},
    "fsdp2_ignored": {"fsdp_version": 2, "ignored_modules": r"critic\.(head|block)"},
}


class Net(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(num_inputs, WIDTH), Block()
        self.head = nn.Linear(WIDTH, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))
