"""Asynchronous saves: training waits only for the copy to host memory.

[Note: one error, one step] A failed save has to stop all processes at the same step, or those that continue hang in a
collective. But each learns of the failure in a thread of its own, at a moment of its own. So while a save is
outstanding, each process looks for a key in the store before each step, and who knows of a failure first writes the
number of the next optimizer step there. Nobody can begin that step before, since the present one has collectives that
need the writer; so all find the key in time, and all raise there. (On an accelerator the loop's thread could run ahead
of its collectives; before each batch it waits for `Termination.agree`.)
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...state.process_group import group_store
from ...state.process_record import set_device
from ...state.rendezvous import StoreMessages, num_ranks, raise_on_all_ranks
from ..common.checkpoint_files import remove_saved
from ..upstream.lightning import LightningModule, TrainerFn, TrainerState, TrainerStatus
from .staging import SharedStager, Stager

_log = logging.getLogger(__name__)


@dataclass
class _Save:
    """One save on its way."""

    what: str
    key: str
    """The store's key for the step at which it fails; no other save of any training has it."""
    thread: threading.Thread | None = None
    error: BaseException | None = None
    complete: bool = False
    """The checkpoint has its name."""
    done: bool = False
    """The thread has nothing left to do, and the error is known if there is one."""
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class WritingProcess(Protocol):
    """Another process, which writes in the place of the thread."""

    def close(self) -> None:
        """End it."""


class AsyncSaver:
    """Writes one checkpoint at a time in a thread of its own, through a process group of its own.

    Args:
        timeout: Of the group's collectives.
        process: What writes instead, and the thread waits for it; None lets the thread write.
    """

    def __init__(self, timeout: timedelta, process: WritingProcess | None = None) -> None:
        self._timeout = timeout
        self.process = process
        """The process that writes sharded checkpoints from shared memory; None if the thread does."""
        self._groups: tuple[Any, dist.ProcessGroup] | None = None
        self._stager: Stager | None = None
        self._device = torch.device("cpu")
        self._current: _Save | None = None
        self._num_saves = 0

    def connect(self, device: torch.device) -> None:
        """Make the process group; every rank calls it, whenever the default group may be new.

        Args:
            device: Of this process.
        """
        self._device = device
        if self._groups is None or self._groups[0] is not dist.group.WORLD:
            self._groups = dist.group.WORLD, dist.new_group(backend="gloo", timeout=self._timeout)

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state`` in host memory, which the next copy reuses: `wait` first."""
        self._check_idle()
        if self._stager is None:
            self._stager = Stager()
        return self._stager.copy(state)

    @property
    def shared_stager(self) -> SharedStager:
        """The stager that copies states into the shared memory that ``process`` reads; `wait` first."""
        self._check_idle()
        if self._stager is None:
            self._stager = SharedStager()
        if not isinstance(self._stager, SharedStager):
            raise RuntimeError("Another process cannot write state that only this process holds in memory.")
        return self._stager

    @property
    def group(self) -> dist.ProcessGroup:
        """For collectives of saves.

        Raises:
            RuntimeError: Before `connect`.
        """
        if self._groups is None:
            raise RuntimeError("Call connect() first.")
        return self._groups[1]

    def start(self, what: str, save: Callable[[dist.ProcessGroup], None], messages: StoreMessages) -> None:
        """Run ``save`` in the background, on every rank; `wait` first.

        Args:
            what: Names the save in errors.
            save: Given the group for its collectives. It must fail on every rank if it fails on one.
            messages: Through which the ranks agree that all is done.
        """
        self._check_idle()
        group = self.group
        self._num_saves += 1
        current = self._current = _Save(what, f"accelight/failed_save/{group.group_name}/{self._num_saves}")
        # Not a daemon: a process that ends waits for its save.
        current.thread = threading.Thread(
            target=_run, args=(current, save, group, messages, self._device), name="accelight-save"
        )
        current.thread.start()

    def _check_idle(self) -> None:
        if self._current is not None:
            raise RuntimeError(f"{self._current.what} is still in progress: call wait() before the next one.")

    def afterwards(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the present save is complete, at once if there is none, and not at all if it fails."""
        if self._current is not None:
            with self._current.lock:
                if not self._current.complete:
                    self._current.afterwards.append(action)
                    return
        action()

    def wait(self) -> None:
        """Return when the present save is complete.

        Raises:
            RuntimeError: If it failed; on every rank.
        """
        current, self._current = self._current, None
        if current is None or current.thread is None:
            return
        current.thread.join()
        if current.error is not None:
            raise RuntimeError(f"{current.what} in the background failed: {current.error}") from current.error

    def check(self, step: int) -> None:
        """Raise the error of a failed save, on every rank at the same step; see the note above.

        Args:
            step: Number of finished optimizer steps; every rank calls it at least once with each.

        Raises:
            RuntimeError: As `wait`.
        """
        current = self._current
        if current is None:
            return
        if current.done and current.error is None:
            self.wait()
        elif num_ranks() == 1:
            if current.done:
                self.wait()
        elif self._fails_at(current, step) <= step:
            self.wait()

    @staticmethod
    def _fails_at(current: _Save, step: int) -> float:
        store = group_store(current.key)
        if store.check(["step"]):
            return int(store.get("step"))
        if current.done:
            return int(store.compare_set("step", "", f"{step + 1}"))
        return float("inf")

    def close(self, exception: BaseException | None = None) -> None:
        """Wait, and free the memory.

        Args:
            exception: What ended training already. A save that failed, too, is only logged then.

        Raises:
            RuntimeError: As `wait`.
        """
        try:
            self.wait()
        except RuntimeError:  # logged when it happened
            if exception is None:
                raise
        finally:
            if self.process is not None:
                self.process.close()
            if self._stager is not None:
                self._stager.close()
                self._stager = None


