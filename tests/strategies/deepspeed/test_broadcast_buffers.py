"""Buffers are rank 0's where and when ddp broadcasts them, with every stage of ZeRO; ddp is the reference."""

from __future__ import annotations

import pytest

from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.strategies.buffers import fit, under_ddp


def _compare(stage: int, broadcast_buffers: bool, accumulate: int) -> list[list[float]]:
    expected = under_ddp(broadcast_buffers, False, accumulate)
    return [expected, fit(AccelDeepSpeedStrategy(zero_stage=stage, broadcast_buffers=broadcast_buffers))]


@pytest.mark.core("1-True-2", "1-True-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("accumulate", "broadcast_buffers"), [(1, True), (1, False)])
def test_forwards_read_the_buffers_that_they_read_under_ddp(
    accumulate: int, broadcast_buffers: bool, stage: int
) -> None:
    for expected, found in run_on_ranks(2, _compare, stage, broadcast_buffers, accumulate):
        assert found == pytest.approx(expected, abs=1e-5)
