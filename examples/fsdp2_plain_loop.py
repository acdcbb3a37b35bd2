"""FSDP2 in a plain PyTorch loop, with Accelerate's options: no Trainer.

    torchrun --nproc-per-node 2 examples/fsdp2_plain_loop.py
    torchrun --nproc-per-node 1 examples/fsdp2_plain_loop.py          # the same numbers

Only the main process builds weights; the optimizer, made too early, is switched to the shards; what was trained is
merged into safetensors, from which a second model reads its shards. It runs on the CPU with gloo, and on GPUs where
there are some.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from accelight.checkpoint import merge_fsdp_weights
from accelight.state import PartialState, broadcast_object_list, reduce
from accelight.strategies.fsdp import (
    FullyShardedDataParallelPlugin,
    fsdp2_load_safetensors,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    map_parameters,
    parameters_by_name,
)

GLOBAL_BATCH_SIZE = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


@dataclass
class Accelerator:
    """What the functions ask for; Accelerate's own, or a strategy, would do as well."""

    fsdp_plugin: FullyShardedDataParallelPlugin
    device: torch.device
    is_main_process: bool


def build(on: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(on):
        return nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 1))


def batches(state: PartialState) -> list[tuple[Tensor, Tensor]]:
    """This process's share of each global batch."""
    inputs = torch.randn(10, GLOBAL_BATCH_SIZE, 16, generator=torch.Generator().manual_seed(1))
    mine = inputs[:, state.process_index :: state.num_processes].to(state.device)
    return [(one, one.sum(1, keepdim=True)) for one in mine]


def evaluate(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        loss = torch.stack([F.mse_loss(model(inputs), targets) for inputs, targets in data]).mean()
    return reduce(loss, "mean").item()


def main() -> None:
    state = PartialState()
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True, **wrap)  # type: ignore[arg-type]
    accelerator = Accelerator(plugin, state.device, state.is_main_process)

    model = build("cpu" if state.is_main_process else "meta")
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=0.01), parameters_by_name(model)
    fsdp2_prepare_model(accelerator, model)
    fsdp2_switch_optimizer_parameters(optimizer, map_parameters(before, model))

    data = batches(state)
    for epoch in range(3):
        for inputs, targets in data:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        state.print(f"epoch {epoch}: loss {evaluate(model, data):.4f}")

    folder = [tempfile.mkdtemp() if state.is_main_process else ""]
    broadcast_object_list(folder)
    sharded, merged = Path(folder[0]) / "sharded", Path(folder[0]) / "merged"
    save(get_model_state_dict(model), checkpoint_id=sharded)
    merge_fsdp_weights(sharded, merged)

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)  # type: ignore[arg-type]
    accelerator, again = Accelerator(plugin, state.device, state.is_main_process), build("meta")
    fsdp2_prepare_model(accelerator, again)
    fsdp2_load_safetensors(accelerator, again, merged)
    state.print(f"read again: loss {evaluate(again, data):.4f}")
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(folder[0])
    state.destroy_process_group()


if __name__ == "__main__":
    main()
