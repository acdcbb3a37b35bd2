"""A model with everything that is hard to load, and its full state dict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class Process:
    device: torch.device
    is_main_process: bool


def process() -> Process:
    return Process(torch.device("cpu"), dist.get_rank() == 0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)  # persistent buffers, one of them an integer without dimensions
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Model(nn.Module):
    """Tied, ignored, frozen, half precision, one row only (so that most ranks have empty shards), no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.layers[0].requires_grad_(False)
        self.ignored = nn.Linear(3, 2)
        self.low = nn.Parameter(torch.zeros(1, 6, dtype=torch.bfloat16))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def build(device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return Model()


def shard(model: Any, shape: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
    names = ("replicate", "shard") if shape else ("shard",)
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    ignored = set(model.ignored.parameters())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored, **kwargs)
    fully_shard(model, mesh=mesh, ignored_params=ignored, **kwargs)
    return model


def full_dict() -> dict[str, Tensor]:
    torch.manual_seed(5)
    state = build("cpu").state_dict()
    filled = {
        name: torch.randn(value.shape) if value.is_floating_point() else value + 3 for name, value in state.items()
    }
    filled["head.weight"] = filled["embed.weight"]
    return filled


def assert_equals(model: nn.Module, expected: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert set(state) == set(expected)
    for name, value in state.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, expected[name].to(whole.dtype)), name
