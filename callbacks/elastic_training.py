"""`ElasticTraining`: the same training on any number of processes, also when that number changes at a restart.

Below the callback are the batches that every process gets, the checks of their loader, the Trainer's counters after a
restart, and `skip_used_batches`, by which other callbacks resume within an epoch.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from ..state.utils import check_count, named_arguments
from ..strategies.common.dataloader_state import is_at_end
from ..strategies.loading import newest_checkpoint
from ..strategies.upstream.lightning import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    RunningStage,
    Trainer,
    _DataLoaderIterDataFetcher,
    _get_dataloader_init_args_and_kwargs,
    _reinstantiate_wrapped_cls,
    _set_sampler_epoch,
    check_trainer,
    rank_zero_info,
    rank_zero_warn,
)
from ..strategies.upstream.patches import Patches


@named_arguments
class ElasticTraining(Callback):
    """Trains alike on any number of processes, and continues a run with another number.

    ::

        Trainer(strategy="accel_fsdp2", callbacks=[
            ElasticTraining(global_batch_size=512, max_batch_size=8, resume_from="checkpoints"),
            ModelCheckpoint("checkpoints", every_n_train_steps=100),
        ])

    Under ``torchrun --nnodes=1:4 --max-restarts=...`` the script is started again, with the processes that are left,
    whenever one is lost or comes back. Then every sample of an epoch is used once over all these runs, every optimizer
    step has the samples, the gradient and the learning rate that it would have had without the interruption, and steps
    after the last checkpoint are repeated.

    - Each optimizer step has ``global_batch_size`` samples: the batch size of each process and
      ``accumulate_grad_batches`` are set so that they make that up. The loader's own ``batch_size`` is not used.
    - The order of samples comes from ``seed`` and the epoch. A loader with ``shuffle=True`` is shuffled, one with
      ``drop_last=True`` leaves an incomplete last global batch out; else its samples are divided as equally as
      possible, and each counts the same. A process without a sample computes one that does not count.
    - The loss that ``training_step`` returns must be a mean over the samples of its batch, or with
      ``average_over="items"`` over its items.
    - ``limit_train_batches`` and ``val_check_interval`` as whole numbers, and the ``frequency`` of schedules with
      ``interval="step"``, count optimizer steps, which are the same on any number of processes.
    - A checkpoint may be of any moment. A run that resumes from it repeats an open accumulation window.
    - Processes that share one copy of the model (tensor or sequence parallelism) have the same samples, and count as
      one. A run may continue with other sizes.

    Two things differ: random numbers (dropout, augmentation), and layers that use the whole micro-batch (BatchNorm), if
    its size changes.

    Args:
        global_batch_size: Samples of one optimizer step, over all processes.
        max_batch_size: Most samples of one process in one micro-batch, as memory allows. Default: no limit, and so no
            accumulation.
        resume_from: Folder of checkpoints that all processes see: ``fit`` continues from the newest whole one, see
            `accelight.strategies.newest_checkpoint`; ``fit(ckpt_path=...)`` is for the first start then. Default:
            ``ckpt_path`` alone says.
        seed: Of the first epoch's order.

    Raises:
        ValueError: If an argument is out of its range; in ``fit``, if the processes, the Trainer, its loader or the
            checkpoint do not fit, with what does.

    Source of the idea: horovod 0.28 ``torch.elastic.ElasticSampler``; streaming 0.13 ("elastic determinism").
    """

    def __init__(
        self,
        global_batch_size: int,
        max_batch_size: int | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        check_count("global_batch_size", global_batch_size)
        if max_batch_size is not None:
            check_count("max_batch_size", max_batch_size)
        self.global_batch_size = global_batch_size
        self.max_batch_size = max_batch_size
        self.resume_from = resume_from
        self.seed = seed
        self.resumed_from: str | None = None
        """The checkpoint that ``resume_from`` led to; None where there was none."""
        self.division: Division | None = None
        """The division of a global batch in this run."""
        self._batches: GlobalBatches | None = None
        self._rank = 0
        self._resumed: dict[str, int] = {}
        self._first_step: dict[int, int] = {}
        self._patches = Patches("callbacks")

    # ------------------------------------------------------------------ setup
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        self._close()
        if stage != "fit":
            return
        _check_accumulation(trainer, pl_module, 1)
        layout = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        group_size = trainer.world_size // layout["num_replicas"]
        self.division = Division.of(self.global_batch_size, layout["num_replicas"], self.max_batch_size, group_size)
        self._rank, self._batches, self._resumed, self._first_step = layout["rank"], None, {}, {}
        steps = self.division.accumulate_grad_batches
        self._patches.put(trainer, "accumulate_grad_batches", steps)
        if isinstance(trainer.limit_train_batches, int):
            self._patches.put(trainer, "limit_train_batches", trainer.limit_train_batches * steps)
        if isinstance(trainer.val_check_interval, int):
            self._patches.put(trainer, "val_check_interval", trainer.val_check_interval * steps)
        self._patches.put(trainer._data_connector, "_prepare_dataloader", self._dealing(trainer))
        if getattr(trainer.strategy, "averages_over_items", False):  # which weigh as many as they are by themselves
            self._patches.put(pl_module, "training_step", self._counting(trainer, pl_module))
        else:
            self._patches.put(trainer.strategy, "training_step", self._weighing(trainer))
        self.resumed_from = None if self.resume_from is None else newest_checkpoint(self.resume_from)
        if self.resumed_from is not None:
            self._patches.put(trainer._checkpoint_connector, "resume_start", self._resuming(trainer))
        rank_zero_info(
            f"ElasticTraining: {self.global_batch_size} samples a step = "
            f"{_replicas(layout['num_replicas'], group_size)} x {steps} micro-batches x {self.division.batch_size}"
            + ("." if self.resume_from is None else f"; from {self.resumed_from or 'the beginning'}.")
        )

    def _close(self) -> None:
        self._patches.remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _resuming(self, trainer: Trainer) -> Callable[..., None]:
        resume_start = trainer._checkpoint_connector.resume_start

        def resume_from_newest(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            resume_start(self.resumed_from, weights_only=weights_only)

        return resume_from_newest

    # ------------------------------------------------------------------ the loader
    def _dealing(self, trainer: Trainer) -> Callable[..., object]:
        prepare: Callable[..., object] = trainer._data_connector._prepare_dataloader

        def prepare_dataloader(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
            if mode != RunningStage.TRAINING:
                return prepare(dataloader, shuffle=shuffle, mode=mode)
            return self._deal(trainer, dataloader)  # before Lightning puts a sampler of its own in

        return prepare_dataloader

    def _deal(self, trainer: Trainer, loader: Any) -> Any:
        """Return the training loader with batches of ours."""
        if self.division is None:
            raise RuntimeError("ElasticTraining distributes samples only after the Trainer has set it up.")
        order = EpochOrder(len(map_style(loader)), is_shuffled(loader), self.seed)
        self._batches = GlobalBatches(order, self.division, self._rank, loader.batch_sampler.drop_last)
        limit = trainer.limit_train_batches
        if isinstance(limit, float) and limit < 1:  # whole steps
            self._patches.put(trainer, "limit_train_batches", int(self._batches.num_steps * limit) * self._steps)
        return with_batches(loader, self._batches)

    @property
    def _steps(self) -> int:
        return 1 if self.division is None else self.division.accumulate_grad_batches

    # ------------------------------------------------------------------ the loss
    def _weighing(self, trainer: Trainer) -> Callable[..., Any]:
        training_step = trainer.strategy.training_step

        def weighing_step(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            weight = self._weight(trainer)
            loss = output.get("loss") if isinstance(output, dict) else output
            if weight != 1.0 and isinstance(loss, Tensor) and loss.requires_grad:
                # The loss itself stays what is logged.
                loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
            return output

        return weighing_step

    def _counting(self, trainer: Trainer, pl_module: LightningModule) -> Callable[..., Any]:
        training_step = pl_module.training_step

        @wraps(inspect.unwrap(training_step))  # Lightning unwraps once, and looks whether it takes batch_idx
        def counting_step(*args: Any, **kwargs: Any) -> Any:
            output: Any = training_step(*args, **kwargs)
            counts = self._weight(trainer) or not isinstance(output, Mapping)  # else that is an error of the strategy's
            return output if counts else {**output, "num_items": 0}

        return counting_step

    def _weight(self, trainer: Trainer) -> float:
        return 1.0 if self._batches is None else self._batches.weight(trainer.fit_loop.epoch_loop.batch_idx)

    # ------------------------------------------------------------------ checkpoints
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._batches is not None and "callbacks" in checkpoint:
            order, step = self._batches.sampler, trainer.global_step
            checkpoint["callbacks"][self.state_key] = {
                **self._fixed(self._batches),
                "accumulate_grad_batches": self._steps,
                "epoch": order.epoch,
                "steps_in_epoch": step - self._first_step.get(order.epoch, step),
                "global_step": step,
            }

    def _fixed(self, batches: GlobalBatches) -> dict[str, Any]:
        """Return the settings that all runs of a training must share."""
        order = batches.sampler
        return {
            "global_batch_size": self.global_batch_size,
            "num_samples": order.num_samples,
            "shuffle": order.shuffle,
            "seed": order.seed,
            "drop_last": batches.drop_last,
        }

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            raise ValueError(
                "The checkpoint was saved without ElasticTraining: the samples used in its epoch are unknown. "
                "Resume without ElasticTraining on the same number of processes, or load only its weights, before "
                "fit()."
            )
        self._resumed = state
        forgot = count_anew(
            checkpoint["loops"]["fit_loop"],
            steps_in_epoch=state["steps_in_epoch"],
            steps=state["global_step"],
            before=state["accumulate_grad_batches"],
            now=self._steps,
        )
        if forgot:
            rank_zero_info(
                f"The checkpoint was saved within the accumulation window after step {state['global_step']}; its "
                "micro-batches are repeated."
            )

    # ------------------------------------------------------------------ training
    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_accumulation(trainer, pl_module, self._steps)  # again: the strategy has set it up
        loop: Any = trainer.fit_loop
        batches = self._batches
        if batches is None or len(loop._combined_loader.flattened) != 1:
            raise ValueError(
                f"ElasticTraining distributes the samples of one training loader, but there are "
                f"{len(loop._combined_loader.flattened)}. Combine them into one dataset."
            )
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError(
                "ElasticTraining cannot follow training_step(dataloader_iter), which fetches its own batches. Use "
                "training_step(batch, batch_idx)."
            )
        warnings.filterwarnings("ignore", r".*your dataloader is not resumable")  # this one is
        if self._resumed:
            self._check_alike(batches)
            epoch, steps = self._resumed["epoch"], self._resumed["steps_in_epoch"]
            batches.skip(epoch, steps)
            self._first_step = {epoch: self._resumed["global_step"] - steps}
        present = loop.epoch_progress.current.processed
        if self._resumed or present != batches.sampler.epoch:  # its first order was drawn before the epoch was known
            batches.sampler.set_epoch(present)
            iter(loop._data_fetcher)
        self._count_in_steps(trainer, batches)

    def _check_alike(self, batches: GlobalBatches) -> None:
        now = self._fixed(batches)
        changed = [
            f"{name} was {self._resumed[name]}, is now {now[name]}" for name in now if now[name] != self._resumed[name]
        ]
        if changed:
            raise ValueError(
                f"The checkpoint was saved with a different sample order: {'; '.join(changed)}. Use the original "
                "values, or start from scratch with another checkpoint folder."
            )

    def _count_in_steps(self, trainer: Trainer, batches: GlobalBatches) -> None:
        interval = trainer.val_check_interval
        if isinstance(interval, float) and trainer.val_check_batch is not None:
            num_steps = trainer.num_training_batches // self._steps
            self._patches.put(trainer, "val_check_batch", max(1, int(num_steps * interval)) * self._steps)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                self._patches.put(config, "frequency", config.frequency * self._steps)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batches is not None:
            epoch, step = self._batches.sampler.epoch, trainer.global_step
            self._first_step = {epoch: self._first_step.get(epoch, step)}


def _check_accumulation(trainer: Trainer, pl_module: LightningModule, expected: int) -> None:
    if not pl_module.automatic_optimization:
        raise ValueError(
            "ElasticTraining needs automatic optimization: in manual optimization only training_step knows which "
            "micro-batches form a step."
        )
    if trainer.accumulate_grad_batches != expected or any(
        isinstance(callback, GradientAccumulationScheduler)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    ):
        raise ValueError(
            "ElasticTraining sets accumulate_grad_batches from global_batch_size and max_batch_size. Remove "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} (of the Trainer, the strategy, the DeepSpeed "
            "config or ACCELERATE_GRADIENT_ACCUMULATION_STEPS) and GradientAccumulationScheduler."
        )


# ------------------------------------------------------------------------------------------------
# Global batches: every optimizer step has the same samples on any number of processes.
#
# [Note: global batches] The order of an epoch's samples is drawn from a seed and the epoch's number alone, and cut into
# global batches: one for each optimizer step. A global batch is cut into as many micro-batches as there are processes
# times accumulation steps, equally large but for the last, incomplete one of an epoch, whose micro-batches may differ
# by a sample. Each counts in the gradient by its number of samples, see `GlobalBatches.weight`, so that the gradient is
# the mean over the global batch.


@dataclass(frozen=True)
class Division:
    """The division of a global batch."""

    global_batch_size: int
    num_processes: int
    """Processes, or groups that share one copy of the model, with data of their own."""
    batch_size: int
    """Samples of one process in one micro-batch."""
    accumulate_grad_batches: int
    """Micro-batches of one process in one optimizer step."""

    @classmethod
    def of(
        cls, global_batch_size: int, num_processes: int, max_batch_size: int | None = None, group_size: int = 1
    ) -> Division:
        """Divide with as few micro-batches as fit.

        Args:
            global_batch_size: Samples of one optimizer step.
            num_processes: Processes with data of their own.
            max_batch_size: Most samples of one process in one micro-batch; None for no limit.
            group_size: Processes that have the same data.

        Raises:
            ValueError: If the processes cannot have equally many samples; it says which numbers of processes can.
        """
        share, rest = divmod(global_batch_size, num_processes)
        if rest:
            fitting = [str(n * group_size) for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
            raise ValueError(
                f"global_batch_size={global_batch_size} cannot be split equally over "
                f"{_replicas(num_processes, group_size)}. Start {_listed(fitting)} processes, or use a global batch "
                "size that is divisible by every number of processes that may remain."
            )
        limit = share if max_batch_size is None else max_batch_size
        steps = next(steps for steps in range(1, share + 1) if share % steps == 0 and share // steps <= limit)
        return cls(global_batch_size, num_processes, share // steps, steps)

    @property
    def num_micro_batches(self) -> int:
        """Of all processes, in one optimizer step."""
        return self.num_processes * self.accumulate_grad_batches


class EpochOrder:
    """The order of a dataset's samples in an epoch: the same for every number of processes.

    Args:
        num_samples: Of the dataset.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the first epoch's order.
    """

    def __init__(self, num_samples: int, shuffle: bool, seed: int) -> None:
        self.num_samples, self.shuffle, self.seed = num_samples, shuffle, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is iterated next; the Trainer calls it."""
        self.epoch = epoch

    def indices(self) -> list[int]:
        """Return the present epoch's order; drawn as ``DistributedSampler`` draws it."""
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order


