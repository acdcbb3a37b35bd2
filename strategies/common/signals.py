"""SIGTERM under the strategies: a handler records it, and all ranks leave the Trainer's loops at the same batch."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...state.collectives import all_reduce_max_async, sending_device
from ...state.deadlocks import watch_for_deadlocks, watch_of_live_group
from ...state.process_group import group_store, require_group
from ...state.rendezvous import num_ranks, shared_number
from ..upstream.lightning import SIGTERMException, Trainer, TrainerFn, _ChildProcessObserver
from ..upstream.patches import Patches
from .items import ItemAverage

_log = logging.getLogger(__name__)


BATCH_BEGINS, TRAINING_ENDS, EVALUATION_ENDS = "starts a training batch", "ends its training", "ends an evaluation"
PLACES = (BATCH_BEGINS, TRAINING_ENDS, EVALUATION_ENDS)


def terminated(number: int = signal.SIGTERM) -> SIGTERMException:
    """Return the exception that ends a run after a signal, see `mark_terminated`."""
    exception = SIGTERMException()
    mark_terminated(exception, number)
    return exception


def mark_terminated(exception: SIGTERMException, number: int = signal.SIGTERM) -> None:
    """Give the exception the exit status of a run that a signal ends: 128 and the signal's number, 143 for SIGTERM.

    Lightning 2.6 ends with 0, its main branch with 143 (Lightning-AI/pytorch-lightning#21623). A status of 0 says that
    the work is done: torchrun would not start the process again, a Kubernetes job would be complete, and on SLURM jobs
    that wait for this one (``afterok``) would begin.

    Args:
        exception: Raised, or about to be.
        number: The signal.
    """
    exception.code = 128 + int(number)
    # Lightning's launcher kills its own process when one that it has started ends with a status before it does; those
    # received the signal, too, and may be quicker.
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []


class Termination:
    """Takes the place of what Lightning does about SIGTERM when there are several ranks, and about SLURM's requeueing.

    Lightning's handler (2.6) broadcasts, in the middle of whatever collective the signal finds, and a rank that knows
    of the signal leaves its loop without the others. Here the handler only takes note. Before each training batch, and
    where a loop ends, the ranks reduce one number, if they have not begun to in the batch before, with something else:
    a small reduction costs as much as a large one, and next to nothing where nobody waits for it at once. In
    evaluation, where they need not have equally many batches, a rank that received the signal writes to the store how
    far all go.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._is_noted = False
        self._patches = Patches("trainer")
        self._reductions: list[Callable[[], Sequence[int]]] = []
        """Whether to leave, as the last of their numbers: the reports of all ranks in the present batch."""
        self._count = 0
        """Evaluation batches of this run: the same number on all ranks that run collectives in them."""
        self.run = ""
        """Names the present run on the store; the same on all ranks."""
        self._device = torch.device("cpu")
        """The device on which ranks reduce the number."""
        self.message: Callable[[], int] = lambda: 0
        """Another number that this rank reports with each message; the ranks learn the maximum."""
        self.receive: Callable[[int], None] = lambda of_all: None
        """Takes the maximum of all ranks' messages, before a training batch."""
        self.items = ItemAverage(is_on=False)
        """Its numbers travel with those of `all_reduce_max_async`."""

    def begin_run(self) -> None:
        """Name a run as soon as the processes are connected: from here on one that fails ends it for all."""
        self.detach()
        if num_ranks() > 1:
            self.run = f"accelight/run/{shared_number('a run')}"
            if (watch := watch_for_deadlocks(require_group("A fit"))) is not None:
                watch.runs.add(self.run)

    def attach(self, trainer: Trainer) -> None:
        """Take over for one run, before the Trainer installs its handlers."""
        self._restore_methods()
        self._trainer = trainer
        self._is_noted, self._reductions, self._count = False, [], 0
        self._patches.put(_connector(trainer), "_sigterm_notifier_fn", self._note)
        self._patches.put(_connector(trainer), "_slurm_sigusr_handler_fn", self._refuse_requeueing)
        if trainer.world_size > 1:
            self._device = sending_device(torch.device("cpu"), require_group("SIGTERM"))
            self._patches.put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self.agree_before_batch)

    def detach(self) -> None:
        """End a run, and give Lightning's methods back."""
        if (watch := watch_of_live_group()) is not None:
            watch.runs.discard(self.run)
        self.run = ""
        self._restore_methods()

    def _restore_methods(self) -> None:
        self._trainer = None
        self._reductions.clear()  # what was begun knows the process group
        self._patches.remove()

    def _note(self, number: int, _: FrameType | None) -> None:
        trainer = self._trainer
        if self._is_noted or trainer is None:
            return
        self._is_noted = True
        _log.info("Process %d received SIGTERM; training ends after this batch or the next.", trainer.global_rank)
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)  # to the processes that it started
        if trainer.world_size == 1:
            _connector(trainer).received_sigterm = True

    def _refuse_requeueing(self, number: int, _: FrameType | None) -> None:
        """Stand where Lightning would save in the handler, in the middle of a step or of a collective."""
        name = signal.Signals(number).name
        if self._trainer is not None and self._trainer.global_rank == 0:
            _log.error(
                "Received %s and saved nothing: a sharded model cannot be saved in a signal handler. To save at the "
                "end of the step and requeue the SLURM job: TriggerEarlyStopping(requeue_on_signals=[%r]).",
                name,
                name,
            )

    # ------------------------------------------------------------------ where all ranks come
    def agree(self, place: str = TRAINING_ENDS) -> None:
        """Leave if any rank received the signal; all ranks must call it.

        Args:
            place: Where this rank is, one of `PLACES`.

        Raises:
            SIGTERMException: On every rank.
            RuntimeError: On every rank, if they are at different places.
        """
        if self._trainer is None:
            return
        self._reductions.clear()
        is_noted = self._is_noted
        if self._trainer.world_size > 1:
            number = PLACES.index(place)
            sent = [self.message(), is_noted, number, -number]
            noted = torch.tensor(sent, dtype=torch.int32, device=self._device)
            dist.all_reduce(noted, dist.ReduceOp.MAX, require_group("SIGTERM"))
            of_all, any_signal, last, first = noted.tolist()
            if last != -first:
                _refuse_different(place)
            self.receive(of_all)
            is_noted = bool(any_signal)
        if is_noted:
            self._leave()

    def all_reduce_max_async(self, values: Sequence[int]) -> Callable[[], Sequence[int]]:
        """Begin to reduce small numbers to their maximum over all ranks, and report the signal with them.

        A signal from before is known to all of them at the next training batch, and they need not meet there.
        All ranks must call it.

        Returns:
            A function that waits for the numbers.
        """
        of_items = self.items.message()
        wait = all_reduce_max_async([*values, *of_items, self.message(), int(self._is_noted)])
        self.items.receive(lambda: wait()[len(values) : -2])
        if self._trainer is not None and self._trainer.world_size > 1:
            self._reductions.append(wait)
        return lambda: wait()[: len(values)]

    def agree_before_batch(self) -> None:
        """Leave if any rank received the signal, before a training batch; all ranks must call it.

        Raises:
            SIGTERMException: On every rank.
        """
        reductions, self._reductions = self._reductions, []
        if not reductions:
            self.agree(BATCH_BEGINS)
            return
        ends = [wait()[-2:] for wait in reductions]
        self.receive(max(of_all for of_all, _ in ends))
        if max(is_noted for _, is_noted in ends):
            self._leave()

    def end_evaluation(self) -> None:
        """Agree where validation, testing or prediction ends: within fit, training continues to where ranks agree."""
        self._reductions.clear()  # that was before
        if self._trainer is not None and self._trainer.state.fn != TrainerFn.FITTING:
            self.agree(EVALUATION_ENDS)

    # ------------------------------------------------------------------ where each rank comes by itself
    def before_evaluation_batch(self) -> None:
        """Leave at the batch after the one at whose start a rank knew of the signal.

        No rank can be through with that batch before this one has begun it: where a forward gathers, all see what was
        said when they come to the next. Where it does not (ZeRO up to stage 2), each leaves at its own next batch, and
        one that has none left may end with an error of its collectives, when the processes of the others are gone.

        Raises:
            SIGTERMException: On every rank that has another batch.
        """
        trainer = self._trainer
        if trainer is None or trainer.world_size == 1:
            return
        store = group_store(f"{self.run}/sigterm")
        if store.check(["last"]):
            if self._count > int(store.get("last")):
                self._leave()
        elif self._is_noted:
            store.set("last", f"{self._count}")
        self._count += 1

    def _leave(self) -> None:
        if self._trainer is not None:
            _connector(self._trainer).received_sigterm = True
        raise terminated()


def _refuse_different(place: str) -> NoReturn:
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, place)
    raise RuntimeError(
        "Processes are at different places: "
        + "; ".join(f"process {rank} {each}" for rank, each in enumerate(everyone))
        + ". Stop all processes at the same batch: decide with a value that they share, for example from "
        "self.log(..., sync_dist=True) or trainer.strategy.reduce_boolean_decision(stop)."
    )


def _connector(trainer: Trainer) -> Any:
    return trainer._signal_connector
