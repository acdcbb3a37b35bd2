"""Elastic jobs under torchrun: workers and agents are killed and come back, and the training is what it would be."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agents import Agents
from tests.callbacks import elastic_worker
from tests.callbacks.elastic import Run, assert_goes_on, train_plain
from tests.scripts import run_script, wait_for

ROOT = Path(__file__).parents[2]


def _job(folder: Path, engine: str, nnodes: str, plan: dict[str, list[Any]]) -> Agents:
    script = [str(Path(elastic_worker.__file__)), engine, str(folder), json.dumps(plan)]
    return Agents(folder, script, nnodes, {"PYTHONPATH": f"{ROOT}:{_python_path()}"})


def _python_path() -> str:

    return os.environ.get("PYTHONPATH", "")


def _what_counted(folder: Path) -> Run:
    """Put the runs together: of a step that was done again, what was done last."""
    run = Run()
    runs = [json.loads((folder / f"run{number}").read_text()) for number in range(1, 1 + _num_runs(folder))]
    for number, (_, first_step) in enumerate(runs, 1):
        found: dict[int, list[int]] = {}
        for path in folder.glob(f"used-{number}-*"):
            for step, samples in json.loads(path.read_text()).items():
                found[int(step)] = sorted([*found.get(int(step), []), *samples])
        assert min(found, default=first_step) == first_step  # it goes on where its checkpoint was
        run.used = {**{step: used for step, used in run.used.items() if step < first_step}, **found}
    run.weights, run.global_step, run.epoch = torch.load(folder / "weights.pt")
    return run


def _num_runs(folder: Path) -> int:
    return len(list(folder.glob("run*")))


def _sizes(folder: Path) -> list[int]:
    return [json.loads((folder / f"run{number}").read_text())[0] for number in range(1, 1 + _num_runs(folder))]


def _assert_as_if_nothing_had_been(folder: Path, engine: str) -> None:
    expected = train_plain(engine)
    found = _what_counted(folder)
    found.rates = expected.rates
    assert_goes_on(found, expected)


@pytest.mark.machines
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero2"])
def test_an_agent_is_killed_and_another_comes(engine: str, tmp_path: Path) -> None:
    """2 -> 1 -> 2 processes: the job goes on alone in its first epoch, and together in the second."""
    with _job(tmp_path, engine, "1:2", {"1": ["agent", 2], "2": ["joined", 4]}) as agents:
        agents.start(2)
        wait_for(lambda: (tmp_path / "alone").exists() or agents.processes[0].poll() is not None)
        agents.start()
        assert agents.wait() == [0, -signal.SIGKILL, 0], agents.output
    assert _sizes(tmp_path) == [2, 1, 2]
    _assert_as_if_nothing_had_been(tmp_path, engine)


@pytest.mark.machines
@pytest.mark.parametrize("engine", ["fsdp2", "zero3", "fsdp1"])
def test_four_processes_become_three(engine: str, tmp_path: Path) -> None:
    with _job(tmp_path, engine, "3:4", {"1": ["agent", 2]}) as agents:
        agents.start(4)
        statuses = agents.wait()
        assert sorted(statuses) == [-signal.SIGKILL, 0, 0, 0], agents.output
    assert _sizes(tmp_path) == [4, 3]
    _assert_as_if_nothing_had_been(tmp_path, engine)


@pytest.mark.machines
@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_a_worker_is_killed(engine: str, tmp_path: Path) -> None:
    """Its agent starts it again, and the others start theirs: as many processes as before, twice."""
    with _job(tmp_path, engine, "1:2", {"1": ["worker", 2], "2": ["worker", 5]}) as agents:
        agents.start(2)
        assert agents.wait() == [0, 0], agents.output
    assert _sizes(tmp_path) == [2, 2, 2]
    _assert_as_if_nothing_had_been(tmp_path, engine)


@pytest.mark.machines
def test_the_example_ends_alike_on_one_two_and_three_processes(tmp_path: Path) -> None:
    """Also when a run of two epochs goes on as one of three, with another number of processes."""
    example, ends = ROOT / "examples" / "elastic.py", set()
    for devices, first in ((1, None), (2, None), (3, "2"), (2, "1")):
        output = tmp_path / f"{devices}{first}"
        if first is not None:
            run_script(example, "--devices", first, "--epochs", "2", "--output", str(output))
        found = run_script(example, "--devices", f"{devices}", "--output", str(output)).output
        ends |= set(re.findall(r"step 126, sum of squared weights \d+\.\d{4}", found))
    assert len(ends) == 1
