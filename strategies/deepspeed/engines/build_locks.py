"""Locks left behind by a killed build: torch would wait for them for ever, without a message."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..config.settings import DeepSpeedSettings

_LONGEST_BUILD_S = 600.0


def check_build_locks(*ops: str) -> None:
    """Check that nobody left the locks of these ops behind, before DeepSpeed compiles or loads them.

    A lock that a process on this machine holds open belongs to a running build. Any other may belong to another machine
    with the same home folder: while it is recent, that is a warning.

    Args:
        *ops: DeepSpeed's names of the ops, as ``cpu_adam``.

    Raises:
        RuntimeError: If a lock is too old for a build; nothing is deleted.

    Source: torch 2.13 ``utils/file_baton.py``: the holder keeps the file open, and removes it in the end.
    """
    for op in set(ops) - _loaded():
        lock = _lock_of(op)
        age = _age_s(lock)
        if age is None or is_open(lock) or not lock.exists():  # it may have ended meanwhile
            continue
        advice = f"If no other machine builds it, a killed process left it: rm '{lock}', and start again."
        if age > _LONGEST_BUILD_S:
            raise RuntimeError(
                f"DeepSpeed's op {op} is locked by {lock}, {age / 60:.0f} minutes old, which no process on this "
                f"machine has open; torch would wait for it for ever. {advice}"
            )
        warnings.warn(
            f"DeepSpeed's op {op} is locked by {lock}, which no process on this machine has open; torch waits until it "
            f"is gone. {advice}",
            stacklevel=2,
        )


def ops_of_optimizer(settings: DeepSpeedSettings) -> Iterator[str]:
    """Yield the op that DeepSpeed compiles for the optimizer that the config defines, if any."""
    name = "adam" if settings.defines_adam else settings.optimizer_type
    if name in ("adam", "lamb", "lion", "adagrad") and not settings.optimizer_params.get("torch_adam"):
        yield f"cpu_{name}" if settings.offloads_optimizer else f"fused_{name}"


def _loaded() -> set[str]:
    """Return the ops that this process has already."""
    module = sys.modules.get("deepspeed.ops.op_builder.builder")
    return set() if module is None else set(module.OpBuilder._loaded_ops)


def _lock_of(op: str) -> Path:
    from .upstream import build_directory  # not at the top: it imports torch, and tests without it use this file

    return (build_directory(op) / "lock").resolve()


def _age_s(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None


def is_open(path: Path) -> bool:
    """Whether a process on this machine has the file open, as far as ``/proc`` shows."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(path):
                return True
        except OSError:  # closed meanwhile, or another user's
            continue
    return False
