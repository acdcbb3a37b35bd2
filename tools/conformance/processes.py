"""Runs Lightning's tests in processes forked from one that has imported everything."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tools.conformance.plugin import ConformancePlugin, Place

_GRACE_S = 10.0
"""How long processes may go on when one of them has failed: what waits for it would wait for ever."""
_START_S = 60.0
"""Added to the limit of a test: starting and collecting."""


@dataclass
class Outcomes:
    """What became of the tests of a run."""

    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """Test, to the line that says why."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """File that cannot be imported, to the line that says why."""

    def add(self, other: Outcomes) -> None:
        """Take in what another part of the same run has found."""
        self.passed |= other.passed
        self.skipped |= other.skipped
        self.failed.update(other.failed)
        self.unreadable.update(other.unreadable)


class TestProcesses:
    """Starts the processes of a test; all are forked from one server, so that torch is imported once."""

    __test__ = False

    def __init__(self, source: Path, *, timeout_s: float, num_jobs: int, preload: Sequence[str] = ()) -> None:
        self._source, self._timeout_s, self._num_jobs = source, timeout_s, num_jobs
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pytest", "lightning.pytorch", "tools.conformance.plugin", *preload])

    def collect(self, paths: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the names of the tests under ``paths``, and the files that cannot be imported."""
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            place = Place("plain", 1, Path(folder) / "0.jsonl")
            self._finish([self._start(place, paths, ["--collect-only"], {}, Path(folder))], timeout_s=600)
            lines = _lines(place.report)
            log = (Path(folder) / "0.log").read_text(errors="replace") if not lines else ""
        if log:
            raise RuntimeError(f"pytest collected nothing of {', '.join(paths)} in {self._source}:\n{log[-4000:]}")
        unreadable = {line["unreadable"]: line["why"] for line in lines if "unreadable" in line}
        return [line["collected"] for line in lines if "collected" in line], unreadable

    def run(self, tests: Iterable[str], kind: str, devices: int, told: Callable[[int], None]) -> Outcomes:
        """Run tests with one kind of strategy.

        One process runs a file from start to end. With several, each test has processes of its own: where one fails,
        another may wait for it for ever, and what comes after must not suffer.

        Args:
            tests: Names from `collect`.
            kind: ``plain``, ``ddp`` or one of ours.
            devices: Number of processes.
            told: Called with the number of tests that have just ended.
        """
        files: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            files[test.partition("::")[0]].append(test)
        batches = list(files.values()) if devices == 1 else [[test] for group in files.values() for test in group]
        found = Outcomes()
        with ThreadPoolExecutor(self._num_jobs) as pool:
            for part in pool.map(lambda batch: self._run_batch(batch, kind, devices), batches):
                found.add(part)
                told(len(part.passed) + len(part.skipped) + len(part.failed))
        return found

    def _run_batch(self, tests: list[str], kind: str, devices: int) -> Outcomes:
        found, left = Outcomes(), tests
        while left:
            part = self._run_once(left, kind, devices)
            ended = part.passed | part.skipped | part.failed.keys()
            left = [test for test in left if test not in ended]
            if left:  # its process died, or was killed because it hung
                part.failed[left[0]] = "hung or killed its process"
                left = left[1:]
            found.add(part)
        return found

    def _run_once(self, tests: Sequence[str], kind: str, devices: int) -> Outcomes:
        with tempfile.TemporaryDirectory(prefix="conformance-") as name:
            folder = Path(name)
            shared = folder if devices > 1 else None
            places = [Place(kind, devices, folder / f"{rank}.jsonl", shared) for rank in range(devices)]
            port = _free_port()
            processes = [
                self._start(place, tests, [], _launcher_variables(rank, devices, port), folder)
                for rank, place in enumerate(places)
            ]
            hung = self._finish(processes, timeout_s=self._timeout_s * len(tests) + _START_S)
            return _join([_lines(place.report) for place in places], hung)

    def _start(
        self, place: Place, tests: Sequence[str], options: Sequence[str], env: dict[str, str], folder: Path
    ) -> BaseProcess:
        base = self._source / "tests" / "tests_pytorch"
        arguments = [f"--rootdir={self._source}", f"--timeout={self._timeout_s:g}", "--timeout-method=signal"]
        arguments += ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", *options, *(f"{base}/{t}" for t in tests)]
        process = self._context.Process(target=_run_pytest, args=(place, arguments, env, str(folder)))
        process.start()
        return process

    @staticmethod
    def _finish(processes: Sequence[BaseProcess], timeout_s: float) -> bool:
        """Wait for the processes of a test, and end those that wait for one which is gone. Return whether all hung."""
        deadline, failed_at = time.monotonic() + timeout_s, float("inf")
        while any(process.is_alive() for process in processes):
            now = time.monotonic()
            if failed_at == float("inf") and any(process.exitcode for process in processes):
                failed_at = now
            if now > deadline or now > failed_at + _GRACE_S:
                break
            time.sleep(0.02)
        hung = all(process.is_alive() for process in processes)
        for process in processes:
            if process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # what a test has started and left as well
            process.join()
        return hung


def _run_pytest(place: Place, arguments: list[str], env: dict[str, str], folder: str) -> None:
    os.setsid()  # a group of its own, which can be ended whole
    os.environ.update(env)
    os.chdir(folder)  # Lightning's default for logs and checkpoints
    log = os.open(place.report.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    import pytest

    status = int(pytest.main(arguments, plugins=[ConformancePlugin(place)]))
    sys.stdout.flush()
    os._exit(status)  # threads of a failed test must not keep the process


def _launcher_variables(rank: int, devices: int, port: int) -> dict[str, str]:
    """Return what torchrun sets; nothing for a process that is alone."""
    if devices == 1:
        return {}
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices, "GROUP_RANK": 0}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "conformance"}
    return {**{name: str(value) for name, value in values.items()}, **address}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _lines(report: Path) -> list[dict[str, Any]]:
    if not report.exists():
        return []
    return [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _outcomes(lines: list[dict[str, Any]]) -> Outcomes:
    found = Outcomes()
    for line in lines:
        if "unreadable" in line:
            found.unreadable[line["unreadable"]] = line["why"]
        if "id" not in line:
            continue
        test = line["id"]
        if line["outcome"] == "failed":
            found.failed.setdefault(test, line["why"])
        elif line["outcome"] == "skipped":
            found.skipped.add(test)
        elif line["when"] == "teardown" and test not in found.skipped and test not in found.failed:
            found.passed.add(test)
    return found


def _join(reports: list[list[dict[str, Any]]], hung: bool) -> Outcomes:
    """Return what became of tests on all processes: they pass where all of them pass.

    Of several failures the first counts: a process that fails tears those down that wait for it.
    """
    ranks = list(map(_outcomes, reports))
    if len(ranks) == 1:
        return ranks[0]
    lines = [{**line, "why": f"process {rank}: {line['why']}"} for rank, lines in enumerate(reports) for line in lines]
    found = _outcomes(sorted(lines, key=lambda line: line["at"]))
    found.passed = set() if hung else set.intersection(*(outcomes.passed for outcomes in ranks))
    found.skipped -= found.passed | found.failed.keys()
    return found
