"""Numbers that ranks reduce while they continue: a rank that waits has them, and no other rank waits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accelight.state.collectives import all_reduce_max_async
from tests.ranks import run_on_ranks

WORLD_SIZE = 3


def _only_one_waits() -> list[list[int]]:
    rank = dist.get_rank()
    first = all_reduce_max_async([rank, 10 - rank, 0])
    second = all_reduce_max_async([int(rank == 2)])
    total = torch.tensor(float(rank))
    dist.all_reduce(total)  # what comes in between, and is waited for, keeps its own numbers
    if rank != 1:
        return [[int(total)]]
    return [list(second()), list(first()), list(first()), [int(total)]]


def test_whoever_waits_has_them() -> None:
    found = run_on_ranks(WORLD_SIZE, _only_one_waits)
    assert found == [[[3]], [[1], [2, 10, 0], [2, 10, 0], [3]], [[3]]]


def _goes_on_alone() -> list[int]:
    mine = all_reduce_max_async([dist.get_rank()])
    dist.barrier()
    return list(mine())


def test_a_rank_waits_for_nobody_before_it_asks() -> None:
    assert run_on_ranks(WORLD_SIZE, _goes_on_alone) == [[2]] * WORLD_SIZE


def test_alone() -> None:
    assert list(all_reduce_max_async([3, 0])()) == [3, 0]
