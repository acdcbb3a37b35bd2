"""`ElasticTraining`: the same training on any number of processes, which may change whenever it is started again."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import override

from ..state.arguments import named_arguments
from ..strategies.newest import newest_checkpoint
from ..strategies.upstream.lightning import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    RunningStage,
    Trainer,
    _DataLoaderIterDataFetcher,
    rank_zero_info,
)
from .elastic_batches import Division, EpochOrder, GlobalBatches
from .elastic_loader import is_shuffled, map_style, with_batches
from .elastic_progress import count_anew
from .trainer_package import check_trainer


@named_arguments
class ElasticTraining(Callback):
    """Trains alike on any number of processes, and goes on with another number where a run was left.

    ::

        Trainer(strategy="accel_fsdp2", callbacks=[
            ElasticTraining(global_batch_size=512, max_batch_size=8, resume_from="checkpoints"),
            ModelCheckpoint("checkpoints", every_n_train_steps=100),
        ])

    Under ``torchrun --nnodes=1:4 --max-restarts=...`` the script is started again, with the processes that are left,
    whenever one is lost or comes back. Then every sample of an epoch is used once over all these runs, every optimizer
    step has the samples, the gradient and the learning rate that it would have had without the interruption, and what
    was done after the last checkpoint is done again.

    - Each optimizer step has ``global_batch_size`` samples: the batch size of each process and
      ``accumulate_grad_batches`` are set so that they make that up. The loader's own ``batch_size`` is not used.
    - The order of samples comes from ``seed`` and the epoch. A loader with ``shuffle=True`` is shuffled, one with
      ``drop_last=True`` leaves an incomplete last global batch out; else its samples are dealt as equally as possible,
      and each counts the same. A process that has none of them computes one that counts nothing.
    - The loss that ``training_step`` returns must be a mean over the samples of its batch.
    - ``limit_train_batches`` and ``val_check_interval`` as whole numbers, and the ``frequency`` of schedules with
      ``interval="step"``, count optimizer steps, which are the same on any number of processes.
    - A checkpoint may be of any moment. What is in it of an open accumulation window is done again.

    What cannot be alike are random numbers (dropout, augmentation), and layers that look at the whole micro-batch
    (BatchNorm), where its size changes.

    Args:
        global_batch_size: Samples of one optimizer step, over all processes.
        max_batch_size: Most samples of one process in one micro-batch, what fits into memory. Default: no limit, and
            so no accumulation.
        resume_from: Folder of checkpoints that all processes see: ``fit`` goes on from the newest whole one, see
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
        _check_count("global_batch_size", global_batch_size)
        if max_batch_size is not None:
            _check_count("max_batch_size", max_batch_size)
        self.global_batch_size = global_batch_size
        self.max_batch_size = max_batch_size
        self.resume_from = resume_from
        self.seed = seed
        self.resumed_from: str | None = None
        """The checkpoint that ``resume_from`` led to; None where there was none."""
        self.division: Division | None = None
        """How a global batch is divided in this run."""
        self._batches: GlobalBatches | None = None
        self._rank = 0
        self._resumed: dict[str, int] = {}
        self._first_step: dict[int, int] = {}
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ setup
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        self._close()
        if stage != "fit":
            return
        _check_accumulation(trainer, pl_module)
        layout = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        self.division = Division.of(self.global_batch_size, layout["num_replicas"], self.max_batch_size)
        self._rank, self._batches, self._resumed, self._first_step = layout["rank"], None, {}, {}
        steps = self.division.accumulate_grad_batches
        self._set(trainer, "accumulate_grad_batches", steps)
        if isinstance(trainer.limit_train_batches, int):
            self._set(trainer, "limit_train_batches", trainer.limit_train_batches * steps)
        if isinstance(trainer.val_check_interval, int):
            self._set(trainer, "val_check_interval", trainer.val_check_interval * steps)
        self._replace(trainer._data_connector, "_prepare_dataloader", self._dealing(trainer))
        self._replace(trainer.strategy, "training_step", self._weighing(trainer))
        self.resumed_from = None if self.resume_from is None else newest_checkpoint(self.resume_from)
        if self.resumed_from is not None:
            self._replace(trainer._checkpoint_connector, "resume_start", self._resuming(trainer))
        rank_zero_info(
            f"ElasticTraining: {self.global_batch_size} samples a step = {self.division.num_processes} processes x "
            f"{steps} micro-batches x {self.division.batch_size}"
            + ("." if self.resume_from is None else f"; from {self.resumed_from or 'the beginning'}.")
        )

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._undo.append(lambda: owner.__dict__.pop(name, None))

    def _close(self) -> None:
        while self._undo:
            self._undo.pop()()

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
            raise RuntimeError("ElasticTraining deals samples once it was set up by the Trainer.")
        order = EpochOrder(len(map_style(loader)), is_shuffled(loader), self.seed)
        self._batches = GlobalBatches(order, self.division, self._rank, loader.drop_last)
        limit = trainer.limit_train_batches
        if isinstance(limit, float) and limit < 1:  # whole steps
            self._set(trainer, "limit_train_batches", int(self._batches.num_steps * limit) * self._steps)
        return with_batches(loader, self._batches)

    @property
    def _steps(self) -> int:
        return 1 if self.division is None else self.division.accumulate_grad_batches

    # ------------------------------------------------------------------ the loss
    def _weighing(self, trainer: Trainer) -> Callable[..., Any]:
        training_step = trainer.strategy.training_step

        def weighing_step(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            weight = 1.0 if self._batches is None else self._batches.weight(trainer.fit_loop.epoch_loop.batch_idx)
            loss = output.get("loss") if isinstance(output, dict) else output
            if weight != 1.0 and isinstance(loss, Tensor) and loss.requires_grad:
                # The loss itself stays what is logged.
                loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
            return output

        return weighing_step

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
        """Return what all runs of a training must have alike."""
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
                "The checkpoint was saved without ElasticTraining: which samples its epoch has used is not known. "
                "Resume without ElasticTraining and with as many processes, or load its weights alone, before fit()."
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
                "micro-batches are done again."
            )

    # ------------------------------------------------------------------ training
    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop: Any = trainer.fit_loop
        batches = self._batches
        if batches is None or len(loop._combined_loader.flattened) != 1:
            raise ValueError(
                f"ElasticTraining deals the samples of one training loader, and there are "
                f"{len(loop._combined_loader.flattened)}. Make one dataset of them."
            )
        if isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError(
                "ElasticTraining cannot follow training_step(dataloader_iter), which fetches its batches by itself. "
                "Let it take (batch, batch_idx)."
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
            f"{name} was {self._resumed[name]}, is {now[name]}" for name in now if now[name] != self._resumed[name]
        ]
        if changed:
            raise ValueError(
                f"The checkpoint's epochs have another order of samples: {'; '.join(changed)}. Give what it was, or "
                "begin anew with another folder of checkpoints."
            )

    def _count_in_steps(self, trainer: Trainer, batches: GlobalBatches) -> None:
        interval = trainer.val_check_interval
        if isinstance(interval, float) and trainer.val_check_batch is not None:
            num_steps = trainer.num_training_batches // self._steps
            self._set(trainer, "val_check_batch", max(1, int(num_steps * interval)) * self._steps)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                self._set(config, "frequency", config.frequency * self._steps)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batches is not None:
            epoch, step = self._batches.sampler.epoch, trainer.global_step
            self._first_step = {epoch: self._first_step.get(epoch, step)}


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}.")


def _check_accumulation(trainer: Trainer, pl_module: LightningModule) -> None:
    if not pl_module.automatic_optimization:
        raise ValueError(
            "ElasticTraining needs automatic optimization: in manual optimization nobody but training_step knows which "
            "micro-batches make up a step."
        )
    if trainer.accumulate_grad_batches != 1 or any(
        isinstance(callback, GradientAccumulationScheduler)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    ):
        raise ValueError(
            f"ElasticTraining sets accumulate_grad_batches, from global_batch_size and max_batch_size. Leave "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} and GradientAccumulationScheduler out."
        )