def _run(
    current: _Save,
    save: Callable[[dist.ProcessGroup], None],
    group: dist.ProcessGroup,
    messages: StoreMessages,
    device: torch.device,
) -> None:
    """Body of the thread."""
    try:
        set_device(device)  # a thread begins with the first one, where each process would take memory
        save(group)
        with current.lock:
            current.complete = True
        with raise_on_all_ranks("What waited for it", messages):
            for action in current.afterwards:
                action()
    except BaseException as caught:  # noqa: BLE001 (raised by the loop's thread)
        current.error = caught
        _log.error("%s in the background failed: %s", current.what, caught)  # now, in case nobody asks any more
    finally:
        current.done = True


class SavingStrategy(Protocol):
    """A strategy, as what its checkpointer does with an `AsyncSaver` sees it."""

    @property
    def root_device(self) -> torch.device:
        """Of this process."""

    @property
    def lightning_module(self) -> LightningModule | None:
        """Connected to the Trainer, or None."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""


class AsyncCheckpointer:
    """Part of a checkpointer: everything about asynchronous saves but what is saved, and how it is written.

    Args:
        strategy: Whose checkpoints.
        saves: Where saves continue while training does; None to wait for them.
    """

    _strategy: SavingStrategy

    def __init__(self, strategy: SavingStrategy, saves: AsyncSaver | None) -> None:
        self._strategy = strategy
        self.saves = saves
        """The saver of asynchronous saves; None if training waits for saves."""

    @property
    def _trainer_state(self) -> TrainerState | None:
        trainer = None if self._strategy.lightning_module is None else self._strategy.lightning_module._trainer
        return None if trainer is None else trainer.state

    @property
    def _saver_now(self) -> AsyncSaver | None:
        """The saver of a save that begins now; None outside of `fit`: there is nothing to continue with."""
        state = self._trainer_state
        is_fitting = state is not None and state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        return self.saves if is_fitting else None

    def remove(self, path: str | Path, remove_file: Callable[[], None]) -> None:
        """Remove a checkpoint when no save continues any more that is to replace it.

        Args:
            path: A folder, or what ``remove_file`` removes.
            remove_file: Lightning's way, which removes files.
        """
        remove = partial(remove_saved, path, remove_file) if self._strategy.is_global_zero else remove_file
        if self.saves is None:
            remove()
        else:  # the older checkpoint is the only one until the newer one is complete
            self.saves.afterwards(remove)

    def wait(self) -> None:
        """Return when no checkpoint is being written any more; all processes must call it.

        Raises:
            RuntimeError: If the checkpoint could not be saved; on all processes.
        """
        if self.saves is not None:
            self.saves.wait()

    def check_saves(self) -> None:
        """Raise what a save in the background failed with, before a batch of training."""
        module = self._strategy.lightning_module
        if self.saves is not None and module is not None:
            self.saves.check(module.trainer.global_step)

    def connect(self) -> None:
        """Give saves in the background their own process group; all processes must call it."""
        if self.saves is not None:
            self.saves.connect(self._strategy.root_device)

    def close(self, error: BaseException | None = None) -> None:
        """End: what is being written is completed, after an error too, for it is a good checkpoint of before."""
        if self.saves is not None:
            self.saves.close(error)


# ------------------------------------------------------------------------------------------------
# The values of ``async_save``.


_PROCESS = "process"


def make_async_saver(
    async_save: object, timeout: timedelta, make_process: Callable[[], WritingProcess] | None = None
) -> AsyncSaver | None:
    """Return the saver that writes in the background; None if training waits for saves.

    Args:
        async_save: The strategy's argument.
        timeout: Of the saver's collectives.
        make_process: Makes what writes for ``"process"``; None where nothing can.

    Raises:
        ValueError: If ``async_save`` is none of its values, or the system has not got what it needs.
    """
    if not isinstance(async_save, bool) and async_save != _PROCESS:
        raise ValueError(
            "async_save must be False (training waits), True (a thread writes) or 'process' (another process "
            f"writes, which survives a kill of the training process), got {async_save!r}."
        )
    if async_save == _PROCESS and make_process is None:
        raise ValueError(
            "async_save='process' writes sharded checkpoints of AccelFSDPStrategy alone. Use async_save=True: a thread "
            "writes."
        )
    if async_save == _PROCESS and not hasattr(socket, "send_fds"):
        raise ValueError("async_save='process' needs a system with Unix sockets: Linux or macOS. Use async_save=True.")
    if not async_save:
        return None
    return AsyncSaver(timeout, make_process() if async_save == _PROCESS and make_process is not None else None)


def describe_async_mode(saves: AsyncSaver | None) -> str:
    """Return the writer, in words that follow the checkpoints' form."""
    if saves is None:
        return ""
    return " in the background" if saves.process is None else " by a process beside each rank"
