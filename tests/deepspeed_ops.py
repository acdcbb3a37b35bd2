"""DeepSpeed's compiled ops, built once while other tests run: a build inside a test would count against its limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from accelight.strategies.deepspeed.library import is_open

_BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("ShareMemCommBuilder", "CPUAdamBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if builder is not None:
        builder.load()
"""
_LONGEST_BUILD_S = 900.0
_LONGEST_END_S = 20.0
_processes: dict[str, subprocess.Popen[bytes]] = {}
_logs: dict[str, IO[bytes]] = {}
_began_at: dict[str, float] = {}


def folder_for(device: str) -> Path:
    """Return where ops for ``device`` are: those for CUDA apart, for they have the same names."""
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    return folder if device == "cpu" else folder / device


def start_building(folder: Path, devices: Sequence[str]) -> None:
    """Build into ``folder``, which is this checkout's alone: no lock of a killed build elsewhere stops a test.

    Where the environment names another folder, that is used, and its locks are left to their owners. DeepSpeed itself
    would build for CUDA alone where there is a GPU, and the tests on the CPU inside of their time.
    """
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        for lock in folder.glob("*/lock"):
            if not is_open(lock):  # of tests that were killed
                lock.unlink(missing_ok=True)
    for device in devices:
        log = _logs[device] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the tests)
        where = {"DS_ACCELERATOR": device, "TORCH_EXTENSIONS_DIR": str(folder_for(device))}
        command = [sys.executable, "-c", _BUILD]
        _began_at[device] = time.time()
        _processes[device] = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **where},
            start_new_session=True,  # with its compilers
        )


def wait_until_built(device: str) -> None:
    """Return when the ops are there, or fail with what the compiler said."""
    try:
        status = _processes[device].wait(_LONGEST_BUILD_S)
    except subprocess.TimeoutExpired:
        _processes[device].kill()
        raise
    if status:
        _logs[device].seek(0)
        output = _logs[device].read().decode()[-4000:]
        pytest.fail(f"DeepSpeed's ops for {device} could not be built (status {status}):\n{output}")


def end_building() -> None:
    """End builds that nobody has waited for, with their compilers and locks."""
    for device, process in _processes.items():
        if process.poll() is None:
            _interrupt(process)
            for lock in folder_for(device).glob("*/lock"):
                if lock.stat().st_mtime >= _began_at[device] - 1 and not is_open(lock):
                    lock.unlink(missing_ok=True)
    for log in _logs.values():
        log.close()


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a build as Ctrl-C does: torch takes its lock away then."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_LONGEST_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
