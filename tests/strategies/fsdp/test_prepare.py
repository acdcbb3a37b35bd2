"""FSDP2 in a plain loop, without Lightning, against the same loop in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from accelight.strategies.fsdp import (
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    map_parameters,
    parameters_by_name,
)
from accelight.strategies.fsdp.strategy import build_engine
from tests.ranks import run_on_ranks
from tests.scripts import run_script
from tests.strategies.fsdp.plain_loop import accelerator
from tests.strategies.oracle import TinyModel, build_model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(3):
        inputs, targets = torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class WithTable(TinyModel):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((3,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table


def _build() -> nn.Module:
    torch.manual_seed(1)
    return WithTable()


def _train_prepared(ram_efficient: bool, device_mesh: Any, fields: dict[str, Any]) -> list[float]:
    on_meta = ram_efficient and dist.get_rank() != 0
    with torch.device("meta" if on_meta else "cpu"):
        model = _build()
    optimizer, before = _sgd(model), parameters_by_name(model)
    ours = accelerator(device_mesh, cpu_ram_efficient_loading=ram_efficient, **fields)
    assert fsdp2_prepare_model(ours, model) is model
    assert isinstance(model, FSDPModule)
    now = list(model.parameters())
    assert fsdp2_prepare_model(ours, model) is model  # again: nothing to do
    assert all(one is other for one, other in zip(now, model.parameters(), strict=True))
    fsdp2_switch_optimizer_parameters(optimizer, map_parameters(before, model))
    return _train(model, optimizer)


@pytest.mark.parametrize("ram_efficient", [False, True])
@pytest.mark.parametrize(
    ("world_size", "device_mesh", "fields"),
    [
        (2, None, {}),
        (2, None, {"ignored_modules": "embed"}),
        (2, None, {"activation_checkpointing": True}),
        (4, (2, 2), {}),
    ],
)
def test_a_plain_loop_trains_as_one_process(
    ram_efficient: bool, world_size: int, device_mesh: Any, fields: dict[str, Any]
) -> None:
    """pytorch/pytorch#149205, huggingface/accelerate#3930: switched optimizer, and buffers outside the state dict."""
    model = _build()
    expected = _train(model, _sgd(model))
    for losses in run_on_ranks(world_size, _train_prepared, ram_efficient, device_mesh, fields):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_plugin_for_fsdp1_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a plugin with fsdp_version=2, got fsdp_version=1"):
        fsdp2_prepare_model(accelerator(fsdp_version=1), build_model())


def test_without_a_process_group_there_is_nothing_to_shard_over() -> None:
    with pytest.raises(RuntimeError, match="no process group"):
        fsdp2_prepare_model(accelerator(), build_model())


def _refuse(kind: str) -> str:
    model = build_model()
    if kind == "strategy":
        plugin = accelerator().fsdp_plugin
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        build_engine(plugin.settings(), mesh, torch.device("cpu")).prepare(model)
        ours = accelerator()
    else:
        model = model.to("meta")
        ours = accelerator(cpu_ram_efficient_loading=True)
    with pytest.raises(RuntimeError) as caught:
        fsdp2_prepare_model(ours, model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("strategy", "was sharded by AccelFSDPStrategy"), ("meta", "'embed.weight' is on the meta device in the state")],
)
def test_a_model_that_cannot_be_prepared_is_refused(kind: str, message: str) -> None:
    for text in run_on_ranks(2, _refuse, kind):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(text)


@pytest.mark.machines
def test_the_example_reads_again_what_it_trained() -> None:
    example = Path(__file__).parents[3] / "examples" / "fsdp2_plain_loop.py"
    losses = [line.split(": loss ") for line in run_script(example, launcher="torchrun", nproc=2).lines]
    printed = dict(line for line in losses if len(line) == 2)
    assert list(printed) == ["epoch 0", "epoch 1", "epoch 2", "read again"]
    assert printed["read again"] == printed["epoch 2"] < printed["epoch 0"]
