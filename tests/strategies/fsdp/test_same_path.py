"""Ranks that are about to gather or reduce different units are told apart before they do."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelight.state import rendezvous
from accelight.state.process_group import group_store
from accelight.state.rendezvous import CollectiveOrderChecker
from accelight.strategies.fsdp.step import CollectiveOrder
from tests.ranks import run_on_ranks
from tests.strategies.orders import Fit, Script, run

NAMES = ["", "blocks.0", "blocks.1"]


def _go(path: CollectiveOrder, units: list[int]) -> str:
    """Gather units and end; return what is raised."""
    path.begin("step")
    try:
        for unit in units:
            path.gather(unit)
        path.end()
    except RuntimeError as error:
        path.forget()
        return str(error)
    return ""


def _walk(ways: list[list[list[int]]], timeout_s: float) -> list[str]:
    path = CollectiveOrder(NAMES, timedelta(seconds=timeout_s))
    return [_go(path, way[dist.get_rank() % len(way)]) for way in ways]


def test_what_all_do_is_let_through() -> None:
    """The same way again, another one, and both in turn."""
    ways = [[[0, 1, 2]], [[0, 1, 2]], [[0, 2]], [[0, 1, 2]], [[0, 1]], [[0, 2]]]
    assert run_on_ranks(2, _walk, ways, 20.0) == [[""] * len(ways)] * 2


@pytest.mark.parametrize("before", [[], [[[0, 1]], [[0, 2]]]], ids=["nothing_known", "where_known_ways_part"])
def test_different_units_are_told_on_every_rank(before: list[list[list[int]]]) -> None:
    for *_, error in run_on_ranks(2, _walk, [*before, [[0, 1], [0, 2]]], 20.0):
        assert "process 0 gathers 'blocks.0'; process 1 gathers 'blocks.1'" in error
        assert "find_unused_parameters=True" in error


def test_a_rank_that_leaves_the_known_way_alone_says_so() -> None:
    follows, leaves = run_on_ranks(2, _walk, [[[0, 1, 2]], [[0, 1, 2], [0, 1]]], 1.0)
    assert follows == ["", ""]  # here nothing is gathered; in training it waits for the other, which ends
    assert "Process 1 ends its step now, but process 0 does not" in leaves[1]


def _wait_or_reduce() -> tuple[str, list[int]]:
    """Rank 0 waits for rank 1, which is in a reduction of the user's meanwhile."""
    path = CollectiveOrder(NAMES, timedelta(seconds=1))
    error = _go(path, [1]) if dist.get_rank() == 0 else ""
    values = torch.tensor([3, -4], dtype=torch.int32)
    dist.all_reduce(values)
    return error, values.tolist()


def test_a_reduction_of_the_users_is_not_answered_with_ours() -> None:
    waits, reduces = run_on_ranks(2, _wait_or_reduce)
    assert "Process 0 gathers 'blocks.0' now, but process 1 does not" in waits[0]
    assert waits[1] == reduces[1] == [6, -8]


def _compare_often() -> list[bool]:
    compared = CollectiveOrderChecker("", timedelta(seconds=20))
    for number in range(20):
        compared.compare(f"does {number}")
    dist.barrier()
    store = group_store(f"accelight/compared/{compared.number}")
    return [store.check([f"verdict/{number}"]) for number in range(1, 21)]


def test_the_store_keeps_the_last_verdict_alone() -> None:
    """What each rank said last, and how many came, are one key each."""
    assert run_on_ranks(2, _compare_often) == [[False] * 19 + [True]] * 2


def _fail_and_compare() -> int:
    if dist.get_rank() == 1:  # as after an error between making it and making the next
        next(rendezvous._numbers)
    compared = CollectiveOrderChecker("", timedelta(seconds=5))
    compared.compare("does it")
    return compared.number


def test_ranks_meet_after_one_made_fewer() -> None:
    first, second = run_on_ranks(2, _fail_and_compare)
    assert first == second


def test_both_leave_it_differently() -> None:
    for *_, error in run_on_ranks(2, _walk, [[[0, 1, 2]], [[0, 2], [0]]], 20.0):
        assert "process 0 gathers 'blocks.1'; process 1 ends its step" in error


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_training_refuses_it(kind: str) -> None:
    with pytest.raises(AssertionError, match="2 of 2 ranks failed") as caught:
        run(Script((Fit(),), unused="unit_rank"), kind)
    assert str(caught.value).count("Processes use different parts of the model at the same time: process") >= 2
