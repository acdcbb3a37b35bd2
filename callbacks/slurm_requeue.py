"""Giving a SLURM job back to the queue, from training itself and not from a signal's handler."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from ..state import PartialState, gather_object

_TIMEOUT_S = 60.0  # scontrol itself asks again for as long as slurm.conf's MessageTimeout (10 s by default)


def slurm_job(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the job's name for ``scontrol``; None outside of SLURM.

    Args:
        env: SLURM's variables.
    """
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")


def requeue(job: str) -> None:
    """Let SLURM end all processes of ``job`` and start it again later; all processes must call it, one asks SLURM.

    Args:
        job: Result of `slurm_job`.

    Raises:
        RuntimeError: On all processes, if SLURM does not take it back.
    """
    [refusal, *_] = gather_object([_refusal(job) if PartialState().is_main_process else None])
    if refusal is not None:
        raise RuntimeError(f"SLURM job {job} could not be requeued: {refusal}")


def _refusal(job: str) -> str | None:
    """Ask SLURM; return why it does not take the job back."""
    by_hand = f"`scontrol requeue {job}`, where that is allowed, starts it again"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return f"there is no `scontrol` on this node. {by_hand} from another."
    except subprocess.TimeoutExpired:
        return f"SLURM did not answer within {_TIMEOUT_S:g} s. {by_hand} when it does."
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
    return f"it says {said!r}. Submit with `#SBATCH --requeue`; {by_hand}."
