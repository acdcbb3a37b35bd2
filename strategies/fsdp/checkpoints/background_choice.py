"""Who writes checkpoints while training goes on, as ``async_save`` says, and what that cannot be."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from ...common.storage_paths import is_remote
from .background_saves import BackgroundSaves
from .saving_process import SavingProcess

_PROCESS = "process"


def choose_saves(async_save: object, timeout: timedelta) -> BackgroundSaves | None:
    """Return what writes in the background; None if training waits for saves.

    Raises:
        ValueError: If ``async_save`` is none of its values, or the system has not got what it needs.
    """
    if not isinstance(async_save, bool) and async_save != _PROCESS:
        raise ValueError(
            f"async_save must be False (training waits), True (a thread writes) or 'process' (another process writes, "
            f"which a killed training does not end), got {async_save!r}."
        )
    if async_save == _PROCESS and not hasattr(socket, "send_fds"):
        raise ValueError("async_save='process' needs a system with Unix sockets: Linux or macOS. Use async_save=True.")
    if not async_save:
        return None
    return BackgroundSaves(timeout, SavingProcess() if async_save == _PROCESS else None)


def told_choice(saves: BackgroundSaves | None) -> str:
    """Return who writes, as words to come after the checkpoints' form."""
    if saves is None:
        return ""
    return " in the background" if saves.process is None else " by a process beside each rank"


def check_kind(saves: BackgroundSaves | None, state_dict_type: str) -> None:
    """Check, before anything is trained, that the process can write checkpoints of this kind.

    Raises:
        ValueError: If it cannot.
    """
    if saves is not None and saves.process is not None and state_dict_type != "sharded_state_dict":
        raise ValueError(
            f"async_save='process' writes sharded checkpoints, and state_dict_type is {state_dict_type!r}. Give "
            "state_dict_type='sharded_state_dict', or async_save=True."
        )


def check_places(saves: BackgroundSaves | None, callbacks: Iterable[Any]) -> None:
    """Check, before anything is trained, where callbacks are going to save.

    Args:
        saves: In the background.
        callbacks: That save, such as ``ModelCheckpoint``.

    Raises:
        ValueError: If that is a URL of something else than the file system.
    """
    if saves is None or saves.process is None:
        return
    for callback in callbacks:
        folder = str(getattr(callback, "dirpath", None) or "")
        if is_remote(folder):
            raise ValueError(
                f"async_save='process' writes to a file system that all processes see, and {type(callback).__name__} "
                f"saves to {folder}. Give it a folder, or save in one file (state_dict_type='full_state_dict', "
                "async_save=True)."
            )
