"""A pytest plugin for Lightning's own test session: a Trainer that names no strategy gets the one that is examined."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

PLAIN, DDP = "plain", "ddp"
OURS: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1},
    # Lightning's tests open checkpoints as files; sharded ones are folders.
    "fsdp2": {"fsdp_version": 2, "state_dict_type": "full_state_dict"},
    "zero2": {"zero_stage": 2},
}
"""Name on the command line, to the arguments of the strategy."""
ROOT = "tests_pytorch/"


@dataclass(frozen=True)
class Place:
    """Where in a test session a process stands."""

    kind: str
    """``plain``, ``ddp`` or one of ours."""
    devices: int
    report: Path
    """JSON lines: one for each phase of a test that ran here."""
    shared: Path | None = None
    """Folder that all processes of a test work in; None where there is one process."""


def make_strategy(kind: str) -> Any:
    """Return what ``Trainer(strategy=...)`` is given, made anew: a strategy belongs to one Trainer."""
    if kind == PLAIN:
        return "auto"
    if kind == DDP:
        return DDP
    if kind.startswith("zero"):
        from accelight.strategies import AccelDeepSpeedStrategy

        return AccelDeepSpeedStrategy(**OURS[kind])
    from accelight.strategies import AccelFSDPStrategy

    return AccelFSDPStrategy(**OURS[kind])


def with_defaults(kind: str, devices: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments with what the test leaves open.

    What it asks for stays: another strategy or accelerator, more devices.
    """
    if arguments.get("accelerator", "auto") not in ("auto", "cpu"):
        return arguments
    filled = {**arguments, "accelerator": "cpu"}
    if arguments.get("devices", "auto") in ("auto", 1):
        filled["devices"] = devices
    if isinstance(arguments.get("strategy", "auto"), str) and arguments.get("strategy", "auto") == "auto":
        filled["strategy"] = make_strategy(kind)
    return filled


def short_id(nodeid: str) -> str:
    """Return a test's name from the folder ``tests_pytorch`` on, wherever pytest has its root."""
    return nodeid.partition(ROOT)[2] or nodeid


class ConformancePlugin:
    """Gives Trainers their strategy, and writes down what became of each test."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._undo: Callable[[], None] = lambda: None

    def pytest_configure(self) -> None:
        """Let every Trainer that is made from here on have the defaults of this session."""
        from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
        from lightning.pytorch import Trainer

        # Lightning's tests wait for this thread after each fit, as long as it sleeps: five seconds.
        _ChildProcessObserver.__init__.__defaults__ = (0.05,)
        original, place = Trainer.__init__, self._place

        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **with_defaults(place.kind, place.devices, kwargs))

        Trainer.__init__ = init  # type: ignore[method-assign]
        self._undo = lambda: setattr(Trainer, "__init__", original)

    def pytest_unconfigure(self) -> None:
        """Give Lightning its Trainer back."""
        self._undo()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the names of the tests that are to run."""
        self._write(*({"collected": short_id(item.nodeid)} for item in session.items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what became of a phase of a test."""
        line = {"id": short_id(report.nodeid), "when": report.when, "outcome": report.outcome}
        self._write({**line, "why": failure_line(report.longreprtext)} if report.failed else line)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write which file cannot be imported."""
        if report.failed:
            self._write({"unreadable": short_id(report.nodeid), "why": failure_line(report.longreprtext)})

    def _write(self, *lines: dict[str, Any]) -> None:
        with self._place.report.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"at": time.time(), "why": "", **line}) + "\n" for line in lines)

    @pytest.fixture(autouse=True)
    def _same_seed_on_all_processes(self) -> None:
        """Start from the same weights: DDP sends those of the first process around, FSDP shards what each one has."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
        """Give the processes of a test one folder, as the machines of a job have one file system."""
        if self._place.shared is None:
            yield tmp_path
            return
        folder = self._place.shared / "tmp_path"
        folder.mkdir(exist_ok=True)
        yield folder


def failure_line(text: str) -> str:
    """Return the line of a pytest report that says what is wrong."""
    errors = [line[1:].strip() for line in text.splitlines() if re.match(r"E\s+\S", line)]
    return (errors[0] if errors else text.strip().rpartition("\n")[2])[:200]
