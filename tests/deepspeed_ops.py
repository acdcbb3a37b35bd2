"""DeepSpeed's compiled ops, built once while other tests run: a build inside a test would count against its limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from accelight.strategies.deepspeed.engines.build_locks import is_open

_BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("ShareMemCommBuilder", "CPUAdamBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if builder is not None:
        builder.load()
"""
_LONGEST_BUILD_S = 900.0
_process: subprocess.Popen[bytes] | None = None
_log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the tests)


def start_building(folder: Path) -> None:
    """Build into ``folder``, which is this checkout's alone: no lock of a killed build elsewhere stops a test.

    Where the environment names another folder, that is used, and its locks are left to their owners.
    """
    global _process
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        for lock in folder.glob("*/lock"):
            if not is_open(lock):  # of tests that were killed
                lock.unlink(missing_ok=True)
    _process = subprocess.Popen([sys.executable, "-c", _BUILD], stdout=_log, stderr=_log, stdin=subprocess.DEVNULL)


def wait_until_built() -> None:
    """Return when the ops are there, or fail with what the compiler said."""
    assert _process is not None
    try:
        status = _process.wait(_LONGEST_BUILD_S)
    except subprocess.TimeoutExpired:
        _process.kill()
        raise
    if status:
        _log.seek(0)
        pytest.fail(f"DeepSpeed's ops could not be built (status {status}):\n{_log.read().decode()[-4000:]}")


def end_building() -> None:
    """End a build that nobody has waited for."""
    if _process is not None and _process.poll() is None:
        _process.kill()
        _process.wait()
    _log.close()
