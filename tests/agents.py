"""Agents of ``torchrun`` that come and go: each is a machine of its own, as far as torch can tell."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from tests.ranks import free_port
from tests.scripts import LAUNCHER_VARIABLES, wait_for
from tests.slowness import slowness

_RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"
"""A lost agent is noticed after ten seconds, and five more are left for others to come; by default 15 and 30."""


class Agents:
    """An elastic job on loopback; what is left of it ends with the context.

    Args:
        folder: For what they print.
        script: What the workers run, with its arguments.
        nnodes: Least and most agents, as ``torchrun --nnodes`` has them.
        env: Environment variables beside the caller's own.
    """

    def __init__(self, folder: Path, script: list[str], nnodes: str, env: dict[str, str]) -> None:
        self.folder, self.script, self.nnodes = folder, script, nnodes
        self.port = free_port()
        surroundings = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        # torch 2.13: else an agent that comes later waits in vain for an address, and those that are there end with it.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.env = {**surroundings, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", **own_store, **env}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, number: int = 1) -> None:
        """Start agents. The very first holds the store through which they find each other: it must stay."""
        for _ in range(number):
            with (self.folder / f"agent{len(self.processes)}.out").open("wb") as output:
                process = subprocess.Popen(
                    self._command(), stdout=output, stderr=output, env=self.env, start_new_session=True
                )
            self.processes.append(process)
            if len(self.processes) == 1:
                wait_for(self._store_is_there)

    def _command(self) -> list[str]:
        run = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nnodes}", "--nproc-per-node=1"]
        run += ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-conf={_RENDEZVOUS}"]
        return [*run, f"--rdzv-endpoint=127.0.0.1:{self.port}", *self.script]

    def _store_is_there(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def wait(self, timeout_s: float = 150) -> list[int]:
        """Return the agents' exit statuses when all have ended.

        Raises:
            AssertionError: If they have not after ``timeout_s``, with all that they printed.
        """
        try:
            return [process.wait(timeout_s * slowness()) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from error

    @property
    def output(self) -> str:
        """What all have printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("agent*.out")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
