"""The process beside a rank that writes its checkpoints, so that they are completed though the rank is killed.

[Note: one for each rank] It belongs to one rank, which has made its connection before starting it: there is no name by
which others could reach it, nobody to elect, and the ranks of a machine write beside each other, as they do themselves.
It is started by the first save, has a session of its own (launchers kill process groups), and ends with training.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from .saving_orders import Answer, Begun, Part, send
from .shared_memory import SharedMemory, unnamed_file

_MAIN = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = {path!r}
from {package}.saving_process_main import main
main({descriptor}, {parent})
"""
"""Whoever ends a job by a signal leaves some time before killing: that is for what is still to be written."""
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # it needs no accelerator, and must not take memory there
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OMP_NUM_THREADS": "1",
}
_LOOK_S = 1.0
_MOST_SAID_BYTES = 2000


class SavingProcessEnded(RuntimeError):  # noqa: N818 (an event that becomes an error's text)
    """It is gone, and has not said why."""


class SavingProcess:
    """Starts the process when there is something to write, tells it what, and hears what became of it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._said: int | None = None
        self._received = b""
        self.known_plans: frozenset[int] = frozenset()
        """Numbers of the plans that it was sent, and keeps."""

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def tell(self, order: Begun | Part, data: Sequence[Any] = (), memory: SharedMemory | None = None) -> None:
        """Send an order; when this returns, it is carried out whatever becomes of this process.

        Args:
            order: What to do.
            data: Of a part, see `saving_orders.send`.
            memory: As there.

        Raises:
            SavingProcessEnded: If the process is gone.
        """
        try:
            if self._connection is None:
                self._connection = self._start()
            send(self._connection, order, data, memory)
        except ConnectionError as error:
            raise SavingProcessEnded(self._end()) from error
        if self._process is not None and self._process.poll() is not None:
            raise SavingProcessEnded(self._end())
        if isinstance(order, Part):
            self.known_plans = frozenset(order.kept_plans)

    def answer(self) -> Answer:
        """Wait for what became of the part that was sent last.

        Raises:
            SavingProcessEnded: If the process is gone.
        """
        while b"\n" not in self._received:
            if self._process is None or self._connection is None:
                raise SavingProcessEnded("it was not started.")
            if select.select([self._connection], [], [], _LOOK_S)[0]:
                try:
                    received = self._connection.recv(4096)
                except ConnectionError:
                    received = b""
                if not received:
                    raise SavingProcessEnded(self._end())
                self._received += received
            elif self._process.poll() is not None:
                raise SavingProcessEnded(self._end())
        line, _, self._received = self._received.partition(b"\n")
        return Answer.of_line(line)

    def close(self) -> None:
        """End the process; what it was told and has not said to be done is lost. The next order starts another one."""
        self._end(kill=True)

    def _start(self) -> socket.socket:
        if not sys.executable:
            raise RuntimeError(
                "async_save='process' starts another Python, and sys.executable does not say which. Use "
                "async_save=True."
            )
        ours, theirs = socket.socketpair()
        self._said, self._received = unnamed_file(), b""
        main = _MAIN.format(path=sys.path, package=__package__, descriptor=theirs.fileno(), parent=os.getpid())
        with theirs:
            # Its own files: a launcher waits until nobody has its pipes open any more.
            self._process = subprocess.Popen(
                [sys.executable, "-c", main],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        return ours

    def _end(self, *, kill: bool = False) -> str:
        """Let go of the process, and return how it ended."""
        process, connection, said = self._process, self._connection, self._said
        self._process = self._connection = self._said = None
        self.known_plans = frozenset()
        if connection is not None:
            connection.close()
        if process is None:
            return "it was not started."
        if kill:
            process.kill()
        try:
            status = process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:  # it has closed the connection, and goes on with something else
            process.kill()
            status = process.wait()
        return f"{_described(status)}{'' if said is None else _last_words(said)}"


def _described(status: int) -> str:
    how = f"status {status}" if status >= 0 else signal.Signals(-status).name
    return f"the process that writes for it has ended ({how})."


def _last_words(said: int) -> str:
    with os.fdopen(said, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _MOST_SAID_BYTES))
        words = stream.read().decode(errors="replace").strip()
    return f" It said:\n{words}" if words else ""