class GlobalBatches:
    """One process's micro-batches of each epoch, as the ``batch_sampler`` of a loader.

    Args:
        order: Of the samples, kept as ``sampler``, where the Trainer looks for ``set_epoch``.
        division: Of each global batch.
        rank: Of this process among those that have data of their own.
        drop_last: Whether the last, incomplete global batch of an epoch is left out.

    Raises:
        ValueError: If there is no global batch in an epoch.
    """

    def __init__(self, order: EpochOrder, division: Division, rank: int, drop_last: bool) -> None:
        self.sampler, self.division, self.rank, self.drop_last = order, division, rank, drop_last
        self._skipped: tuple[int, int] | None = None
        if self.num_steps == 0:
            raise ValueError(
                f"The training data has {order.num_samples} samples, fewer than one global batch of "
                f"{division.global_batch_size}" + (" (drop_last=True drops an incomplete one)." if drop_last else ".")
            )

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.division.batch_size

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a whole epoch."""
        full, rest = divmod(self.sampler.num_samples, self.division.global_batch_size)
        return full if self.drop_last or not rest else full + 1

    def skip(self, epoch: int, num_steps: int) -> None:
        """Leave out the first steps of one epoch: a run that went before this one has used them."""
        self._skipped = epoch, num_steps

    def weight(self, micro_batch: int) -> float:
        """Return the weight of a micro-batch's mean loss in the mean over micro-batches, for the mean over samples.

        Args:
            micro_batch: This process's, counted from the epoch's begin.
        """
        step, position = divmod(micro_batch, self.division.accumulate_grad_batches)
        begin, end = self._bounds(step, position)
        return (end - begin) * self.division.num_micro_batches / self._size_of_step(step)

    def __len__(self) -> int:
        """Return the number of micro-batches in a whole epoch, whatever was used of it before."""
        return self.num_steps * self.division.accumulate_grad_batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch, indices = self.sampler.epoch, self.sampler.indices()
        first = self._skipped[1] if self._skipped is not None and self._skipped[0] == epoch else 0
        for step in range(first, self.num_steps):
            offset = step * self.division.global_batch_size
            for position in range(self.division.accumulate_grad_batches):
                begin, end = self._bounds(step, position)
                # Every process takes part in every forward: one without a sample has one that counts nothing.
                yield indices[offset + begin : offset + end] or [indices[offset]]

    def _size_of_step(self, step: int) -> int:
        size = self.division.global_batch_size
        return min(size, self.sampler.num_samples - step * size)

    def _bounds(self, step: int, position: int) -> tuple[int, int]:
        """Return which samples of a global batch a micro-batch of this process has."""
        number, count = position * self.division.num_processes + self.rank, self.division.num_micro_batches
        size = self._size_of_step(step)
        return number * size // count, (number + 1) * size // count


def _replicas(number: int, group_size: int) -> str:
    return f"{number} processes" if group_size == 1 else f"{number} groups of {group_size} processes"


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


# ------------------------------------------------------------------------------------------------
# Checks of the training loader that global batches need.


def with_batches(loader: Any, batches: GlobalBatches) -> Any:
    """Return a loader of the same kind, dataset and settings with other batches."""
    args, kwargs = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    ours = {"batch_sampler": batches, "sampler": None, "shuffle": False, "batch_size": 1, "drop_last": False}
    return _reinstantiate_wrapped_cls(loader, *args, **{**kwargs, **ours})


def _is_plain(sampler: object, kind: type) -> bool:
    """Return whether a sampler is of torch's own kind, or what torchdata has in its place."""
    own = type(sampler)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.startswith("torchdata."))


