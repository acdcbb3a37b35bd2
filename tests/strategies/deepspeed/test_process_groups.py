"""A process group that is destroyed and started anew between two Trainers of a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import CONFIGS, trainer_for, whole_weights
from tests.strategies.oracle import Case, Outcome, TinyModule, rank_loader


def _fit(config: str) -> dict[str, Tensor]:
    module = TinyModule(Case(), Outcome())
    trainer_for(Case(), CONFIGS[config]).fit(module, rank_loader(dist.get_world_size()))
    return whole_weights(module)


def _fit_twice(config: str, store: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = _fit(config)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    second = _fit(config)
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


@pytest.mark.core("stage2")
@pytest.mark.parametrize("config", ["stage1", "stage2", "stage3"])
def test_a_fit_after_the_group_was_started_anew_equals_the_first(tmp_path: Path, config: str) -> None:
    """DeepSpeed kept a group of its own, which had gone with the default group."""
    run_on_ranks(2, _fit_twice, config, f"{tmp_path}/store")
