"""Checkpoints as torch, Accelerate and Lightning save them; functions for real gloo processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

CPU = torch.device("cpu")


class Block(nn.Module):
    """Uneven sizes, a buffer, a scalar parameter's worth of everything that is sharded in its own way."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)  # float and int buffers
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, width: int = 7, depth: int = 2):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wrapped(nn.Module):
    """As a LightningModule holds its model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def make(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def full_state_dict(kind: type[nn.Module] = Net) -> dict[str, torch.Tensor]:
    return make(kind).state_dict()


def _hsdp_mesh() -> DeviceMesh:
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def fsdp1(module: nn.Module, *, use_orig_params: bool = True, hsdp: bool = False) -> FullyShardedDataParallel:
    mesh = _hsdp_mesh() if hsdp else None
    return FullyShardedDataParallel(
        module,
        device_id=CPU,
        use_orig_params=use_orig_params,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hsdp else ShardingStrategy.FULL_SHARD,
        device_mesh=mesh,
    )


def fsdp2(module: nn.Module, *, hsdp: bool = False) -> nn.Module:
    mesh = _hsdp_mesh() if hsdp else init_device_mesh("cpu", (dist.get_world_size(),))
    for part in module.modules():
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def step(module: nn.Module) -> torch.optim.Optimizer:
    """Make optimizer state without changing the weights."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    module(torch.arange(6)).sum().backward()
    optimizer.step()
    return optimizer


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """Save with DCP, without its remarks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, storage_writer=FileSystemWriter(folder, **options))
    return folder


def save_engine(folder: str, engine: str, hsdp: bool, use_orig_params: bool) -> None:
    """Save as our strategies do: FSDP1 under ``model``, FSDP2 under ``state_dict``, optimizers beside."""
    module = make()
    sharded = (
        fsdp1(module, use_orig_params=use_orig_params, hsdp=hsdp) if engine == "fsdp1" else fsdp2(module, hsdp=hsdp)
    )
    sharded.eval()  # batch norm would change its buffers
    model_state, optimizer_state = get_state_dict(sharded, step(sharded))
    save(Path(folder), {"model" if engine == "fsdp1" else "state_dict": model_state, "optimizer_0": optimizer_state})


def save_accelerate(folder: str, fsdp_version: int) -> None:
    """Save with Accelerate's own functions."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    state = PartialState(cpu=True)
    try:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp_version, state_dict_type="SHARDED_STATE_DICT")
        model = fsdp1(make()) if fsdp_version == 1 else fsdp2(make())
        optimizer = step(model.eval())
        accelerator = SimpleNamespace(
            process_index=dist.get_rank(), num_processes=dist.get_world_size(), is_fsdp2=fsdp_version == 2
        )
        save_fsdp_model(plugin, accelerator, model, folder)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    finally:
        state._reset_state()


def save_lightning_fsdp(folder: str) -> None:
    """Save with Lightning's FSDPStrategy."""
    from lightning.pytorch.strategies import FSDPStrategy

    model = fsdp1(make(Wrapped)).eval()
    optimizer = step(model)
    strategy: Any = FSDPStrategy(state_dict_type="sharded")
    strategy.set_world_ranks = lambda: None
    strategy.cluster_environment = SimpleNamespace(global_rank=dist.get_rank)
    strategy.model = model
    with FullyShardedDataParallel.state_dict_type(model, _sharded()):
        weights = model.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    strategy.save_checkpoint({"state_dict": weights, "optimizer_states": [states], "epoch": 3}, folder)


def _sharded() -> Any:
    from torch.distributed.fsdp import StateDictType

    return StateDictType.SHARDED_STATE_DICT


def save_lightning_model_parallel(folder: str) -> None:
    """Save with Lightning's ModelParallelStrategy."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    model = fsdp2(make(Wrapped)).eval()
    optimizer = step(model)
    strategy: Any = ModelParallelStrategy(save_distributed_checkpoint=True)
    strategy._model = model
    strategy._lightning_module = model
    checkpoint = {
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [strategy.optimizer_state(optimizer)],
        "epoch": 3,
    }
    strategy.save_checkpoint(checkpoint, folder)


def save_layouts(folder: str, mesh_shape: tuple[int, ...]) -> None:
    """Save one tensor for every way to place it over the mesh."""
    mesh = init_device_mesh("cpu", mesh_shape)
    torch.manual_seed(0)
    state: dict[str, Any] = {}
    for name, tensor in layout_tensors().items():
        placements: list[Any] = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
        for first in placements:
            for second in placements if len(mesh_shape) == 2 else [None]:
                chosen = [first] if second is None else [first, second]
                key = f"{name}.{'.'.join(str(one) for one in chosen)}".replace("(", "").replace(")", "")
                state[key] = distribute_tensor(tensor, mesh, chosen, src_data_rank=None)
    save(Path(folder), {"model": state})


def layout_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "vector": random(13),
        "matrix": random(9, 14),
        "small": random(1, 3).to(torch.bfloat16),
        "conv": random(5, 4, 3, 2),
        "empty": random(0, 4),
    }


def save_full_model_state(folder: str) -> None:
    """Save plain ``get_model_state_dict`` without a key above it, as DCP's tutorial does not but users do."""
    save(Path(folder), get_model_state_dict(fsdp2(make())))
