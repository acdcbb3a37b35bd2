"""Triggers: any process sets, all agree on the same check, whoever comes when."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelight.state import (
    AcceleratorState,
    PartialState,
    check_trigger,
    check_triggers,
    reset_state,
    set_trigger,
    triggered_by,
)
from accelight.state import triggers as module
from accelight.state.process_group import group_store
from tests.ranks import run_on_ranks

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3])


def use_them_all() -> dict[str, Any]:
    state, last = PartialState(), PartialState().num_processes - 1
    found: dict[str, Any] = {"unset": check_trigger()}
    if state.is_last_process:
        state.set_trigger()
    found["set"] = [state.check_trigger(), state.check_trigger()]
    set_trigger()
    found["by all"] = [AcceleratorState().check_trigger(), triggered_by()]
    if state.is_last_process:
        AcceleratorState().set_trigger("nan")  # the others have never heard of it
    if state.is_main_process:
        set_trigger("stop")
    found["other"] = check_trigger("other")
    found["kept"] = check_trigger("nan")
    found["together"] = check_triggers()
    found["again"] = AcceleratorState().check_triggers()
    found["setters"] = [triggered_by("nan") == (last,), triggered_by("stop"), triggered_by("other")]
    return found


@WORLD_SIZES
def test_any_process_sets_and_all_know_once(world_size: int) -> None:
    for found in run_on_ranks(world_size, use_them_all):
        assert found["unset"] is False
        assert found["set"] == [True, False]
        assert found["by all"] == [True, tuple(range(world_size))]
        assert (found["other"], found["kept"]) == (False, True)
        names = ["default", "nan", "other", "stop"]
        assert {name: found["together"][name] for name in names} == {
            "default": False, "nan": False, "other": False, "stop": True
        }  # fmt: skip
        assert not any(found["again"].values())
        assert sorted(found["again"]) == names
        assert found["setters"] == [True, (0,), ()]


@WORLD_SIZES
def test_check_triggers_has_the_same_order_everywhere(world_size: int) -> None:
    orders = [list(found["together"]) for found in run_on_ranks(world_size, use_them_all)]
    assert all(order == orders[0] for order in orders)


def check_some(blocking: bool) -> list[Any]:
    if PartialState().is_last_process:
        for name in ("mine", "theirs"):
            set_trigger(name)
    first, second = (check_triggers(blocking, ["mine", "unset"]) for _ in range(2))
    return [first, second, check_trigger("theirs", blocking=False)]


@WORLD_SIZES
@pytest.mark.parametrize("blocking", [True, False])
def test_check_triggers_asks_for_some_and_keeps_the_others(world_size: int, blocking: bool) -> None:
    found, nothing = {"mine": True, "unset": False}, {"mine": False, "unset": False}
    expected = [found, nothing, True] if blocking else [nothing, found, True]
    assert run_on_ranks(world_size, check_some, blocking) == [expected] * world_size


def check_each_step(seed: int) -> tuple[list[Any], list[Any]]:
    """Random steps set triggers; processes come to their checks at very different times, and in no common order."""
    rank, size = PartialState().process_index, PartialState().num_processes
    pace, plan = random.Random(1000 * seed + rank), random.Random(seed)
    answers: list[Any] = []
    expected: list[Any] = [{}]
    for step in range(30):
        setters = {name: plan.randrange(size) for name in ("nan", "stop", "slow") if plan.random() < 0.15}
        for name, setter in setters.items():
            if setter == rank:
                set_trigger(name)
        if pace.random() < 0.3:
            time.sleep(pace.random() * 0.05)
        answers.append({name: triggered_by(name) for name, hit in check_triggers(blocking=False).items() if hit})
        expected.append({name: (setter,) for name, setter in setters.items()})
        if step == 20:  # mixing in a blocking check answers for everything at once
            answers.append({name: triggered_by(name) for name, hit in check_triggers().items() if hit})
            expected.append({})
    return answers, expected[:-1]


@WORLD_SIZES
@pytest.mark.parametrize("seed", [1, 2])
def test_non_blocking_answers_are_those_of_the_previous_check_on_every_process(world_size: int, seed: int) -> None:
    results = run_on_ranks(world_size, check_each_step, seed)
    for answers, expected in results:
        assert answers == expected
    assert any(results[0][0])


def answer_before_the_slow_one() -> list[Any]:
    """Let the last process check only after the others have the answers of the same check."""
    state, store = PartialState(), group_store("test")
    others = [f"answered {rank}" for rank in range(state.num_processes - 1)]
    if state.is_last_process:
        set_trigger()
    found = [check_trigger(blocking=False)]
    if state.is_last_process:
        store.wait(others)
    found.append(check_trigger(blocking=False))
    store.set(f"answered {state.process_index}", "yes")
    return [*found, check_trigger()]


def test_a_non_blocking_check_does_not_wait_for_those_who_are_a_check_behind() -> None:
    assert run_on_ranks(3, answer_before_the_slow_one, timeout_s=40) == [[False, True, False]] * 3


def count_allocations_and_messages() -> tuple[bool, int, int]:
    state = PartialState()
    check_trigger("one")
    set_trigger("two")
    check_triggers()
    channel = module._channel("test")
    assert isinstance(channel, module._Channel)
    buffer = channel._buffer
    reductions = 0
    original = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal reductions
        reductions += 1
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        for name in ("one", "two", "three"):
            if state.is_main_process:
                set_trigger(name)
        check_triggers()
    finally:
        dist.all_reduce = original
    return channel._buffer is buffer and buffer.numel() == 1, buffer.data_ptr(), reductions


def test_one_tensor_is_reused_and_several_names_travel_in_one_reduction() -> None:
    for same, pointer, reductions in run_on_ranks(2, count_allocations_and_messages):
        assert same
        assert pointer
        assert reductions == 1


def check_in_inference_mode_first() -> list[bool]:
    with torch.inference_mode():
        found = [check_trigger("stop")]
    if PartialState().process_index:
        set_trigger("stop")
    return [*found, check_trigger("stop")]


def test_a_first_check_in_inference_mode() -> None:
    assert run_on_ranks(2, check_in_inference_mode_first) == [[False, True]] * 2


def set_nothing_check_nothing() -> int:
    PartialState().wait_for_everyone()
    return len(module._channels)


def test_who_sets_and_checks_nothing_pays_nothing() -> None:
    assert run_on_ranks(2, set_nothing_check_nothing) == [0, 0]


def use_many_names() -> list[str]:
    state, rank = PartialState(), PartialState().process_index
    for number in range(rank, 100 + rank):  # each process knows one that the other does not
        state.set_trigger(f"trigger {number}")
    check_trigger(f"asked for by {rank}")
    return [name for name, hit in check_triggers().items() if hit and triggered_by(name)]


def test_any_number_of_names_and_checks_for_different_ones() -> None:
    [first, second] = run_on_ranks(2, use_many_names)
    assert first == second
    assert sorted(first) == sorted(f"trigger {number}" for number in range(101))


@pytest.mark.parametrize("name", ["", 5, None])
def test_a_name_is_a_non_empty_string(name: Any) -> None:
    for function in (set_trigger, check_trigger):
        with pytest.raises(TypeError, match="name must be a non-empty string"):
            function(name)
    with pytest.raises(TypeError, match="name must be a non-empty string"):
        check_triggers(names=[name])


def forget() -> list[bool]:
    set_trigger("kept")
    check_trigger(blocking=False)
    reset_state()
    return [check_trigger("kept", blocking=False), check_trigger("kept"), triggered_by("kept") != ()]


@WORLD_SIZES
def test_a_reset_forgets_what_was_set(world_size: int) -> None:
    assert run_on_ranks(world_size, forget) == [[False, False, False]] * world_size


def miss_a_check(blocking: bool) -> str:
    state = PartialState()
    if state.is_main_process:
        return "did not check"
    try:
        check_trigger(blocking=blocking)
        check_trigger(blocking=blocking)
    except (RuntimeError, TimeoutError) as error:
        return str(error)
    return "checked"


def check_in_vain(blocking: bool) -> str:
    told = miss_a_check(blocking)
    store = group_store("test")
    if PartialState().is_main_process:
        while not store.check(["told"]):
            time.sleep(0.05)
        time.sleep(0.1)
    else:
        store.set("told", "yes")
    raise AssertionError(f"told: {told}")  # the group is out of step: these processes are thrown away


@pytest.mark.parametrize(
    ("blocking", "message"),
    [(True, "could not agree on triggers"), (False, "1 of 2 processes have reached the previous")],
)
def test_a_missing_process_is_an_error_and_not_a_hang(blocking: bool, message: str) -> None:
    with pytest.raises(AssertionError, match=f"told: .*{message}"):
        run_on_ranks(2, check_in_vain, blocking, group_timeout_s=1, timeout_s=20)


def find_the_group_gone() -> None:
    state = PartialState()
    torch.distributed.barrier()
    state.destroy_process_group()
    with pytest.raises(RuntimeError, match="check_trigger needs the process group, which was destroyed"):
        check_trigger()
    with pytest.raises(RuntimeError, match="set_trigger needs the process group, which was destroyed"):
        set_trigger()


def test_without_its_group_a_check_raises() -> None:
    run_on_ranks(2, find_the_group_gone)
