"""An S3 server of moto on loopback, behind a proxy that counts what goes through it and lets requests fail.

Processes of a test find it by the usual variables (``AWS_ENDPOINT_URL``), which `Store.environment` has.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
_START_S = 60.0
_ANSWERS = {
    "error": (503, "Slow Down", b""),
    "refusal": (403, "Forbidden", b""),
    "gone": (404, "Not Found", b"<Error><Code>NoSuchUpload</Code><Message>There is no such upload.</Message></Error>"),
}
_STALL_S = 120.0
"""Longer than any client waits for an answer."""


@dataclass(frozen=True)
class Request:
    """One that the store has answered, or was to answer."""

    method: str
    path: str
    query: str
    status: int
    num_sent: int
    """Bytes of the request's body."""
    num_received: int
    """Bytes of the answer's body."""
    at_once: int = 1
    """How many requests were being answered when it came."""


@dataclass
class Store:
    """The server, seen from a test."""

    port: int
    requests: list[Request] = field(default_factory=list)
    failing: float = 0.0
    """Share of the requests that fail, half of them unanswered."""
    stalling: float = 0.0
    """Share of the requests that are never answered, on a connection that stays."""
    losing: str = ""
    """Of requests whose method and query have these words, ``POST uploadId``, the first answer for each path is lost,
    and later ones find no upload, as on Amazon S3."""
    is_down: bool = False
    forbidden: str = ""
    """Requests to write objects whose paths have these words are refused."""
    hides_uploads: bool = False
    """Whether requests to list uploads in parts are refused, as policies do that do not name this right."""
    latency_s: float = 0.0
    """Before each answer."""
    bytes_per_s: float = 0.0
    """Of each connection; 0 is no limit."""
    _lost: set[str] = field(default_factory=set)
    _num_open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "key-of-the-tests",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @contextlib.contextmanager
    def empty(self) -> Iterator[None]:
        """Let the body of a test begin with no object and no request, and let no fault outlive it."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        files = self.files()
        for name in files.find(BUCKET):
            files.rm_file(name)
        self.requests.clear()
        try:
            yield
        finally:
            self.failing, self.stalling, self.is_down, self.forbidden, self.latency_s = 0.0, 0.0, False, "", 0.0
            self.losing, self._lost, self.hides_uploads = "", set(), False
            os.environ.clear()
            os.environ.update(before)

    def files(self) -> Any:
        """Return the file system, as fsspec has it, without anything that it keeps."""
        from s3fs import S3FileSystem

        return S3FileSystem(use_listings_cache=False, skip_instance_cache=True)

    def names(self, under: str = "") -> list[str]:
        """Return the names of all objects under a prefix, without it."""
        prefix = f"{BUCKET}/{under}"
        return sorted(str(name).removeprefix(prefix) for name in self.files().find(prefix))

    def num_received(self, words: str) -> int:
        """Return how many bytes of objects whose paths have these words were sent to readers."""
        return sum(one.num_received for one in self.requests if one.method == "GET" and words in one.path)

    def loses(self, request: str, path: str) -> bool:
        """Return whether an answer gets lost."""
        is_first = bool(self.losing) and self.losing in request and path not in self._lost
        if is_first:
            self._lost.add(path)
        return is_first

    @contextlib.contextmanager
    def answering(self) -> Iterator[int]:
        """Yield how many requests are being answered, with this one."""
        with self._lock:
            self._num_open += 1
            at_once = self._num_open
        try:
            yield at_once
        finally:
            with self._lock:
                self._num_open -= 1

    def draw(self, method: str, path: str, query: str = "") -> str:
        """Return what is to happen to the next request: nothing, a key of `_ANSWERS`, ``silence`` or ``stall``."""
        if self.is_down:
            return "silence"
        if self.losing and self.losing in f"{method} {query}" and path in self._lost:
            return "gone"
        if self.forbidden and self.forbidden in path and method in ("PUT", "POST"):
            return "refusal"
        if self.hides_uploads and method == "GET" and "uploads" in query.split("&"):
            return "refusal"
        if self._random.random() < self.stalling:
            return "stall"
        if self._random.random() >= self.failing:
            return ""
        return self._random.choice(("error", "silence"))


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Store
    behind: int

    def _pass_on(self) -> None:
        with self.store.answering() as at_once:
            self._answer(at_once)

    def _answer(self, at_once: int) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        path, _, query = self.path.partition("?")
        fate = self.store.draw(self.command, path, query)
        if fate == "stall":
            time.sleep(_STALL_S)
        if fate in ("silence", "stall"):
            self.store.requests.append(Request(self.command, path, query, 0, len(body), 0))
            self.close_connection = True
            return
        if fate in _ANSWERS:
            status, reason, answer = _ANSWERS[fate]
            headers: list[tuple[str, str]] = []
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=60)
            asked = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, asked)
            found = connection.getresponse()
            answer = found.read()
            status, reason, headers = found.status, found.reason, found.getheaders()
            connection.close()
        self.store.requests.append(Request(self.command, path, query, status, len(body), len(answer), at_once))
        if self.store.loses(f"{self.command} {query}", path):
            self.close_connection = True
            return
        time.sleep(self.store.latency_s)
        self._wait_for(len(body) + len(answer))
        self.send_response_only(status, reason)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        size = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", size or str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def _wait_for(self, num_bytes: int) -> None:
        if self.store.bytes_per_s:
            time.sleep(num_bytes / self.store.bytes_per_s)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 (http.server's names)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Print nothing: clients that are killed close their connections."""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        assert server.poll() is None, "moto's server has ended"
        assert time.monotonic() < deadline, "moto's server does not answer"
        time.sleep(0.1)


@contextlib.contextmanager
def running_store() -> Iterator[Store]:
    """Run the server with an empty bucket; its variables are set inside."""
    behind = _free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(behind)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(behind, server)
        handler = type("_Handler", (_Proxy,), {"behind": behind})
        proxy = _Server(("127.0.0.1", 0), handler)
        store = Store(proxy.server_address[1])
        handler.store = store  # type: ignore[attr-defined]
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        before = dict(os.environ)
        os.environ.update(store.environment)
        store.files().clear_instance_cache()  # fsspec keeps file systems, whatever the environment is by now
        try:
            store.files().mkdir(BUCKET)
            yield store
        finally:
            os.environ.clear()
            os.environ.update(before)
            proxy.shutdown()
            proxy.server_close()
    finally:
        server.kill()
        server.wait()
