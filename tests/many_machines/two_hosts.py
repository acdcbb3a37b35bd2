"""Two hosts on one machine: network namespaces with a link between them that can be slowed down and cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.scripts import wait_for
from tests.slowness import slowness

ADDRESSES = ("10.99.77.1", "10.99.77.2")
_LINK = "eth0"
_RATE = ("tbf", "rate", "100mbit", "burst", "64k", "latency", "50ms")
_DELAY = ("netem", "delay", "1ms", "rate", "100mbit")  # where the kernel has it


def why_not() -> str:
    """Return why there cannot be two hosts here; nothing where there can."""
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"network namespaces need {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    try:
        with _namespaces():
            return ""
    except AssertionError as error:
        return f"network namespaces cannot be made here: {error}"


@dataclass
class TwoHosts:
    """Runs programs on two hosts, which see the same files."""

    names: Sequence[str]
    folder: Path
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, host: int, command: Sequence[str], *, own_disk: Path | None = None) -> None:
        """Start a program on one of them.

        Args:
            host: 0 or 1.
            command: The program and its arguments.
            own_disk: A folder in which the host has files of its own alone.
        """
        before = f"hostname host{host}; " + (f"mount -t tmpfs none {own_disk}; " if own_disk is not None else "")
        isolated = ["unshare", "--uts", "--mount", "sh", "-c", before + 'exec "$@"', "sh", *command]
        with open(self._output(host), "ab") as output:
            self._running.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self.names[host], *isolated],
                    env={**os.environ, "GLOO_SOCKET_IFNAME": _LINK, "OMP_NUM_THREADS": "1"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def torchrun(self, script: Path, *args: str, own_disk: Path | None = None) -> None:
        """Start ``script`` with one process on each host; ``own_disk`` is the second host's."""
        for host in (0, 1):
            run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--nnodes=2"]
            place = [f"--node-rank={host}", f"--master-addr={ADDRESSES[0]}", "--master-port=29500"]
            self.start(host, [*run, *place, str(script), *args], own_disk=own_disk if host else None)

    def said(self, host: int) -> str:
        """Return what the host's programs have printed."""
        return self._output(host).read_text(errors="replace") if self._output(host).exists() else ""

    def wait_for(self, line: str, host: int = 0, timeout_s: float = 90) -> None:
        """Return when the host has printed ``line``."""
        try:
            wait_for(lambda: line in self.said(host) or not self.alive(), timeout_s)
            assert line in self.said(host)
        except AssertionError as error:
            raise AssertionError(f"{line!r}: {error}\n{self.said(0)}\n{self.said(1)}") from None

    def alive(self) -> bool:
        """Return whether all programs still run."""
        return all(one.poll() is None for one in self._running)

    def end(self, timeout_s: float = 120) -> list[int]:
        """Return the exit statuses of all programs, which end by themselves."""
        try:
            return [one.wait(timeout_s * slowness()) for one in self._running]
        except subprocess.TimeoutExpired:
            self.kill(signal.SIGABRT)
            raise AssertionError(f"still running:\n{self.said(0)}\n{self.said(1)}") from None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End all programs with all that they have started."""
        for one in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, number)

    def cut(self) -> None:
        """Let nothing through any more, as when a cable is pulled: nobody is told."""
        self._link("down")

    def mend(self) -> None:
        """Let all through again."""
        self._link("up")

    def _link(self, state: str) -> None:
        run("ip", "-n", self.names[1], "link", "set", _LINK, state)

    def _output(self, host: int) -> Path:
        return self.folder / f"host{host}"


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make two hosts with a slow link between them, for as long as the body runs.

    Args:
        folder: For what their programs print.
    """
    with _namespaces() as names:
        hosts = TwoHosts(names, folder)
        try:
            yield hosts
        finally:
            hosts.kill()


@contextlib.contextmanager
def _namespaces() -> Iterator[list[str]]:
    """Make two network namespaces with a slow link between them, and return their names.

    Raises:
        AssertionError: If something of it cannot be made here.
    """
    names = [f"accelight-{uuid.uuid4().hex[:8]}" for _ in ADDRESSES]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", _LINK, "netns", names[0], "type", "veth", "peer", "name", _LINK, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", _LINK)
            for link in ("lo", _LINK):
                run("ip", "-n", name, "link", "set", link, "up")
            slow = ["tc", "-n", name, "qdisc", "add", "dev", _LINK, "root"]
            if subprocess.run([*slow, *_DELAY], capture_output=True).returncode:
                run(*slow, *_RATE)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def run(*command: str) -> None:
    """Run a program.

    Raises:
        AssertionError: With what it said, if it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)
