"""``main_process_first`` and ``local_main_process_first``: order, failures, nesting, no collective."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from accelight.state import PartialState, check_trigger, gather, reset_state, set_trigger
from accelight.state.process_group import group_store
from tests.ranks import run_on_ranks


def first(state: PartialState, kind: str, **kwargs: Any) -> AbstractContextManager[None]:
    return state.main_process_first(**kwargs) if kind == "all" else state.local_main_process_first(**kwargs)


def write_then_read(kind: str, folder: str) -> list[str]:
    state, path = PartialState(), Path(folder) / "order"
    with first(state, kind):
        if state.is_main_process:
            time.sleep(0.2)  # the others would be long through, if they did not wait
        with path.open("a") as file:
            file.write(f"{state.process_index}\n")
    state.wait_for_everyone()
    return path.read_text().split()


@pytest.mark.parametrize("kind", ["all", "local"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_main_process_goes_first(kind: str, world_size: int, tmp_path: Path) -> None:
    for order in run_on_ranks(world_size, write_then_read, kind, str(tmp_path)):
        assert order[0] == "0"
        assert sorted(order) == [str(rank) for rank in range(world_size)]


def fail_first(kind: str) -> str:
    state = PartialState()
    told = ""
    try:
        with first(state, kind):
            if state.is_main_process:
                raise FileNotFoundError("no such dataset")
            told = "ran the block"
    except (FileNotFoundError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    with first(state, kind):  # and the next block is in step again
        pass
    return told


@pytest.mark.parametrize("kind", ["all", "local"])
def test_an_exception_in_the_main_process_reaches_the_others(kind: str) -> None:
    told = run_on_ranks(3, fail_first, kind, timeout_s=20)
    assert told[0] == "FileNotFoundError: no such dataset"
    expected = "process 0 raised FileNotFoundError in the block that it runs first: no such dataset"
    assert told[1] == told[2] == f"RuntimeError: Cannot continue: {expected}"


def communicate_first(call: str) -> str:
    state = PartialState()
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: gather(torch.ones(1)),
        "wait_for_everyone": state.wait_for_everyone,
        "check_trigger": check_trigger,
    }
    try:
        with state.main_process_first():
            if state.is_main_process:
                set_trigger()  # waits for nobody
                calls[call]()
    except RuntimeError as error:
        with state.main_process_first():  # the blocks after it work
            return str(error)
    return "passed"


@pytest.mark.parametrize("call", ["gather", "wait_for_everyone", "check_trigger"])
def test_what_needs_all_processes_is_refused_while_they_wait(call: str) -> None:
    first, second = run_on_ranks(2, communicate_first, call, timeout_s=20)
    assert first == (
        f"{call} needs all processes, and the others wait for this one to leave its main_process_first() or "
        "local_main_process_first() block. Call it before or after the block."
    )
    assert second == f"Cannot continue: process 0 raised RuntimeError in the block that it runs first: {first}"


def exit_first() -> str:
    state = PartialState()
    try:
        with state.main_process_first():
            if state.is_main_process:
                raise SystemExit(3)
    except (SystemExit, RuntimeError) as error:
        return str(error)
    return "passed"


def test_leaving_the_program_in_the_block_does_not_hang_the_others() -> None:
    assert "process 0 raised SystemExit" in run_on_ranks(2, exit_first, timeout_s=20)[1]


def wait_longer_than_the_backend() -> None:
    state = PartialState()
    with state.main_process_first():
        if state.is_main_process:
            time.sleep(2.5)
    if state.is_main_process:
        time.sleep(2.5)
    else:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):  # a collective fails in the same time
            dist.all_reduce(torch.zeros(1))
    os._exit(0)  # the broken group allows no orderly end


@pytest.mark.exhaustive
def test_waiting_does_not_run_the_backends_timeout() -> None:
    with pytest.raises(AssertionError, match="died with exit code 0") as failure:
        run_on_ranks(2, wait_longer_than_the_backend, group_timeout_s=1)
    assert "Traceback" not in str(failure.value)


def give_up() -> str:
    state = PartialState()
    try:
        with state.main_process_first(timeout=timedelta(seconds=0.2) if state.process_index == 1 else 60):
            if state.is_main_process:
                while not group_store("test").check(["gave up"]):
                    time.sleep(0.01)
    except TimeoutError as error:
        group_store("test").set("gave up", "yes")
        return str(error)
    with pytest.raises(ValueError, match="timeout must be positive, got 0"), state.main_process_first(timeout=0):
        pass
    return "passed"


def test_timeout_bounds_the_waiting() -> None:
    told = run_on_ranks(3, give_up, timeout_s=20)
    assert told[0] == told[2] == "passed"
    assert told[1].startswith("The first process of 'all' has not left block 1 after 0.2 s")


def nest(folder: str) -> list[str]:
    state, path = PartialState(), Path(folder) / "order"

    def note(what: str) -> None:
        with path.open("a") as file:
            file.write(f"{what}{state.process_index}\n")

    for _ in range(2):
        with state.main_process_first():
            note("outer")
            with state.local_main_process_first():
                note("inner")
                with state.main_process_first():
                    note("innermost")
        state.wait_for_everyone()
    try:
        with state.main_process_first():
            if state.is_main_process:
                raise KeyError("before the inner block")
            with state.main_process_first():
                pass
    except (KeyError, RuntimeError):
        pass
    with state.main_process_first(), state.main_process_first():
        pass
    return path.read_text().split()


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_first_blocks_nest(world_size: int, tmp_path: Path) -> None:
    order = run_on_ranks(world_size, nest, str(tmp_path), timeout_s=20)[0]
    once = 3 * world_size
    for turn in (order[:once], order[once:]):
        assert turn[:3] == ["outer0", "inner0", "innermost0"]
        assert set(turn) == {f"{name}{rank}" for name in ("outer", "inner", "innermost") for rank in range(world_size)}


def use_twice_with_a_reset() -> int:
    store = _get_default_store()
    for _ in range(3):
        state = PartialState()
        with state.main_process_first(), state.local_main_process_first():
            pass
        reset_state()
    dist.barrier()
    return sum(store.check([f"accelight/first/all/{n}"]) for n in range(1, 4))


def test_keys_are_removed_after_use_and_a_reset_state_does_not_find_old_ones() -> None:
    assert run_on_ranks(3, use_twice_with_a_reset) == [0, 0, 0]


def interrupt() -> str:
    state = PartialState()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = group_store("test")
    try:
        with state.main_process_first():
            if state.is_main_process:
                while not store.check(["interrupted"]):
                    time.sleep(0.01)
            else:
                raise AssertionError("must not get here")
    except KeyboardInterrupt:
        store.set("interrupted", "yes")
        return "interrupted"
    return "passed"


def interrupt_the_waiting() -> str:
    if dist.get_rank() == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    return interrupt()


def test_ctrl_c_ends_the_waiting() -> None:
    assert run_on_ranks(2, interrupt_the_waiting, timeout_s=20) == ["passed", "interrupted"]


def die_first() -> None:
    state = PartialState()
    store = group_store("test")
    store.set(f"started {state.process_index}", "")
    with state.main_process_first():
        if state.is_main_process:
            store.wait(["started 1"])  # else the other one fails where it is starting
            os._exit(7)  # as if killed for its memory


def test_a_main_process_that_dies_in_the_block_does_not_hang_the_others() -> None:
    with pytest.raises(AssertionError, match="Lost the process group's store while waiting") as failure:
        run_on_ranks(2, die_first, init_group=False, timeout_s=20)
    assert "rank 0: died with exit code 7" in str(failure.value)
