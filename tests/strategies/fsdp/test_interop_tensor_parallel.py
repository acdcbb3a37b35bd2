"""Folders of Lightning's ``ModelParallelStrategy`` with tensor parallelism load and merge here, and ours load there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typing_extensions import override

from accelight.checkpoint import merge_fsdp_weights, verify_merged
from accelight.strategies import AccelFSDPStrategy, ParallelismConfig, full_state_dict
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.cut_model import Block, Module, loader, plain
from tests.strategies.oracle import quiet_trainer


class CutsAndShards(Module):
    """What ModelParallelStrategy wants: a module that applies both in configure_model."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
        for at in range(2):
            plan |= {f"blocks.{at}.up": ColwiseParallel(), f"blocks.{at}.down": RowwiseParallel()}
        parallelize_module(self.net, mesh["tensor_parallel"], plan)
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self.net, mesh=mesh["data_parallel"])

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: norms of DTensors are partial sums there."""


PLAN = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise", "net.head": "colwise_rep"}


def _train(epochs: int, save_to: str | None, resume_from: str | None, kind: dict[str, Any] | None) -> dict[str, Tensor]:
    """Train under Lightning's strategy if ``kind`` is None, else under ours; return the whole weights."""
    strategy: Any
    module: Module
    size = dist.get_world_size()
    if kind is None:
        strategy, module, tp = ModelParallelStrategy(size // 2, 2), CutsAndShards(), 2
    else:
        options = dict(kind)
        tp = options.pop("tp", 1)
        config = ParallelismConfig(tp_size=tp) if tp > 1 else None
        strategy = AccelFSDPStrategy(
            auto_wrap_policy={Block}, parallelism_config=config, tp_plan=PLAN if tp > 1 else None,
            state_dict_type="sharded_state_dict", **options,
        )  # fmt: skip
        module = Module()
    trainer = quiet_trainer(strategy, size, max_epochs=epochs)
    trainer.fit(module, loader(size // tp), ckpt_path=resume_from, weights_only=resume_from is not None)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    if kind is not None:
        return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}
    state = strategy.lightning_module_state_dict()
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}


OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "the same": (4, {"fsdp_version": 2, "tp": 2}),
    "tp4": (4, {"fsdp_version": 2, "tp": 4}),
    "shard4": (4, {"fsdp_version": 2}),
    "fsdp1": (2, {"fsdp_version": 1}),
    "one process": (1, {"fsdp_version": 2}),
}


@pytest.mark.core("the same")
@pytest.mark.parametrize("name", OURS)
def test_lightnings_folders_load_and_merge_here(name: str, tmp_path: Path) -> None:
    path, expected = str(tmp_path / "theirs"), plain(2)["weights"]
    first = run_on_ranks(4, _train, 1, path, None, None)[0]
    num_ranks, kind = OURS[name]
    for found in run_on_ranks(num_ranks, _train, 2, None, path, kind):
        torch.testing.assert_close(found, dict(expected), rtol=1e-5, atol=1e-6)
    merge_fsdp_weights(path, tmp_path / "merged")
    assert verify_merged(path, tmp_path / "merged").is_equal
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == first.keys()
    assert all(torch.equal(merged[key], one) for key, one in first.items())


def test_our_folders_load_in_lightning(tmp_path: Path) -> None:
    path, expected = str(tmp_path / "ours"), plain(2)["weights"]
    run_on_ranks(4, _train, 1, path, None, {"fsdp_version": 2, "tp": 2})
    for found in run_on_ranks(4, _train, 2, None, path, None):
        torch.testing.assert_close(found, dict(expected), rtol=1e-5, atol=1e-6)
