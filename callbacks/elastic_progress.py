"""The Trainer's counters of micro-batches, as another number of processes would have counted them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"


def count_anew(loops: MutableMapping[str, Any], *, steps_in_epoch: int, steps: int, before: int, now: int) -> bool:
    """Change the state of a fit loop so that training goes on at the begin of a window, with windows of another size.

    Counters of optimizer steps, epochs and schedules stay. What was done of an open window is forgotten: its gradients
    are in no checkpoint. An evaluation that was under way begins anew, since its values are in none either.

    Args:
        loops: ``checkpoint["loops"]["fit_loop"]``; changed.
        steps_in_epoch: Optimizer steps of the epoch.
        steps: Of all epochs.
        before: Micro-batches of one process in a window, when the checkpoint was saved.
        now: In this run.

    Returns:
        Whether an open window was forgotten.
    """
    loops.get("state_dict", {}).pop("combined_loader", None)  # where loaders were, counted in micro-batches
    progress = loops[_BATCHES]
    saved = progress["current"]
    # Within on_train_batch_end all but `completed` count the batch already; Lightning tells such checkpoints by that.
    within_batch_end = saved["ready"] == saved["started"] == saved["processed"] == saved["completed"] + 1
    num_done = saved["completed"] + within_batch_end
    at_boundary = num_done == steps_in_epoch * before
    for name, num_steps in (("current", steps_in_epoch), ("total", steps)):
        _set_all(progress[name], num_steps * now)
        progress[name]["completed"] -= at_boundary and within_batch_end and num_steps > 0
    progress["is_last_batch"] = bool(progress["is_last_batch"]) and at_boundary
    if _VALIDATION in loops and _is_under_way(loops[_VALIDATION]["total"]):
        _set_all(loops[_VALIDATION]["current"], 0)
        loops[_VALIDATION]["is_last_batch"] = False
    return num_done % before != 0


def _set_all(counters: MutableMapping[str, int], value: int) -> None:
    for name in counters:
        counters[name] = value


def _is_under_way(total: MutableMapping[str, int]) -> bool:
    return total["started"] == total["ready"] > total["processed"]
