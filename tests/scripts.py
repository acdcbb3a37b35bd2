"""Whole scripts as a user starts them: plain processes, ``torchrun``, and ``torchrun`` as two nodes on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.ranks import free_port
from tests.slowness import slowness

Launcher = Literal["python", "torchrun", "two_nodes", "by_hand"]

LAUNCHER_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
}
"""Set by a launcher that runs the tests themselves (or left by one): a started script must not inherit them."""


@dataclass(frozen=True)
class ScriptResult:
    """What a script left: the exit status of each started command and all that was printed."""

    returncodes: list[int]
    output: str

    @property
    def lines(self) -> list[str]:
        """The printed lines, stripped, without empty ones."""
        return [line.strip() for line in self.output.splitlines() if line.strip()]


def environment_without_launchers() -> dict[str, str]:
    """Return the environment of a process that no launcher has started."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    # Without a buffer, print() writes a line and its end apart, and lines of two processes run together.
    environment.pop("PYTHONUNBUFFERED", None)
    return {**environment, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}


def launch_command(launcher: Launcher, nproc: int, node_rank: int, port: int) -> list[str]:
    """Return the command line that goes before the script's name."""
    if launcher == "python":
        return [sys.executable]
    if launcher == "by_hand":  # as SLURM does: process 0 holds the store
        places = {"RANK": node_rank, "LOCAL_RANK": node_rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
        variables = {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable]
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", f"--master-port={port}"]
    if launcher == "two_nodes":
        run += ["--nnodes=2", f"--node-rank={node_rank}", "--master-addr=127.0.0.1"]
    return run


def run_script(
    source: str | Path,
    *args: str,
    launcher: Launcher = "python",
    nproc: int = 2,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
    check: bool = True,
    cwd: Path | None = None,
    while_running: Callable[[], None] = lambda: None,
) -> ScriptResult:
    """Run a script from start to end and return what it printed.

    Args:
        source: A path, or the script's text.
        *args: Its command-line arguments.
        launcher: ``"python"`` (Lightning's own launcher may start more), ``"torchrun"``, ``"two_nodes"``, or
            ``"by_hand"``: plain processes that find RANK and so on.
        nproc: Processes (per node) that are started; plain python ignores it.
        env: Environment variables beside the caller's own.
        timeout_s: The watchdog: after so long every process prints its stacks and the test fails. What the script
            printed last may be missing then; ``print(..., flush=True)`` keeps it.
        check: Whether a non-zero exit status fails the test.
        cwd: Working folder; default the caller's.
        while_running: Called once when the processes have been started, to do something to them.

    Raises:
        AssertionError: On a hang, or (``check``) on a non-zero exit status, with all output.
    """
    with tempfile.TemporaryDirectory(prefix="accelight-script-") as folder:
        path = source if isinstance(source, Path) else Path(folder) / "script.py"
        if isinstance(source, str):
            path.write_text(source)
        port = free_port()
        commands = [
            [*launch_command(launcher, nproc, node, port), str(path), *args]
            for node in range({"two_nodes": 2, "by_hand": nproc}.get(launcher, 1))
        ]
        return _run(commands, env or {}, timeout_s * slowness(), check, cwd, Path(folder), while_running)


def _run(
    commands: Sequence[list[str]],
    env: Mapping[str, str],
    timeout_s: float,
    check: bool,
    cwd: Path | None,
    folder: Path,
    while_running: Callable[[], None],
) -> ScriptResult:
    surroundings = {**environment_without_launchers(), **env}
    output_path = folder / "output"
    with output_path.open("ab") as output:  # appending: two processes writing at once must not overwrite each other
        processes = [
            subprocess.Popen(command, stdout=output, stderr=output, env=surroundings, start_new_session=True, cwd=cwd)
            for command in commands
        ]
        try:
            try:
                while_running()
            except AssertionError as error:
                raise AssertionError(f"{error}\n{output_path.read_text(errors='replace')}") from error
            returncodes = [process.wait(timeout_s) for process in processes]
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
            _end(processes, signal.SIGABRT)  # PYTHONFAULTHANDLER prints every thread's stack on it
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(5)
            returncodes = []
        finally:
            _end(processes, signal.SIGKILL)
    text = output_path.read_text(errors="replace")
    assert not hung, f"still running after {timeout_s:g} s: {commands}\n{text}"
    assert not check or not any(returncodes), f"exit status {returncodes}: {commands}\n{text}"
    return ScriptResult(returncodes, text)


def wait_for(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    """Wait until ``condition()`` holds.

    Raises:
        AssertionError: After ``timeout_s``.
    """
    timeout_s *= slowness()
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s:g} s"
        time.sleep(0.02)


def _end(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # a session of its own: the launcher's children are in it