def map_style(loader: Any) -> Any:
    """Return the dataset of a loader whose samples can be dealt.

    Raises:
        ValueError: If they cannot, or hold a state of their own.
    """
    hint = "Use a DataLoader over a dataset with __len__ and __getitem__, with shuffle= and without a custom sampler."
    if (
        not isinstance(loader, DataLoader)
        or not hasattr(loader.dataset, "__len__")
        or not _is_plain(loader.batch_sampler, BatchSampler)
    ):
        raise ValueError(f"ElasticTraining cannot distribute the samples of {_described(loader)}. {hint}")
    if isinstance(loader.dataset, Stateful):
        raise ValueError(
            f"{type(loader.dataset).__name__} has a state_dict: checkpoints hold only that of process 0, which "
            "cannot be split over another number of processes. __getitem__ must depend only on the index."
        )
    return loader.dataset


def is_shuffled(loader: Any) -> bool:
    """Return whether a loader's samples are shuffled.

    Raises:
        ValueError: If they have an order of their own.
    """
    sampler, dataset = loader.batch_sampler.sampler, loader.dataset  # DataLoader(batch_sampler=...) has another sampler
    if _is_plain(sampler, SequentialSampler):
        return False
    if _is_plain(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset):
        return True
    if type(sampler) is DistributedSampler and sampler.dataset is dataset:
        return sampler.shuffle
    raise ValueError(
        f"ElasticTraining determines the order of samples, and would not use {type(sampler).__name__}. Remove the "
        "sampler and set shuffle=."
    )


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    return f"a {type(loader).__name__} over {type(loader.dataset).__name__} with {type(loader.batch_sampler).__name__}"


