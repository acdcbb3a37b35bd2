"""`newest_checkpoint`: what a run that was started again goes on from, the same on all processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from ..checkpoint.newest import NewestCheckpoint, find_newest
from .common.agreed_outcome import raise_together, run_on_rank_zero
from .upstream.lightning import rank_zero_warn


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest whole checkpoint of a folder, or None where there is none: training begins then.

    For ``trainer.fit(..., ckpt_path=newest_checkpoint("checkpoints"))`` in a script that is started again whenever it
    has ended. Newest is the one of the most steps, as the checkpoint itself says, full or sharded, whatever its name
    (``last.ckpt`` and ``hpc_ckpt_1.ckpt`` too). Passed over, with a warning, are those that a killed process has left
    incomplete, and those without optimizer state. The bytes of tensors are not read.

    Where a process group is there, process 0 looks and tells the others, and all must call it. Before, each process
    looks by itself. `ElasticTraining(resume_from=...)` looks when the processes are connected.

    Args:
        folder: Such as ``ModelCheckpoint(dirpath)``. It need not exist.

    Raises:
        RuntimeError: On every process, if some do not see the checkpoint that process 0 has found, naming them.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        found = find_newest(folder)
    else:
        found = run_on_rank_zero(lambda: find_newest(folder), f"Looking for a checkpoint in {folder}")
        _check_seen_by_all(found, folder)
    for name, reason in found.passed_over.items():
        rank_zero_warn(f"newest_checkpoint() passes over {Path(folder, name)}: {reason}")
    return None if found.path is None else str(found.path)


def _check_seen_by_all(found: NewestCheckpoint, folder: str | os.PathLike[str]) -> None:
    problems = []
    if found.path is not None and not found.path.exists():
        problems.append(
            f"{found.path} of process 0 is not there. {folder} must be one folder that all processes see: give a path "
            "on a file system that the machines share."
        )
    raise_together(f"Looking for a checkpoint in {folder}", problems)
