"""Rounds in a store: everybody gets the same messages, whoever is ahead, and asks the store once."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from accelight.state.triggers import Rounds


class CountingStore:
    """A store that counts what one process asks of it."""

    def __init__(self, store: Store) -> None:
        self._store, self.calls = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self._store, name)(*args)

        return call


def rounds(store: Any, num_processes: int, rounds_in_key: int | None = None, timeout_s: float = 20.0) -> Rounds:
    return Rounds(store, "check", num_processes, lambda: timeout_s, rounds_in_key)


@settings(max_examples=40, deadline=None)
@given(
    told=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4),
    forgotten=st.sets(st.integers(1, 9)),
    rounds_in_key=st.sampled_from([2, 4, None]),
)
def test_all_learn_what_was_told_in_the_round_before(
    told: list[list[bool]], forgotten: set[int], rounds_in_key: int | None
) -> None:
    """``forgotten`` are rounds whose messages nobody asks for, as after a reset."""
    store = HashStore()
    heard: list[dict[int, list[Any]]] = [{} for _ in told]

    def live(rank: int) -> None:
        own = rounds(store, len(told), rounds_in_key)
        for number, tells in enumerate(told[rank], start=1):
            own.join([rank, number] if tells else None)
            if number > 1 and number - 1 not in forgotten:
                heard[rank][number - 1] = sorted(own.messages(number - 1))
        assert own.number == 9
        heard[rank][9] = sorted(own.messages(9))  # as a blocking check does

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(len(told))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = {
        number: [[rank, number] for rank, tells in enumerate(told) if tells[number - 1]]
        for number in range(1, 10)
        if number == 9 or number not in forgotten
    }
    assert heard == [expected] * len(told)


def test_a_round_in_which_nobody_waits_asks_the_store_once() -> None:
    store = HashStore()
    counted = [CountingStore(store) for _ in range(3)]
    sides = [rounds(one, 3) for one in counted]
    for number in range(1, 101):
        for side in sides:
            side.join()
            if number > 1:
                assert side.messages(number - 1) == []
    assert [one.calls for one in counted] == [Counter(add=100)] * 3


def test_after_a_message_rounds_ask_once_again() -> None:
    store = CountingStore(HashStore())
    sides = [rounds(store, 2) for _ in range(2)]
    for number in range(1, 9):
        for rank, side in enumerate(sides):
            side.join("stop" if (rank, number) == (1, 3) else None)
            if number > 1:
                assert side.messages(number - 1) == (["stop"] if number == 4 else [])
        if number == 5:
            store.calls.clear()
    assert store.calls == Counter(add=2 * 3)


def test_counters_that_nobody_needs_are_deleted() -> None:
    store = HashStore()
    sides = [rounds(store, 2, rounds_in_key=2) for _ in range(2)]
    for number in range(1, 21):
        for side in sides:
            side.join()
            if number > 1:
                side.messages(number - 1)
    assert store.num_keys() == 2


def test_who_does_not_come_is_counted() -> None:
    store = HashStore()
    first, second, _ = (rounds(store, 3, timeout_s=0.05) for _ in range(3))
    assert first.num_missing() == 0
    first.join()
    assert first.num_missing() == 2
    second.join()
    assert first.num_missing() == 1
    first.join()
    with pytest.raises(TimeoutError, match=r"2 of 3 processes have reached the previous check after 0.05 s"):
        first.messages(1)
    with pytest.raises(TimeoutError, match=r"2 of 3 processes have reached"):
        first.join()  # two rounds ahead of the third, whose coming could not be told from this one
