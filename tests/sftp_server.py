"""An SFTP server on loopback: ``python -m tests.sftp_server ROOT`` prints its port; `running_sftp` runs it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import paramiko

USER, PASSWORD = "trainer", "password-of-the-tests"


class _Login(paramiko.ServerInterface):  # type: ignore[misc]
    def check_auth_password(self, username: str, password: str) -> int:
        is_known = (username, password) == (USER, PASSWORD)
        return paramiko.AUTH_SUCCESSFUL if is_known else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


def _answering(action: Any) -> Any:
    """Return a method whose errors are answers of the protocol."""

    def method(*arguments: Any) -> Any:
        try:
            found = action(*arguments)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)
        return paramiko.SFTP_OK if found is None else found

    return method


class _Files(paramiko.SFTPServerInterface):  # type: ignore[misc]
    root: Path

    def _path(self, path: str) -> str:
        return f"{self.root}{self.canonicalize(path)}"

    @_answering
    def list_folder(self, path: str) -> list[paramiko.SFTPAttributes]:
        return [paramiko.SFTPAttributes.from_stat(entry.stat(), entry.name) for entry in os.scandir(self._path(path))]

    @_answering
    def stat(self, path: str) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(os.stat(self._path(path)))

    lstat = stat

    @_answering
    def open(self, path: str, flags: int, attr: Any) -> paramiko.SFTPHandle:
        handle = paramiko.SFTPHandle(flags)
        descriptor = os.open(self._path(path), flags & ~os.O_APPEND, 0o644)
        handle.readfile = handle.writefile = os.fdopen(descriptor, "r+b" if flags & (os.O_WRONLY | os.O_RDWR) else "rb")
        return handle

    @_answering
    def remove(self, path: str) -> None:
        os.remove(self._path(path))

    @_answering
    def posix_rename(self, oldpath: str, newpath: str) -> None:
        os.replace(self._path(oldpath), self._path(newpath))

    @_answering
    def mkdir(self, path: str, attr: Any) -> None:
        os.mkdir(self._path(path))

    @_answering
    def rmdir(self, path: str) -> None:
        os.rmdir(self._path(path))


def _serve(connection: socket.socket, key: paramiko.PKey, root: Path) -> None:
    transport = paramiko.Transport(connection)
    transport.add_server_key(key)
    transport.set_subsystem_handler("sftp", paramiko.SFTPServer, type("_Rooted", (_Files,), {"root": root}))
    transport.start_server(server=_Login())


def main() -> None:
    """Serve until the process is killed."""
    key, root = paramiko.RSAKey.generate(2048), Path(sys.argv[1])
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_serve, args=(connection, key, root), daemon=True).start()


def log_in() -> None:
    """Let this process have the password, as users have it."""
    fsspec.config.conf["sftp"] = {"username": USER, "password": PASSWORD}


@contextlib.contextmanager
def running_sftp(root: Path) -> Iterator[str]:
    """Run the server; yield the URL of a folder's content. Processes that use it call `log_in`."""
    command = [sys.executable, "-m", "tests.sftp_server", str(root)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        yield f"sftp://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
