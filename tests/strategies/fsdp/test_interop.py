"""Sharded folders of Lightning's own strategies load here, and ours load there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from typing_extensions import override

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, assert_same, quiet_trainer, rank_loader

CASE = Case(accumulate=3, optimizer="adamw")


class LightningFSDPOnCPU(FSDPStrategy):
    """Lightning's FSDPStrategy with nothing changed but the device that torch is told."""

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class ShardsItself(TinyModule):
    """What ModelParallelStrategy wants: a module that applies FSDP2 in configure_model."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self.model, mesh=mesh["data_parallel"])


def _trainer(which: str, epochs: int) -> tuple[Trainer, type[TinyModule]]:
    strategy: Any
    module = TinyModule
    if which == "lightning_fsdp":
        strategy = LightningFSDPOnCPU(state_dict_type="sharded")
    elif which == "lightning_model_parallel":
        strategy, module = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), ShardsItself
    else:
        strategy = AccelFSDPStrategy(state_dict_type="sharded_state_dict", **ENGINES[which])
    return quiet_trainer(strategy, 2, max_epochs=epochs, accumulate_grad_batches=CASE.accumulate), module


def _train(which: str, epochs: int, save_to: str | None, resume_from: str | None) -> Outcome:
    outcome = Outcome()
    trainer, module = _trainer(which, epochs)
    trainer.fit(module(CASE, outcome), rank_loader(2), ckpt_path=resume_from, weights_only=resume_from is not None)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    outcome.global_step = trainer.global_step
    return outcome


@pytest.mark.core("lightning_fsdp-fsdp1", "fsdp2-lightning")
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        ("lightning_fsdp", "fsdp1"),
        ("lightning_fsdp", "fsdp2"),
        ("lightning_model_parallel", "fsdp1"),
        ("lightning_model_parallel", "fsdp2"),
        ("fsdp1", "lightning_fsdp"),
        ("fsdp1_orig_params", "lightning_fsdp"),
        ("fsdp2", "lightning_model_parallel"),
    ],
)
def test_sharded_folders_move_between_lightnings_strategies_and_ours(
    saved_by: str, loaded_by: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    run_on_ranks(2, _train, saved_by, 1, path, None)
    # The oracle is the strategy that saved the folder, resuming from it: the next losses must be the same.
    again = run_on_ranks(2, _train, saved_by, 2, None, path)[0]
    found = run_on_ranks(2, _train, loaded_by, 2, None, path)[0]
    assert len(found.losses) == len(again.losses) == 7
    assert_same(found, again)
