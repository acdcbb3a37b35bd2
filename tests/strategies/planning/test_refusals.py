"""What a plan refuses by name, what it takes all the same, and what it leaves behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.planning import MemoryPlan, PlanningError, plan_memory
from tests.strategies.planning import models

FSDP2 = partial(AccelFSDPStrategy, fsdp_version=2)


def _plan(module: Any, strategy: Any = FSDP2, **more: Any) -> MemoryPlan:
    return plan_memory(module, models.text(4, 32), strategy, **{"world_size": 4, **more})


@pytest.mark.parametrize(
    ("module", "strategy", "match"),
    [
        (
            models.ReadsItsLoss,
            FSDP2,
            r"is read at .*models\.py:\d+ \(return loss \* 2 if loss\.item\(\) > 1 else loss\)",
        ),
        (
            models.PicksTokens,
            FSDP2,
            r"The output size of .* depends on values .*models\.py:\d+ \(return logits\[logits > 0\]",
        ),
        (models.HasAnOperationOfItsOwn, FSDP2, r"planning_tests.*cannot report its output.*register_fake"),
        (models.TwoOptimizers, FSDP2, "optimizes manually with 2 optimizers"),
        (models.LanguageModel, partial(FSDP2, compile=True), "compile decides what is kept"),
        (models.LanguageModel, lambda: "ddp", "not for str"),
        (
            models.LanguageModel,
            partial(
                AccelDeepSpeedStrategy,
                zero_stage=3,
                offload_optimizer_device="nvme",
                offload_optimizer_nvme_path="/nowhere",
            ),
            "NVMe cannot be planned",
        ),
    ],
    ids=["item", "dynamic-size", "own-operation", "two-optimizers", "compile", "other-strategy", "nvme"],
)
def test_what_cannot_be_planned_is_refused_by_name(module: Any, strategy: Any, match: str) -> None:
    with pytest.raises(PlanningError, match=match):
        _plan(module, strategy)


def test_what_depends_on_the_batch_alone_is_planned() -> None:
    assert _plan(models.ReadsItsBatch).peak_bytes < _plan(models.LanguageModel).peak_bytes


@pytest.mark.parametrize("strategy", [FSDP2, partial(AccelDeepSpeedStrategy, zero_stage=3)], ids=["fsdp2", "zero3"])
def test_a_model_built_in_configure_model(strategy: Any) -> None:
    plan = plan_memory(models.BuiltLate, torch.zeros(8, 64), strategy, world_size=2)
    assert plan.num_parameters == 64 * 65
    assert plan.parts["optimizer"] == 0 or strategy is not FSDP2  # plain SGD has none


def test_wrong_numbers_and_a_running_group_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="world_size must be >= 1, got 0"):
        _plan(models.LanguageModel, world_size=0)
    with pytest.raises(ValueError, match="accumulate_grad_batches must be >= 1"):
        _plan(models.LanguageModel, accumulate_grad_batches=0)
    dist.init_process_group("gloo", store=FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="already belongs to a process group"):
        _plan(models.LanguageModel)


def test_nothing_stays_behind() -> None:
    before = torch.Tensor.tolist, torch.UntypedStorage.resize_
    _plan(models.LanguageModel)
    assert (torch.Tensor.tolist, torch.UntypedStorage.resize_) == before
    assert not dist.is_initialized()
    assert torch.randn(3).tolist() != [0.0, 0.0, 0.0]


def test_a_model_far_larger_than_memory_is_planned() -> None:
    """25 billion parameters: 100 GB, of which one process of 64 holds its part."""
    make = partial(models.LanguageModel, width=16384, depth=8)
    units = partial(FSDP2, auto_wrap_policy={models.Block})
    plan = _plan(make, units, world_size=64)
    assert plan.num_parameters > 25e9
    assert plan.parts["optimizer"] == pytest.approx(8 * plan.num_parameters / 64, rel=0.01)
    assert plan.init_peak_bytes > 4 * plan.num_parameters
    assert plan.peak_bytes < 80e9


def test_an_exception_of_the_users_arrives() -> None:
    def fails() -> Any:
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        _plan(fails)