# ------------------------------------------------------------------------------------------------
# The Trainer's counters of micro-batches, as another number of processes would have counted them.


_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"


def count_anew(loops: MutableMapping[str, Any], *, steps_in_epoch: int, steps: int, before: int, now: int) -> bool:
    """Change the state of a fit loop so that training continues at the begin of a window, with windows of another size.

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
    # Within on_train_batch_end all but `completed` count the batch already; Lightning knows such checkpoints by that.
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


# ------------------------------------------------------------------------------------------------
# Resuming within an epoch without using a sample twice.


def _deals_samples(loader: Any) -> bool:
    """Return whether `ElasticTraining` deals the loader's samples, and has left out those that were used."""
    return isinstance(getattr(loader, "batch_sampler", None), GlobalBatches)


def skip_used_batches(trainer: Trainer) -> None:
    """Move the training loaders to where the checkpoint's epoch was left; call when training starts.

    Lightning 2.6 counts on from there, but begins with the loader's first batch, unless the loader has ``state_dict``
    and ``load_state_dict``. Those are left to Lightning.

    Raises:
        RuntimeError: If the data ends before that place.

    Source of the semantics: accelerate 1.15 ``data_loader.py`` (``skip_first_batches``).
    """
    loop: Any = trainer.fit_loop
    num_used = loop.epoch_loop.batch_progress.current.processed
    if is_at_end(loop) or not 0 < num_used < trainer.num_training_batches:
        return
    loaders = loop._combined_loader.flattened
    if all(isinstance(loader, Stateful) or _deals_samples(loader) for loader in loaders):
        return
    fetcher = loop._data_fetcher
    if isinstance(fetcher, _DataLoaderIterDataFetcher) or any(isinstance(loader, Stateful) for loader in loaders):
        rank_zero_warn(
            f"The first {num_used} batches of this epoch were used before the stop, and are used again: they cannot "
            "be skipped with training_step(dataloader_iter), or if only some loaders have a state_dict. Implement "
            "state_dict and load_state_dict on all loaders."
        )
        return
    for loader in loaders:
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    iter(fetcher)  # again: its first order was drawn before the sampler knew the epoch
    for number in range(num_used):
        try:
            next(fetcher)
        except StopIteration:
            raise RuntimeError(
                f"The checkpoint was saved after batch {num_used} of its epoch, but the data ends after {number}. "
                "Resume with the same data and batch size, or from a checkpoint of the end of an epoch."
            ) from None
    fetcher.fetched -= num_used  # the loop adds them once more
    rank_zero_info(f"Skipped the {num_used} batches of this epoch that were used before the stop.")
