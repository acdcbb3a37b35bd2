"""Buffers are rank 0's where and when ddp broadcasts them; ddp is the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.buffers import fit, under_ddp

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "manual": {"manual": True},
    "off": {"broadcast_buffers": False},
}


def _compare(version: int, broadcast_buffers: bool = True, manual: bool = False, accumulate: int = 1) -> list[Any]:
    expected = under_ddp(broadcast_buffers, manual, accumulate)
    strategy = AccelFSDPStrategy(fsdp_version=version, broadcast_buffers=broadcast_buffers)
    return [expected, fit(strategy, manual=manual, accumulate=accumulate)]


def _run(version: int, options: dict[str, Any]) -> list[Any]:
    return _compare(version, **options)


@pytest.mark.core("plain-1", "plain-2", "accumulated-2", "manual-1")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_forwards_read_the_buffers_that_they_read_under_ddp(case: str, version: int) -> None:
    outcomes = run_on_ranks(2, _run, version, CASES[case])
    for expected, found in outcomes:
        assert found == pytest.approx(expected, abs=1e-5)
    read = [outcome[1] for outcome in outcomes]
    assert (read[0] == pytest.approx(read[1], abs=1e-5)) is (case == "plain")  # else ranks read their own in between


def _count_broadcasts(version: int) -> list[int]:
    strategy = AccelFSDPStrategy(fsdp_version=version)
    counted: list[int] = []
    original = dist.broadcast

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return original(*args, **kwargs)

    dist.broadcast = broadcast
    try:
        fit(strategy, changes=False)
    finally:
        dist.broadcast = original
    return counted


def test_buffers_that_never_change_are_not_broadcast_in_each_step() -> None:
    """Three kinds: sharding, the fit's start, three forwards, the second epoch, and one or two validations an epoch."""
    for counted in run_on_ranks(2, _count_broadcasts, 2):
        assert len(counted) <= 3 * (1 + 1 + 3 + 1 + 2)
