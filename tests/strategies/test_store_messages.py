"""Messages to rank 0 and from it: nobody waits for more, failures reach all, and the store is cleared up."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from accelight.state import store as store_module
from accelight.state.rendezvous import StoreMessages, _Watch, raise_on_all_ranks, store_messages
from tests.ranks import free_port, run_on_ranks


def _talk() -> tuple[list[object], int]:
    messages, rank = store_messages("a test"), dist.get_rank()
    heard: list[object] = []
    before = 0
    for number in range(20):
        heard.append(messages.broadcast_from_rank_zero(lambda number=number: f"{number} of {rank}", "sharing"))  # type: ignore[misc]
        heard.append(messages.gather_then_broadcast(rank + number, lambda ranks: [*reversed(ranks)], "asking"))
        if number == 1:
            dist.barrier()
            before = messages._store.num_keys()
            dist.barrier()
    messages.gather_then_broadcast(None, lambda _: None, "the last")
    dist.barrier()
    return heard, messages._store.num_keys() - before


def test_all_hear_what_rank_zero_makes_of_what_all_say() -> None:
    expected = [word for number in range(20) for word in (f"{number} of 0", [number + 2, number + 1, number])]
    for heard, num_more_keys in run_on_ranks(3, _talk):
        assert heard == expected
        assert num_more_keys <= 0  # however many messages there were


def _say_much(port: int) -> int:
    """Over torch's TCPStore, as launched processes have it: it takes 8 MiB at once."""
    rank = dist.get_rank()
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "group_store", lambda name: PrefixStore(name, store))
        messages = StoreMessages(dist.group.WORLD, "much")  # type: ignore[arg-type]
    own = bytes([rank]) * (9 * 2**20 + rank)
    heard = messages.gather_then_broadcast(own, b"".join, "saying much")
    assert heard == b"".join(bytes([one]) * (9 * 2**20 + one) for one in range(dist.get_world_size()))
    assert messages.gather_then_broadcast(b"", len, "clearing up") == dist.get_world_size()
    dist.barrier()
    num_keys = store.num_keys()
    dist.barrier()
    return num_keys


def test_messages_may_be_of_any_size() -> None:
    assert max(run_on_ranks(2, _say_much, free_port())) <= 3  # the last answer, and what counts


def _refuse(*_: object) -> None:
    raise ValueError("cannot")


def _say(kind: str) -> None:
    messages, rank = store_messages("a test"), dist.get_rank()
    if kind == "sent":
        messages.broadcast_from_rank_zero(_refuse, "sharing")
    elif kind == "asked":
        messages.gather_then_broadcast(rank, _refuse, "sharing")
    elif kind == "unpicklable":
        messages.broadcast_from_rank_zero(lambda: lambda: None, "sharing")
    else:
        with raise_on_all_ranks("sharing", messages):
            if rank:
                _refuse()


def _fail(kind: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        _say(kind)
    assert store_messages("a test").broadcast_from_rank_zero(lambda: "go on", "sharing") == "go on"
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sent", "sharing failed on rank 0: ValueError: cannot"),
        ("asked", "sharing failed on rank 0: ValueError: cannot"),
        ("unpicklable", "sharing failed on rank 0: "),
        ("together", "sharing failed.\nprocesses 1, 2: ValueError: cannot"),
    ],
)
def test_a_failure_reaches_all_and_the_next_message_too(kind: str, words: str) -> None:
    for message in run_on_ranks(3, _fail, kind):
        assert message.startswith(words)


def _end(watched: bool) -> None:
    messages = store_messages("a test")
    if dist.get_rank() == 1:
        os._exit(3)
    messages.gather_then_broadcast(None, lambda _: None, "asking", dist.group.WORLD if watched else None)


@pytest.mark.parametrize(
    ("watched", "words"),
    [
        (True, "asking failed on rank 0: RuntimeError: A process has ended: process 1 did not finish."),
        (False, "asking failed on rank 0: RuntimeError: process 1 did not finish in 3 s."),
    ],
)
def test_the_end_of_a_process_is_told(watched: bool, words: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(3, _end, watched, group_timeout_s=60 if watched else 3)
    report = str(caught.value)
    assert "rank 1: died with exit code 3" in report
    assert report.count(words) == 2


def _end_when_all_is_said() -> int:
    messages = store_messages("a test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Watch, "is_broken", lambda self: True)
        return messages.gather_then_broadcast(dist.get_rank(), len, "asking", dist.group.WORLD)


def test_what_all_have_sent_counts_whoever_ends_afterwards() -> None:
    assert run_on_ranks(1, _end_when_all_is_said) == [1]
