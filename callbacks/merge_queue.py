"""Merges in processes of their own, one after the other, with low priority."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_LOWEST_PRIORITY = 19
_POLL_S = 0.1
_GRACE_S = 5.0
# What launchers set is no business of a process that works alone; and a training job's GPU memory is full.
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class MergeOptions:
    """How checkpoints are merged: options of ``accelight merge-weights``."""

    arguments: tuple[str, ...] = ()
    """Further options, as on the command line."""
    remove: bool = False
    """Whether the checkpoint goes when its merged form has been read back and compared."""


@dataclass
class MergeJob:
    """One checkpoint to be merged."""

    checkpoint: Path
    output: Path
    is_complete: Callable[[], bool] = lambda: True
    """Whether the checkpoint has been written."""
    write_companions: Callable[[Path], None] | None = None
    """Writes what belongs beside the weights."""
    temporary: bool = False
    """Whether the checkpoint was made for this merge alone, and goes with it."""
    future: Future[None] | None = field(default=None, repr=False)

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it is done."""
        if self.future is None or not self.future.done() or self.future.cancelled():
            return None
        return self.future.exception()


class MergeQueue:
    """Merges checkpoints one after the other while this process does other things.

    A thread starts one process at a time and waits for it, asleep. The processes are fresh interpreters: forks of a
    process in which gloo or CUDA threads live could deadlock.
    """

    def __init__(self, options: MergeOptions) -> None:
        self.options = options
        self.jobs: list[MergeJob] = []
        self._pool = ThreadPoolExecutor(1, "accelight-merge")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = threading.Event()
        self._all_saved = threading.Event()

    def submit(self, job: MergeJob) -> None:
        """Merge a checkpoint when those before are done."""
        self.jobs.append(job)
        job.future = self._pool.submit(self._run, job)

    def needs(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is being merged or is yet to be."""
        return any(job.checkpoint == checkpoint and not _done(job) for job in self.jobs)

    def wait_for(self, checkpoint: Path) -> None:
        """Return when a checkpoint is no longer needed."""
        for job in self.jobs:
            if job.checkpoint == checkpoint and job.future is not None:
                _wait(job.future)

    def drain(self) -> None:
        """Return when all merges are done; every checkpoint has been written by now."""
        self._all_saved.set()
        for job in self.jobs:
            if job.future is not None:
                _wait(job.future)
        self._pool.shutdown()

    def cancel(self) -> None:
        """End the running merge, forget the others, and leave nothing unfinished."""
        self._cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()  # the command then removes what it began; SIGINT is ignored below nohup and `&`
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._pool.shutdown()

    def _run(self, job: MergeJob) -> None:
        while not job.is_complete():
            if self._cancelled.is_set() or self._all_saved.is_set():
                break
            time.sleep(_POLL_S)
        if not job.is_complete():
            raise RuntimeError("it was never written completely")
        is_new = not job.output.exists()
        try:
            if job.write_companions is not None:
                job.write_companions(job.output)
            self._merge(job)
        except BaseException:
            if is_new:  # with weights missing, a configuration is no model
                shutil.rmtree(job.output, ignore_errors=True)
            raise

    def _merge(self, job: MergeJob) -> None:
        remove = self.options.remove or job.temporary
        if job.checkpoint.is_dir():
            self._command(["accelight.checkpoint", *self._merge_arguments(job, job.checkpoint, remove)])
            return
        folder = job.output.with_name(f".{job.output.name}.unpacked")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            self._command(["accelight.callbacks.single_file", str(job.checkpoint), str(folder)])
            self._command(["accelight.checkpoint", *self._merge_arguments(job, folder, remove)])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if remove:
            job.checkpoint.unlink()

    def _merge_arguments(self, job: MergeJob, checkpoint: Path, remove: bool) -> list[str]:
        arguments = ["merge-weights", str(checkpoint), str(job.output), "--quiet", *self.options.arguments]
        return [*arguments, "--remove-checkpoint-dir"] if remove else arguments

    def _command(self, module_and_arguments: Sequence[str]) -> None:
        """Run ``python -m``.

        Raises:
            RuntimeError: With what it said, if it failed.
        """
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONSAFEPATH="1")
        with self._lock:
            if self._cancelled.is_set():
                raise RuntimeError("it was given up: training was interrupted")
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", *module_and_arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the training, which then ends this in order
            )
        with contextlib.suppress(ProcessLookupError, AttributeError):  # ended already; Windows
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
        with contextlib.suppress(OSError):  # on Linux priorities may count inside a session only, and this one is new
            Path(f"/proc/{process.pid}/autogroup").write_text(f"{_LOWEST_PRIORITY}", encoding="ascii")
        _, said = process.communicate()
        with self._lock:
            self._process = None
        if process.returncode:
            text = said.strip().removeprefix("accelight: error: ")
            raise RuntimeError(text or f"its process ended with status {process.returncode} and said nothing")


def _done(job: MergeJob) -> bool:
    return job.future is None or job.future.done()


def _wait(future: Future[None]) -> None:
    with contextlib.suppress(CancelledError):
        future.exception()


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return what tells a file or folder from one that takes its name later; None while there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def describe(job: MergeJob) -> str:
    """Return a failed job in one line."""
    return f"{job.checkpoint} -> {job.output}: {json.dumps(str(job.error))[1:-1]}"
