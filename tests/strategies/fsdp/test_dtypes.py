"""What ``Trainer(precision=...)`` makes of parameters, gradients, their reduction, optimizer states and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EXPECTED: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "32-true": (FP32, FP32),
    "bf16-mixed": (FP32, BF16),
    "16-mixed": (FP32, FP16),
    "bf16-true": (BF16, BF16),
    "16-true": (FP16, FP16),
}
"""Stored (parameters, gradients, optimizer states) and computed (outputs, reductions)."""


class _Reductions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "reduce_scatter" in func.__name__:
            self.dtypes.add(args[1].dtype)
        return func(*args, **(kwargs or {}))


def _train(version: int, precision: Any) -> dict[str, set[torch.dtype]]:
    seen: dict[str, set[torch.dtype]] = {"outputs": set(), "gradients": set()}

    class Loaded(TinyModule):
        def __init__(self) -> None:
            super().__init__(Case(), Outcome())
            self.model.to(BF16)  # as a checkpoint in half precision leaves it

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            output = self.model(batch[0])
            seen["outputs"].add(output.dtype)
            return output.float().square().mean()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            seen["gradients"] |= {p.grad.dtype for p in self.parameters() if p.grad is not None}

    module = Loaded()
    trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=version), 2, max_steps=2, precision=precision)
    with _Reductions() as reductions:
        trainer.fit(module, rank_loader(dist.get_world_size()))
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    return seen | {
        "parameters": {parameter.dtype for parameter in module.parameters()},
        "states": {value.dtype for value in states if isinstance(value, Tensor)},
        "reductions": reductions.dtypes,
    }


@pytest.mark.parametrize("precision", EXPECTED)
@pytest.mark.parametrize("version", [1, 2])
def test_dtypes_of_a_model_that_was_loaded_in_half_precision(version: int, precision: str) -> None:
    """huggingface/accelerate#3979: fp32 masters; Lightning-AI/pytorch-lightning#18717: "true" really stores halves."""
    stored, computed = EXPECTED[precision]
    for dtypes in run_on_ranks(2, _train, version, precision):
        assert dtypes == {
            "parameters": {stored},
            "gradients": {stored},
            "states": {stored},
            "outputs": {computed},
            "reductions": {computed},
        }
