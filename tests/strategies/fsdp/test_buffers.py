"""Buffers that differ between ranks: a checkpoint has rank 0's, whatever its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader
from torchmetrics.aggregation import SumMetric

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

NUM_RANKS = 3


class Module(TinyModule):
    """BatchNorm in two layers, a queue with a pointer as contrastive learning has it, and a metric that is saved."""

    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        norms = (nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.model = nn.Sequential(nn.Linear(5, 6), *norms, nn.Linear(6, 3))  # type: ignore[assignment]
        self.register_buffer("queue", torch.zeros(600, 600))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.sum = SumMetric()
        self.sum.persistent(True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.queue: Tensor
        self.pointer: Tensor
        self.queue += dist.get_rank() + 1
        self.pointer += dist.get_rank() + 1
        self.sum.update(torch.tensor(float(dist.get_rank() + 1)))


def _save(version: int, kind: str, in_background: bool, folder: str) -> dict[str, Any]:
    module = Module()
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type=kind, async_save=in_background)
    world_size = dist.get_world_size()
    trainer = quiet_trainer(strategy, world_size, max_steps=3)
    batches = [[tensor + dist.get_rank() for tensor in batch] for batch in rank_loader(world_size)]
    joined: Any = [[torch.cat([tensor, 2 * tensor]) for tensor in batch] for batch in batches]
    trainer.fit(module, DataLoader(joined, batch_size=None))
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    strategy.wait_for_saves()
    strategy.save_safetensors(f"{folder}/weights.safetensors")
    own = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return {**own, "sum.sum_value": torch.as_tensor(module.sum.sum_value)}


@pytest.mark.parametrize(
    ("version", "kind", "in_background"),
    [
        (1, "sharded_state_dict", False),
        (2, "sharded_state_dict", False),
        (2, "sharded_state_dict", True),
        (1, "full_state_dict", False),
        (2, "full_state_dict", False),
    ],
)
def test_all_buffers_are_rank_zeros(version: int, kind: str, in_background: bool, tmp_path: Path) -> None:
    ranks = run_on_ranks(NUM_RANKS, _save, version, kind, in_background, str(tmp_path))
    names = list(ranks[0])
    assert len(names) == 9
    for name in names:
        if "num_batches" not in name:
            assert not torch.equal(ranks[0][name], ranks[1][name]), name
    path = tmp_path / "last.ckpt"
    if path.is_dir():
        dcp_to_torch_save(path, tmp_path / "whole.pt")
        whole = torch.load(tmp_path / "whole.pt", weights_only=False)
        saved = whole.get("state_dict") or whole["model"]
    else:
        saved = torch.load(path, weights_only=False)["state_dict"]
    merged = load_file(tmp_path / "weights.safetensors")
    for name in names:
        assert torch.equal(saved[name], ranks[0][name]), name
        assert torch.equal(merged[name], ranks[0][name]), name
