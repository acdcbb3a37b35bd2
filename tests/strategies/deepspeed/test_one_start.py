"""All ranks begin with rank 0's parameters and buffers, with every stage of ZeRO."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from torch import Tensor

from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.strategies.one_start import assert_alike, fit, plain_weights


def _fit(stage: int, where: str, init: bool) -> tuple[dict[str, Tensor], Tensor]:
    module = fit(AccelDeepSpeedStrategy(zero_stage=stage, zero3_init_flag=init), where)
    found = {}
    for name, tensor in module.named_parameters():
        with deepspeed.zero.GatheredParameters([tensor]):
            found[name] = tensor.detach().clone()
    return {**found, **dict(module.named_buffers())}, module.offset.clone()


@pytest.mark.core("init-2", "setup-3", "configure_model-3")
@pytest.mark.parametrize(("stage", "init"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("where", ["init", "setup", "configure_model"])
def test_training_begins_with_rank_zeros_values(where: str, stage: int, init: bool) -> None:
    expected = plain_weights(where)
    outcomes = run_on_ranks(2, _fit, stage, where, init)
    for found, buffer in outcomes:
        assert_alike(found, expected)
        assert torch.equal(buffer, expected["offset"])
