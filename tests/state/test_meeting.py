"""A call that every process has to make, and one makes alone."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from accelight.state import PartialState
from accelight.state.process_group import group_store
from accelight.state.rendezvous import store_barrier
from tests.ranks import run_on_ranks


def _meet(calls: list[int]) -> list[str]:
    PartialState()
    errors = []
    for _ in range(calls[dist.get_rank()]):
        try:
            store_barrier("saving")
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_all_come() -> None:
    assert run_on_ranks(3, _meet, [4, 4, 4]) == [[""] * 4] * 3


def test_who_comes_alone_is_told_in_time() -> None:
    results = run_on_ranks(3, _meet, [2, 1, 1], group_timeout_s=3)
    assert results[1:] == [[""], [""]]
    assert results[0][0] == ""
    assert "saving was called on process 0 of 3 only: the others did not reach it in 3 s" in results[0][1]


def _meet_alone_first() -> list[str]:
    errors, store = _meet([1, 0]), group_store("test")
    if dist.get_rank() == 0:
        store.set("waited", "")
    store.wait(["waited"], timedelta(seconds=60))
    return errors + _meet([3, 3])


def test_who_came_alone_is_not_there_already_the_next_time() -> None:
    first, second = run_on_ranks(2, _meet_alone_first, group_timeout_s=2)
    assert "on process 0 of 2 only" in first.pop(0)
    assert first == second == [""] * 3
