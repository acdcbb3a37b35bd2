"""The harness itself: results in rank order, every rank's traceback, a watchdog with stacks, nothing left behind."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import run_on_ranks
from tests.scripts import run_script

ROOT = Path(__file__).parents[1]


def _sum_of_ranks(offset: int) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), total.item()


def _fail_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"told to fail on {dist.get_rank()}")


def _hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def _die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def _leave_a_mess() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)


def _find_a_mess() -> tuple[str | None, torch.dtype]:
    return os.environ.get("LEFT_BEHIND"), torch.get_default_dtype()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(world_size: int) -> None:
    results = run_on_ranks(world_size, _sum_of_ranks, 10)
    assert [rank for rank, _, _ in results] == list(range(world_size))
    assert {total for _, _, total in results} == {float(sum(range(world_size)) + 10 * world_size)}


def test_processes_are_reused() -> None:
    first, second = run_on_ranks(2, _sum_of_ranks, 0), run_on_ranks(2, _sum_of_ranks, 0)
    assert [pid for _, pid, _ in first] == [pid for _, pid, _ in second]


def test_every_failing_rank_is_in_the_message() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)2 of 3 ranks.*rank 0:.*told to fail on 0.*rank 2:.*told to fail on 2"
    ):
        run_on_ranks(3, _fail_on, [0, 2], group_timeout_s=2)


def _hang_without_handlers() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as a Trainer leaves it
    time.sleep(600)


def test_a_hang_after_a_trainer_is_ended_with_stacks() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0: still running.*in _hang_without_handlers"):
        run_on_ranks(1, _hang_without_handlers, timeout_s=1)


def _crash_without_handlers() -> None:
    for number in (signal.SIGSEGV, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # as a Trainer does
    if dist.get_rank() == 0:
        _crash(90)
    time.sleep(600)


def _crash(depth: int) -> None:
    if depth == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    _crash(depth - 1)


def test_a_crash_after_a_trainer_shows_the_stacks_of_all_ranks() -> None:
    with pytest.raises(AssertionError) as failure:
        run_on_ranks(2, _crash_without_handlers, timeout_s=60)
    message = str(failure.value)
    crashed, waits = message.split("rank 1: still running")
    assert all(part in crashed for part in ("Fatal Python error", "Current thread", "in _crash")), message
    assert "in _crash_without_handlers" in waits, message


def test_a_hang_is_ended_with_stacks() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1: still running.*in _hang"):
        run_on_ranks(2, _hang, timeout_s=1)


def test_a_dead_process_is_named() -> None:
    with pytest.raises(AssertionError, match=r"rank 1: died with exit code 7"):
        run_on_ranks(2, _die, group_timeout_s=2, timeout_s=20)


def _read_what_nobody_wrote() -> list[float]:
    torch.use_deterministic_algorithms(False)  # as each Trainer does
    return [torch.empty(3).sum().item(), torch.ones(3).new_empty(2).sum().item()]


def test_memory_that_nobody_wrote_is_nan() -> None:
    assert all(map(math.isnan, run_on_ranks(1, _read_what_nobody_wrote)[0]))


def test_nothing_is_left_for_the_next_test() -> None:
    run_on_ranks(2, _leave_a_mess)
    assert run_on_ranks(2, _find_a_mess) == [(None, torch.float32)] * 2


def test_a_script_reports_its_output_and_status() -> None:
    assert run_script("import sys; print('hello', sys.argv[1])", "world").lines == ["hello world"]
    with pytest.raises(AssertionError, match=r"(?s)exit status \[3\].*bye"):
        run_script("print('bye'); raise SystemExit(3)")


def test_a_hanging_script_shows_its_stacks() -> None:
    with pytest.raises(AssertionError, match=r"(?s)still running after [0-9.]+ s.*in wait_for_ever"):
        run_script("import time\ndef wait_for_ever():\n    time.sleep(600)\nwait_for_ever()", timeout_s=1)


def _gather_on_a_mesh(num_groups_before: int) -> list[float]:
    for _ in range(num_groups_before):  # groups are named by number: those of the mesh get others
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
    whole: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    dist.barrier()
    return whole.tolist()


def test_an_equal_mesh_has_the_groups_of_its_own_test() -> None:
    for num_groups in (3, 0, 5):
        assert run_on_ranks(4, _gather_on_a_mesh, num_groups) == [[0.0, 1.0, 2.0, 3.0]] * 4


_HANGS = """
import os
import time
import pytest
from pathlib import Path
from tests.ranks import run_on_ranks

for process in run_on_ranks(2, os.getpid):  # here no limit is on the start of the processes
    Path(__file__).with_name(str(process)).touch()

@pytest.mark.timeout(10)
def test_that_hangs():
    run_on_ranks(2, time.sleep, 600, timeout_s=500)

def test_after_it():
    assert run_on_ranks(2, int) == [0, 0]
"""


def run_pytest(folder: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", f"-c{ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}"]
    command += ["-ptests.conftest", "-pno:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)


_OF_BOTH_KINDS = """
import pytest

@pytest.mark.exhaustive
def test_of_the_rest(): ...

def test_of_the_core(): ...
"""


def test_the_rest_is_skipped_when_the_minutes_are_over(tmp_path: Path) -> None:
    (tmp_path / "test_both.py").write_text(_OF_BOTH_KINDS)
    done = run_pytest(tmp_path, ACCELIGHT_MINUTES="0")
    assert "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "the 0 minutes of this run are over (ACCELIGHT_MINUTES)" in done.stdout


@pytest.mark.exhaustive
def test_exhaustive_tests_of_two_days_begin_at_different_files(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"test_{number}.py").write_text(_OF_BOTH_KINDS)
    orders = []
    for day in (0, 1):
        began_at = str(day * 86400)
        done = run_pytest(tmp_path, "-v", ACCELIGHT_MINUTES="1", ACCELIGHT_TESTS_BEGAN_AT=began_at)
        assert "10 passed, 10 skipped" in done.stdout, done.stdout + done.stderr
        orders.append(list(dict.fromkeys(re.findall(r"test_\d\.py", done.stdout))))
    assert orders[1] == orders[0][6:] + orders[0][:6]


@pytest.mark.exhaustive
def test_a_test_that_hangs_fails_alone_and_its_processes_end(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(_HANGS)
    done = run_pytest(tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "Timeout (>10.0s)" in done.stdout
    processes = [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]
    assert len(processes) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
