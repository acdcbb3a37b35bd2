"""fp16 with ``cpu_offload=True``: gradients in host memory are divided by a scale that has arrived there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.engine import CPUOffloadGradScaler, CPUOffloadShardedGradScaler
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


def _train(engine: str, offload: bool) -> tuple[str, float, list[float], dict[str, Tensor]]:
    strategy = AccelFSDPStrategy(state_dict_type="full_state_dict", cpu_offload=offload, **ENGINES[engine])
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=2, precision="16-mixed")
    module = TinyModule(Case(), Outcome())
    trainer.fit(module, rank_loader(dist.get_world_size()))
    scaler: Any = strategy.precision_plugin.scaler
    return type(scaler).__name__, scaler.get_scale(), module.outcome.losses, strategy.lightning_module_state_dict()


@pytest.mark.parametrize("engine", ENGINES)
def test_offloaded_training_is_the_same(engine: str) -> None:
    found, expected = (run_on_ranks(2, _train, engine, offload)[0] for offload in (True, False))
    assert found[0].startswith("CPUOffload")
    assert not expected[0].startswith("CPUOffload")
    assert found[1:3] == expected[1:3]
    assert all(torch.equal(found[3][name], tensor) for name, tensor in expected[3].items())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["CPUOffloadGradScaler", "CPUOffloadShardedGradScaler"])
def test_no_round_divides_by_another_scale(kind: str) -> None:
    """With torch's own, behind work that the device has still to do, the CPU would divide by what lay there before."""
    run_on_ranks(1, _divide, kind, "cuda")


@pytest.mark.parametrize("kind", ["CPUOffloadGradScaler", "CPUOffloadShardedGradScaler"])
def test_the_rounds_on_the_cpu(kind: str) -> None:
    run_on_ranks(1, _divide, kind, "cpu", 20)


def _divide(name: str, device: str, num_rounds: int = 2000) -> None:
    kinds: dict[str, Any] = {
        "CPUOffloadGradScaler": CPUOffloadGradScaler,
        "CPUOffloadShardedGradScaler": CPUOffloadShardedGradScaler,
    }
    scaler = kinds[name](device=device, growth_interval=10**6)
    parameter, large = torch.zeros(4, requires_grad=True), torch.rand(500, 500, device=device)
    optimizer = SGD([parameter], lr=0.1)
    for _ in range(num_rounds):
        scaler.scale(torch.ones((), device=device))
        parameter.grad = torch.full((4,), 65536.0)  # the scale that it begins with
        large = large @ large / large.sum()
        scaler.unscale_(optimizer)
        assert torch.equal(parameter.grad, torch.ones(4))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 65536
