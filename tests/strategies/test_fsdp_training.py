"""Training under `AccelFSDPStrategy` equals a plain single-process loop over the same global batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, assert_same, train_plain, train_sharded

BLOCKS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, **BLOCKS},
    "fsdp1_orig_params": {"fsdp_version": 1, "use_orig_params": True, **BLOCKS},
    "fsdp2": {"fsdp_version": 2, **BLOCKS},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(accumulate=3),
        Case(accumulate=3, clip_norm=0.5),
        Case(accumulate=3, clip_value=0.05),
        Case(accumulate=2, clip_norm=0.5, optimizer="adamw"),
    ],
    ids=["plain", "accumulate", "accumulate_clip_norm", "accumulate_clip_value", "adamw"],
)
def test_two_processes_equal_one(engine: str, case: Case) -> None:
    outcomes = run_on_ranks(2, train_sharded, case, ENGINES[engine])
    expected = train_plain(case, 2)
    assert expected.global_step == case.epochs * -(-7 // case.accumulate)
    assert_same(outcomes[0], expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes_equal_one_process(engine: str, world_size: int) -> None:
    case = Case(accumulate=3, clip_norm=0.5)
    outcomes = run_on_ranks(world_size, train_sharded, case, ENGINES[engine])
    assert_same(outcomes[0], train_plain(case, world_size))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("offload", [False, True])
def test_gpus_equal_one_cpu_process(engine: str, offload: bool) -> None:
    case, world_size = Case(accumulate=3, clip_norm=0.5), torch.cuda.device_count()
    options = {**ENGINES[engine], "cpu_offload": offload}
    outcomes = run_on_ranks(world_size, train_sharded, case, options, "gpu", init_group=False, timeout_s=240)
    # A GPU sums in another order than a CPU, through 14 micro-batches.
    assert_same(outcomes[0], train_plain(case, world_size), rtol=1e-4, atol=1e-5)
