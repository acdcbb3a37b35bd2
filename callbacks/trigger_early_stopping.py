"""`TriggerEarlyStopping`: stops all processes at the same step when any of them asks for it.

A process can ask by code, by a signal, or by running out of data; under SLURM the job can be requeued.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..state import PartialState, check_triggers, gather_object, set_trigger, triggered_by
from ..state.triggers import DEFAULT
from ..state.utils import check_count, named_arguments
from ..strategies.common.signals import terminated
from ..strategies.upstream.lightning import (
    Callback,
    Checkpoint,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    TrainerFn,
    _DataLoaderIterDataFetcher,
    check_trainer,
    rank_zero_info,
)
from .elastic_training import skip_used_batches

Condition = Callable[[Trainer, LightningModule, Any, Any, int], bool]

_log = logging.getLogger(__name__)

_CONDITION = "accelight/condition"
_FAILED = "accelight/condition failed"
_NONFINITE = "accelight/non-finite loss"
_SIGNAL = "accelight/signal/"
_REASONS = {DEFAULT: "set_trigger()", _CONDITION: "condition", _NONFINITE: "non-finite loss"}


@named_arguments
class TriggerEarlyStopping(Callback):
    """Stops training on every process at the same step when any process asks for it.

    A process asks for it by ``condition``, by a loss that is not finite, by a signal, or by ``set_trigger()`` anywhere
    in user code (the unnamed trigger; code that sets a named one checks it itself). The processes agree at the end of
    optimizer steps, so that no gradient is lost. After that Lightning ends as with its own ``EarlyStopping``, which may
    run at the same time: not before ``min_steps`` and ``min_epochs``, and with a last validation.

    **Signals** only set a flag. At the next check, all processes save a checkpoint and raise Lightning's
    ``SIGTERMException``, a ``SystemExit`` with the status of a process that the signal has ended: 128 and its number,
    143 for SIGTERM. ``min_steps`` does not hold that back. The checkpoint lies in the folder of the first
    ``ModelCheckpoint``, where ``fit(ckpt_path="last")`` finds it, else in ``default_root_dir``; its path is
    `checkpoint_path`. While training runs, the handlers replace Lightning's own, which communicate inside the handler
    (Lightning-AI/pytorch-lightning#20806, #21406); afterwards the previous ones are back.

    **Resuming within an epoch**, from any checkpoint, continues with the next batch: Lightning restores loaders with a
    ``state_dict``, and this callback skips the used batches of others. (The same order again comes from a sampler that
    draws by epoch, such as the ``DistributedSampler`` that Lightning inserts; a single device's ``shuffle=True`` draws
    anew.)

    Args:
        condition: ``condition(trainer, pl_module, outputs, batch, batch_idx)``, called after each batch on each process
            with that process's own values. If it raises, all processes raise.
        check_every_n_steps: Optimizer steps between two checks.
        stop_on_nonfinite_loss: Whether a loss that is NaN or infinite on any process stops training. On an accelerator
            with ``lag`` it is looked at one check later, to not wait for the device.
        stop_on_signals: Signals that stop training, such as ``[signal.SIGTERM, "SIGUSR1"]``.
        lag: Whether checks answer for what was set before the previous one. They hardly wait then, and the stop comes
            one check later, on all processes alike. False stops at the check itself, and waits for all at each.
        verbose: Whether process 0 prints what stopped training.
        end_epoch_when_exhausted: Whether the epoch ends on all processes when the data of one ends, instead of hanging.
            What the others have left is not used in this epoch. Loaders without a length cost a reduction each batch.
        requeue_on_signals: Signals that stop training, too, and after whose checkpoint the SLURM job goes back to the
            queue: ``["SIGUSR1"]`` with ``#SBATCH --signal=USR1@120``. Outside of SLURM they only stop training.

    Raises:
        TypeError: If signals are no list.
        ValueError: If an argument is out of its range.
        RuntimeError: On all processes, if SLURM does not take the job back; the checkpoint is there then.

    Source of the semantics: accelerate 1.15 ``Accelerator.set_trigger``, ``check_trigger``; lightning 2.6
    ``EarlyStopping``.
    """

    def __init__(
        self,
        condition: Condition | None = None,
        check_every_n_steps: int = 1,
        stop_on_nonfinite_loss: bool = False,
        stop_on_signals: Iterable[int | str] = (),
        lag: bool = True,
        verbose: bool = True,
        end_epoch_when_exhausted: bool = False,
        requeue_on_signals: Iterable[int | str] = (),
    ) -> None:
        if condition is not None and not callable(condition):
            raise TypeError(
                f"condition must be a function of (trainer, pl_module, outputs, batch, batch_idx), got {condition!r}."
            )
        check_count("check_every_n_steps", check_every_n_steps)
        self.condition = condition
        self.check_every_n_steps = check_every_n_steps
        self.stop_on_nonfinite_loss = stop_on_nonfinite_loss
        self.lag = lag
        self.verbose = verbose
        requeue_on = parse_signals(requeue_on_signals, "requeue_on_signals")
        self._requeue_on = {number.name for number in requeue_on}
        self._signals = SignalNotes([*parse_signals(stop_on_signals, "stop_on_signals"), *requeue_on])
        self._epoch_end = EpochEnd() if end_epoch_when_exhausted else None
        self._names = [DEFAULT, _CONDITION, _FAILED, _NONFINITE, *(_SIGNAL + s.name for s in self._signals.signals)]
        self._forget()

    def _forget(self) -> None:
        self.stopped_step: int | None = None
        """``trainer.global_step`` at which the processes agreed to stop."""
        self.reason: str | None = None
        """The cause: ``"condition"``, ``"non-finite loss"``, ``"set_trigger()"``, a signal's name, or several."""
        self.triggered_by: tuple[int, ...] = ()
        """The processes that set it."""
        self.checkpoint_path: str | None = None
        """The checkpoint that was saved for a signal."""
        self._is_resuming = False
        self._start()

    def _start(self) -> None:
        """Forget what belongs to one call of ``fit``."""
        self._num_steps = 0
        self._nonfinite: Tensor | None = None
        self._nonfinite_before: Tensor | None = None
        self._failure: Exception | None = None
        self._asked_to_stop = False

    # ------------------------------------------------------------------ hooks
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        if stage == "fit":
            self._forget()
            if self._requeue_on and slurm_job() is None:
                _log.info("requeue_on_signals: this is not a SLURM job, so a signal only stops training.")
            # Before those that save, which record the stop then; after all others, so that a signal's checkpoint
            # has what they did after the batch. A new list: Lightning is iterating over the old one.
            owner: Any = trainer  # a connector gives it its callbacks, which type checkers do not see
            others = [callback for callback in owner.callbacks if callback is not self]
            place = next((i for i, callback in enumerate(others) if isinstance(callback, Checkpoint)), len(others))
            owner.callbacks = [*others[:place], self, *others[place:]]

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.install()  # Lightning has set its own just before

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start()
        self._signals.install()
        if self._epoch_end is not None:
            self._epoch_end.start(trainer)
        if self._is_resuming:
            self._is_resuming = False
            skip_used_batches(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._epoch_end is not None:
            self._epoch_end.start(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._epoch_end is not None:
            self._epoch_end.before_batch(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ask_condition(trainer, pl_module, outputs, batch, batch_idx)
        if self.stop_on_nonfinite_loss:
            self._note_loss(outputs, pl_module)
        loop = trainer.fit_loop.epoch_loop
        if loop._should_accumulate() and not loop._num_ready_batches_reached():
            return  # a stop here would lose the gradients of an open window
        self._num_steps += 1
        if self._num_steps % self.check_every_n_steps == 0:
            self._check(trainer, blocking=not self.lag)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._epoch_end is not None:
            self._epoch_end.after_epoch(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer, blocking=True)  # what came too late for the last check; nothing is left for a next fit
        # After an exception Lightning puts the handlers back, with all others, when it has cleaned up.
        self._signals.remove()

    # ------------------------------------------------------------------ what this process has to say
    def _ask_condition(self, *args: Any) -> None:
        if self.condition is None or self._failure is not None:
            return
        try:
            if self.condition(*args):
                set_trigger(_CONDITION)
        except Exception as error:  # noqa: BLE001 (raised in the next check, on all processes)
            self._failure = error
            set_trigger(_FAILED)

    def _note_loss(self, outputs: Any, pl_module: LightningModule) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            if pl_module.automatic_optimization:
                return  # training_step returned None: Lightning has skipped the batch
            raise RuntimeError(
                "stop_on_nonfinite_loss=True needs the loss, but training_step returned no loss. Return the loss, or a "
                "dict with it under 'loss'."
            )
        if isinstance(outputs, Mapping) and outputs.get("num_items") == 0:
            return  # the mean over no items, which weighs nothing
        nonfinite = ~torch.isfinite(loss.detach()).all()
        self._nonfinite = nonfinite if self._nonfinite is None else self._nonfinite | nonfinite

    def _set_own_triggers(self, *, at_once: bool) -> None:
        for number in self._signals.take():
            set_trigger(_SIGNAL + number.name)
        nonfinite, self._nonfinite = self._nonfinite, None
        if at_once:
            flags = [self._nonfinite_before, nonfinite]
            self._nonfinite_before = None
        else:
            flags, self._nonfinite_before = [self._nonfinite_before], nonfinite
        if any(bool(flag) for flag in flags if flag is not None):
            set_trigger(_NONFINITE)

    # ------------------------------------------------------------------ agreeing and acting
    def _check(self, trainer: Trainer, *, blocking: bool) -> None:
        self._set_own_triggers(at_once=blocking or trainer.strategy.root_device.type == "cpu")
        found = [name for name, is_set in check_triggers(blocking, self._names).items() if is_set]
        if _FAILED in found:
            self._raise_failure()
        signals = [name.removeprefix(_SIGNAL) for name in found if name.startswith(_SIGNAL)]
        if found and (signals or not self._asked_to_stop):
            self._asked_to_stop = True
            self.stopped_step = trainer.global_step
            self.reason = ", ".join([*signals, *(_REASONS[name] for name in found if name in _REASONS)])
            self.triggered_by = tuple(sorted({process for name in found for process in triggered_by(name)}))
            self._report(
                f"Training stops at step {self.stopped_step} (epoch {trainer.current_epoch}): {self.reason}, from "
                f"process {', '.join(map(str, self.triggered_by))}."
            )
            trainer.should_stop = True
        if signals:
            self._save(trainer)
            if self._requeue_on.intersection(signals) and (job := slurm_job()) is not None:
                self._requeue(trainer, job)
            raise terminated(signal.Signals[signals[0]])

    def _raise_failure(self) -> None:
        """Raise on all processes what the condition raised on some.

        Raises:
            RuntimeError: Where the condition itself did not raise.
        """
        text = None if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"
        everyone = gather_object([text])
        if self._failure is not None:
            raise self._failure
        lines = [f"process {process}: {text}" for process, text in enumerate(everyone) if text is not None]
        raise RuntimeError("\n".join(["The condition of TriggerEarlyStopping failed.", *lines]))

    def _save(self, trainer: Trainer) -> None:
        first = trainer.checkpoint_callback
        folder, last, extension = trainer.default_root_dir, "last", ".ckpt"
        if isinstance(first, ModelCheckpoint):  # the names that its search for ckpt_path="last" knows
            folder = str(first.dirpath or folder)
            last, extension = first.CHECKPOINT_NAME_LAST, first.FILE_EXTENSION
        name = f"{last}-stopped-epoch={trainer.current_epoch}-step={trainer.global_step}{extension}"
        self.checkpoint_path = os.path.join(folder, name)
        trainer.save_checkpoint(self.checkpoint_path)
        wait: Callable[[], None] | None = getattr(trainer.strategy, "wait_for_saves", None)
        if wait is not None:  # with async_save=True the process would end while the checkpoint is being written
            wait()
        self._report(f"Saved {self.checkpoint_path}. Resume with fit(..., ckpt_path={self.checkpoint_path!r}).")

    def _requeue(self, trainer: Trainer, job: str) -> None:
        for logger in trainer.loggers:  # SLURM ends the processes soon
            logger.finalize("finished")
        requeue(job)
        self._report(f"SLURM job {job} is requeued.")

    def _report(self, message: str) -> None:
        if self.verbose:
            rank_zero_info(message)
        else:
            _log.info(message)

    # ------------------------------------------------------------------ checkpoints
    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "stopped_step": self.stopped_step,
            "reason": self.reason,
            "triggered_by": list(self.triggered_by),
            "checkpoint_path": self.checkpoint_path,
        }

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._is_resuming = trainer.state.fn == TrainerFn.FITTING

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stopped_step = state_dict["stopped_step"]
        self.reason = state_dict["reason"]
        self.triggered_by = tuple(state_dict["triggered_by"])
        self.checkpoint_path = state_dict["checkpoint_path"]


# ------------------------------------------------------------------------------------------------
# Signals: the handler records them, since it may run between any two lines of training; the loop acts on them.


_NEVER = frozenset({"SIGKILL", "SIGSTOP"})


class SignalNotes:
    """Replaces the handlers of some signals by one that only remembers them.

    Args:
        signals: Which ones.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signals = tuple(dict.fromkeys(signals))
        self._previous: dict[signal.Signals, Any] = {}
        self._noted: list[signal.Signals] = []

    def install(self) -> None:
        """Replace the handlers; those that are ours already stay.

        Raises:
            RuntimeError: Outside of the main thread, where Python sets no handlers.
        """
        if self.signals and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "stop_on_signals needs Trainer.fit in the main thread: Python allows signal handlers only there. "
                "Call fit there, or call set_trigger() in your own handler."
            )
        for number in self.signals:
            if signal.getsignal(number) != self._note:
                self._previous[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Put the replaced handlers back."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note:  # else somebody else has taken over since
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def take(self) -> list[signal.Signals]:
        """Return the signals since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted.append(signal.Signals(number))


def parse_signals(values: Iterable[int | str], argument: str) -> list[signal.Signals]:
    """Return the signals that a user names.

    Args:
        values: Each as ``signal.SIGTERM``, its number, or its name.
        argument: Names them in errors.

    Raises:
        TypeError: If it is a single one.
        ValueError: If one is unknown here, or cannot be caught.
    """
    if isinstance(values, int | str):
        raise TypeError(f"{argument} must be a list of signals, got {values!r}.")
    return [_parse(value, argument) for value in values]


def _parse(value: int | str, argument: str) -> signal.Signals:
    try:
        number = signal.Signals[value] if isinstance(value, str) else signal.Signals(value)
    except (KeyError, ValueError):
        known = ", ".join(sorted(number.name for number in signal.Signals if number.name not in _NEVER))
        raise ValueError(f"{argument}: there is no signal {value!r} on this system. Choose from {known}.") from None
    if number.name in _NEVER:
        raise ValueError(f"{argument}: {number.name} cannot be caught. Use SIGTERM or SIGUSR1.")
    return number


# ------------------------------------------------------------------------------------------------
# Requeueing a SLURM job from the training loop instead of from a signal handler.


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
    """Make SLURM end all processes of ``job`` and restart it later; all processes must call it, one asks SLURM.

    Args:
        job: Result of `slurm_job`.

    Raises:
        RuntimeError: On all processes, if SLURM does not take it back.
    """
    [refusal, *_] = gather_object([ask_slurm_to_requeue(job) if PartialState().is_main_process else None])
    if refusal is not None:
        raise RuntimeError(f"SLURM job {job} could not be requeued: {refusal}")


def ask_slurm_to_requeue(job: str) -> str | None:
    """Ask SLURM; return why it does not take the job back."""
    by_hand = f"`scontrol requeue {job}`, if allowed, starts it again"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return f"there is no `scontrol` on this node. {by_hand} from another node."
    except subprocess.TimeoutExpired:
        return f"SLURM did not answer within {_TIMEOUT_S:g} s. {by_hand} when it does."
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
    return f"it reports {said!r}. Submit with `#SBATCH --requeue`; {by_hand}."


# ------------------------------------------------------------------------------------------------
# Ending an epoch on all processes when the data of one of them ends.


_EXHAUSTED = "accelight/data exhausted"
_EMPTY = "accelight/data empty"


class EpochEnd:
    """Lets the process with the least data decide how long an epoch is.

    Loaders that know their length are compared once. Others are asked at each batch, whether it is their last one:
    before the batch is used, so that its gradients are reduced and stepped with on all processes alike.
    """

    def __init__(self) -> None:
        self._agreed_loader: Any = None
        self._ask_each_batch = False

    def start(self, trainer: Trainer) -> None:
        """Agree on lengths, where the loaders are new.

        Raises:
            NotImplementedError: With ``training_step(dataloader_iter)``, where nobody knows which batch is the last.
        """
        loop: Any = trainer.fit_loop
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise NotImplementedError(
                "end_epoch_when_exhausted=True is not possible with training_step(dataloader_iter): the last batch "
                "is detected too late. Use training_step(batch)."
            )
        if loop._combined_loader is self._agreed_loader:
            return
        self._agreed_loader = loop._combined_loader
        lengths: list[Any] = gather_object([(trainer.num_training_batches, trainer.val_check_batch)])
        self._ask_each_batch = PartialState().num_processes > 1 and any(math.isinf(num) for num, _ in lengths)
        if not self._ask_each_batch:
            loop.max_batches = min(num for num, _ in lengths)
            if trainer.val_check_batch is not None:
                trainer.val_check_batch = min(interval for _, interval in lengths)

    def before_batch(self, trainer: Trainer) -> None:
        """Make this batch the epoch's last one if it is the last one of any process.

        Raises:
            RuntimeError: If a process has had no batch at all.
        """
        if not self._ask_each_batch:
            return
        loop = trainer.fit_loop.epoch_loop
        if loop._num_ready_batches_reached():
            set_trigger(_EXHAUSTED)
        if self._ask()[_EXHAUSTED]:
            loop.batch_progress.is_last_batch = True

    def after_epoch(self, trainer: Trainer) -> None:
        """Tell the others, who wait in `before_batch`, that there was no batch here."""
        if self._ask_each_batch and trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            set_trigger(_EMPTY)
            self._ask()

    @staticmethod
    def _ask() -> dict[str, bool]:
        found = check_triggers(names=[_EXHAUSTED, _EMPTY])
        if found[_EMPTY]:
            raise RuntimeError(
                f"The training data of process {', '.join(map(str, triggered_by(_EMPTY)))} had no batch in this "
                "epoch. Each process needs at least one: provide more data, or start fewer processes."
            )
        return found
