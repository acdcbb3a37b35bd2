"""Follows the Trainer's loop for every strategy: accumulation windows, the position in the data, deferred weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from ...state import GradientAccumulationPlugin, GradientState
from ...state.gradient_state import ShortWindows
from ...state.rendezvous import add_note, report_missing_ranks
from ..sharded_tensors.user_code import recomputing
from ..upstream.lightning import ParallelStrategy, SIGTERMException, Trainer, rank_zero_info, sized_len
from ..upstream.lightning_package import other_package_hint, other_package_is_imported
from ..upstream.patches import Patches
from .broadcast import BufferSync
from .dataloader_state import DataLoaderStates, set_epoch, with_shared_order
from .items import ItemAverage
from .launch import ACCUMULATION, SubprocessScriptLauncher, check_devices, warn_if_overruled
from .modules import check_callbacks
from .sections import TimingCallback, Timings, describe_failure, is_out_of_memory
from .signals import Termination, mark_terminated

_REFUSED_CALLBACKS = {
    "BatchSizeFinder": (
        "lets each process decide for itself whether a batch fits, and those that disagree wait for each other. Use "
        "accelight.strategies.Tuner(trainer).scale_batch_size(module), in which all processes try the same sizes."
    )
}


class LoopFollowing(ParallelStrategy):
    """Comes before Lightning's strategy among the bases; `GradientState` is right in every hook then."""

    _tracker: LoopTracker
    _termination: Termination
    _process_group_backend: str | None
    _deferred_weights: DeferredWeightLoad
    _dataloader_states: DataLoaderStates
    _buffers: BufferSync
    where_group_starts = "PartialState(timeout=..., backend=...) or init_process_group()"
    """Code that may have started the process group before the strategy does, for messages."""

    @override
    def __repr__(self) -> str:
        # A Trainer of the other package says no more about a strategy than this.
        return f"<{type(self).__name__}: {other_package_hint()}>" if other_package_is_imported() else super().__repr__()

    @property
    def dataloader_states(self) -> DataLoaderStates:
        """The positions of stateful training loaders."""
        return self._dataloader_states

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.root_device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.is_global_zero

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # see `DeferredWeightLoad`

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is None:
            return
        if self.cluster_environment.creates_processes_externally:
            check_devices(self.num_processes)
        else:
            num_nodes = getattr(self, "num_nodes", 1)
            self._launcher = SubprocessScriptLauncher(self.cluster_environment, self.num_processes, num_nodes)

    def timings(self) -> Timings:
        """Return how long each process takes for a micro-batch, by section; any process can call it at any time.

        Raises:
            RuntimeError: Without a `Watchdog` among the Trainer's callbacks, which measures it.
        """
        trainer: Any = None if self.lightning_module is None else self.lightning_module.trainer
        for callback in [] if trainer is None else trainer.callbacks:
            if isinstance(callback, TimingCallback):
                return callback.timings()
        raise RuntimeError("strategy.timings() needs Trainer(callbacks=[Watchdog(), ...]), and a run under way.")

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return 0 if self.parallel_devices is None else len(self.parallel_devices)

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that see the same batches; they have consecutive ranks."""
        return 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of samplers, which divide samples over the present processes, not by ``Trainer(num_nodes=...)``.

        Processes that share one copy of the model see the same.
        """
        size = self.non_data_parallel_size
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    def _refuse_before_setup(self) -> None:
        """Refuse callbacks that Lightning would refuse in their ``setup()``, without saying what to do instead."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None:
            check_callbacks(trainer.callbacks, _REFUSED_CALLBACKS)  # type: ignore[attr-defined]

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is not None:
            return self._process_group_backend
        device = self.root_device
        if device.type == "cpu":
            return "gloo"
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"

    def _follow_buffers(self, root: torch.nn.Module) -> None:
        """Begin a fit of ``root``, sharded by now, with rank 0's buffers."""
        self._buffers.attach(root, self.root_device)
        self._termination.message, self._termination.receive = self._buffers.message, self._buffers.receive

    def _running_trainer(self) -> Trainer | None:
        """Return the Trainer if it is inside a loop over batches."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer if trainer is not None and trainer.state.stage is not None else None

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self._running_trainer()
        if trainer is not None:
            if trainer.training:
                self._tracker.note_train_batch(trainer, counted=False)
            else:
                self._tracker.note_evaluation_batch(trainer, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer = self._running_trainer()
        if trainer is not None:  # again, for training_step(dataloader_iter), whose batches pass nowhere else
            self._tracker.note_train_batch(trainer, counted=True)
        if batch_idx == 0:
            self._buffers.expect_changes()
        super().on_train_batch_start(batch, batch_idx)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._running_trainer()
        if trainer is not None and trainer.training:
            self._dataloader_states.take(trainer)
            dataloader = with_shared_order(dataloader, self.distributed_sampler_kwargs)
            set_epoch(dataloader, trainer)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if (trainer := self._running_trainer()) is not None:
            self._dataloader_states.attach(trainer)

    def _end_training_loop(self) -> None:
        self._tracker.close()
        self._dataloader_states.detach()

    @override
    def on_train_end(self) -> None:
        self._end_training_loop()
        super().on_train_end()
        self._termination.agree()  # for what came during the last batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers.forward(is_trained=self._is_automatic):
            output = super().training_step(*args, **kwargs)
        if self._is_automatic:
            self._tracker.items.take_output(output)
        return output

    @property
    def averages_over_items(self) -> bool:
        """Whether gradients are averaged over items, not over micro-batches."""
        return self._tracker.items.is_on

    @property
    def _is_automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        items, num_steps = self._tracker.items, GradientState().num_steps
        weighting = items.weighting(closure_loss, num_steps) if self._is_automatic else nullcontext()
        with recomputing(), weighting:
            return super().backward(closure_loss, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._termination.before_evaluation_batch()
        with self._buffers.forward(is_trained=False):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._termination.before_evaluation_batch()
        with self._buffers.forward(is_trained=False):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._termination.before_evaluation_batch()
        with self._buffers.forward(is_trained=False):
            return super().predict_step(*args, **kwargs)

    def _end_evaluation(self) -> None:
        self._tracker.end_evaluation()
        self._termination.end_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and not exception.code:  # raised by Lightning's own loops
            mark_terminated(exception)
        self._end_training_loop()
        super().on_exception(exception)
        failure = describe_failure(exception, self._running_trainer(), self.root_device)
        if is_out_of_memory(exception):
            add_note(exception, f"Process {self.global_rank} {failure}")
        report_missing_ranks(exception, self._termination.run, failure)


# ------------------------------------------------------------------------------------------------
# Reports the progress of the Trainer's loops to `GradientState`, where strategies, callbacks and user code read it.


class LoopTracker:
    """Follows the Trainer batch by batch.

    Args:
        gradient_accumulation: What the user gave the strategy, or None to follow ``accumulate_grad_batches`` alone.
    """

    def __init__(self, gradient_accumulation: GradientAccumulationPlugin | int | None = None) -> None:
        if isinstance(gradient_accumulation, int):
            gradient_accumulation = GradientAccumulationPlugin(num_steps=gradient_accumulation)
        self.plugin = gradient_accumulation or GradientAccumulationPlugin()
        self.items = ItemAverage(self.plugin.average_over == "items")
        self.window_position = 1
        """Place of the present micro-batch among those of its window that this fit has trained on, from 1."""
        self._first_batch = 1
        """The first batch of the window, in the Trainer's count of all batches that it has trained on."""
        self.last_batch: float = 0
        """The last one, in the same count; infinite until it is there."""
        self._has_warned = False
        self._short_windows: ShortWindows = "full"
        self._changes = ExitStack()
        self._loaders: list[Any] = []
        self._num_training_loaders = 0
        self._evaluated = (-1, 0)
        """Index of the evaluation's present loader, and how many batches it has given. Lightning counts over all."""

    def start_fit(self, trainer: Trainer, *, config: str | None = None) -> None:
        """Make the Trainer and the plugin agree on the number of accumulation steps.

        Where nobody gives one, ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS`` does; else a warning says that it does not. 1
        of the Trainer, its default, is not given.

        Args:
            trainer: About to fit.
            config: What a config that gives the number is called; the Trainer has it already.

        Raises:
            ValueError: If two give a number and they differ.
        """
        wanted, given = self.plugin.num_steps, trainer.accumulate_grad_batches
        other = where = f"{config}={given}" if config else f"Trainer(accumulate_grad_batches={given})"
        if wanted is not None:
            where = f"gradient_accumulation={wanted}"
        elif given == 1 and config is None:
            GradientState()._set_plugin(self.plugin)
            wanted = GradientState().num_steps  # from the environment
        if wanted is not None and wanted != given:
            if given != 1 or config is not None:
                raise ValueError(f"{where} and {other} differ. Set only one of them, or set both to the same number.")
            trainer.accumulate_grad_batches = wanted
        warn_if_overruled(ACCUMULATION, trainer.accumulate_grad_batches, where)
        self._set_num_steps(trainer.accumulate_grad_batches)
        self.window_position, self.last_batch, self._has_warned = 1, 0, False
        self._short_windows = self.plugin.resolve_short_windows()
        if not self.plugin.sync_with_dataloader:
            self._changes.enter_context(accumulate_across_epochs(trainer, self))

    def _set_num_steps(self, num_steps: int) -> None:
        GradientState()._set_plugin(replace(self.plugin, num_steps=num_steps))

    def note_train_batch(self, trainer: Trainer, *, counted: bool) -> None:
        """Take note of the batch that training is about to use.

        Args:
            trainer: The Trainer, inside its training loop.
            counted: Whether the loop's progress counts this batch as ready already.
        """
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        batch = progress.current.ready + (0 if counted else 1)  # of the epoch, from 1
        trained = progress.total.started + 1  # of all that are trained on: those left out by a hook's -1 do not count
        num_steps = trainer.accumulate_grad_batches
        state = GradientState()
        if state.num_steps != num_steps:  # a GradientAccumulationScheduler changes it from epoch to epoch
            self._set_num_steps(num_steps)
        self._follow(trainer.train_dataloader, above=0)
        self._num_training_loaders = 1
        is_last = progress.is_last_batch or batch == trainer.num_training_batches
        carried = not self.plugin.sync_with_dataloader
        if trained > self.last_batch or not (carried or (batch - 1) % num_steps):
            self._first_batch = trained
        self.window_position = trained - self._first_batch + 1
        ends_within_epoch = batch % num_steps == 0 or is_last  # Lightning's rule
        window_ends = self.window_position >= num_steps if carried else ends_within_epoch
        self.last_batch = trained if window_ends else math.inf
        if counted and self.window_position == 1:
            self.items.begin_window()
        self._set_end(batch, is_last)
        state._set_sync_gradients(window_ends)
        if (
            counted
            and window_ends
            and self.window_position < num_steps
            and not self.items.is_on
            and trainer.lightning_module.automatic_optimization
        ):
            self._warn_short_window(num_steps)

    def _warn_short_window(self, num_steps: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        divisor, other = (
            (self.window_position, '"full" divides by the full number, like Lightning and Accelerate')
            if self._short_windows == "mean"
            else (num_steps, '"mean" divides by the number of micro-batches in the window')
        )
        rank_zero_info(
            f"An accumulation window ended after {self.window_position} of {num_steps} micro-batches; its gradients "
            f"are divided by {divisor}. GradientAccumulationPlugin(short_windows=...): {other}."
        )

    def note_evaluation_batch(self, trainer: Trainer, dataloader_idx: int) -> None:
        """Take note of the batch that validation, testing or prediction is about to use."""
        loop: Any = trainer._active_loop
        loaders = loop._combined_loader.flattened
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else loop._combined_loader
        self._follow(loader, above=self._num_training_loaders)
        limits = loop.max_batches
        limit = limits[dataloader_idx] if isinstance(limits, list) and dataloader_idx < len(limits) else math.inf
        previous, batch = self._evaluated
        batch = batch + 1 if previous == dataloader_idx else 1
        self._evaluated = dataloader_idx, batch
        self._set_end(batch, loop.batch_progress.is_last_batch or batch == limit)

    @property
    def is_first_of_evaluation(self) -> bool:
        """Whether the evaluation's batch is the first of its loader."""
        return self._evaluated[1] == 1

    def _set_end(self, batch: int, is_last: bool) -> None:
        """Say whether the loop uses no other batch than this; a limit may end it before the loader's padding."""
        loader = self._loaders[-1]
        length = sized_len(loader) if is_last else None
        cut_short = length is not None and batch < length
        GradientState()._set_end_of_dataloader(loader, is_last, cut_short=cut_short)

    def _follow(self, loader: Any, *, above: int) -> None:
        """Make ``loader`` the active one; the lowest ``above`` of the stack stay open under it."""
        while len(self._loaders) > above and self._loaders[-1] is not loader:
            self._close_last()
        if len(self._loaders) == above:
            self._loaders.append(loader)
            GradientState()._add_dataloader(loader)

    def _close_last(self) -> None:
        GradientState()._remove_dataloader(self._loaders.pop())

    def end_evaluation(self) -> None:
        """Forget the evaluation's loaders; a training loop that it interrupted continues."""
        self._evaluated = (-1, 0)
        while len(self._loaders) > self._num_training_loaders:
            self._close_last()

    def close(self) -> None:
        """Forget every loader; outside of loops gradients are always synchronised."""
        self._num_training_loaders = 0
        self.end_evaluation()
        GradientState()._set_sync_gradients(True)
        self._changes.close()

    def gradient_factor(self) -> float:
        """Return the factor of the present window's gradients when it ends.

        1 for a full window over whose micro-batches the loss is averaged, 0 for one without items.

        Lightning divides each loss by the full number of steps before it can know that the window will be cut short
        (Lightning-AI/pytorch-lightning#19987).
        """
        if self.items.is_on:
            return self.items.factor()
        return GradientState().num_steps / self.window_position if self._short_windows == "mean" else 1.0


@contextmanager
def accumulate_across_epochs(trainer: Trainer, tracker: LoopTracker) -> Iterator[None]:
    """Make the Trainer's loop step, and clear gradients, where the tracker says, instead of counting within epochs.

    Args:
        trainer: Changed inside this context.
        tracker: Follows it.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    make_zero_grad = loop.automatic_optimization._make_zero_grad_fn

    def should_accumulate() -> bool:  # asked in the batch, and after it, for schedulers of learning rates
        return loop.batch_progress.total.started < tracker.last_batch

    def make_zero_grad_fn(batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        # Lightning 2.6 clears gradients where this index is a multiple of the accumulation; 1 never is.
        return make_zero_grad(0 if tracker.window_position == 1 else 1, optimizer)

    with Patches("trainer") as patches:
        patches.put(loop, "_should_accumulate", should_accumulate)
        patches.put(loop.automatic_optimization, "_make_zero_grad_fn", make_zero_grad_fn)
        yield


# ------------------------------------------------------------------------------------------------
# Defers loading weights until the model is sharded, so that a resume keeps Lightning's order of events.
#
# The Trainer reads a checkpoint, shows it to the hooks and restores callbacks before the strategy sets up the model. So
# what callbacks do in ``on_fit_start`` (a `Timer` that has run out, the parameter groups of `BaseFinetuning`) follows
# the checkpoint, and optimizers are restored after that. A strategy that had all of this done after its setup, as
# Lightning's sharded ones have, would restore callbacks when ``on_fit_start`` is over.
#
# Source of the order: lightning 2.6 ``Trainer._run``.


STORED_WEIGHTS = "sharded_state_dict"
"""Key in the Trainer's checkpoint, while it is restored, of what loads weights that only shards can take."""


class DeferredWeightLoad:
    """Holds the loading of weights back until the strategy has set up their model."""

    def __init__(self) -> None:
        self._load: Callable[[], None] | None = None
        self._has_model = False

    def begin(self) -> None:
        """Begin a run: its model is yet to be set up."""
        self._load, self._has_model = None, False

    def load(self, load: Callable[[], None]) -> None:
        """Call ``load`` now, or at the run's `model_is_set_up`."""
        if self._has_model:
            load()
        else:
            self._load = load

    def model_is_set_up(self) -> None:
        """Load what was held back."""
        self._has_model = True
        load, self._load = self._load, None
        if load is not None:
            load()
