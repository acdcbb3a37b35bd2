"""`StepGuard`: skips optimizer steps whose gradients are not finite or spike, on all processes alike."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import os
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ..state.rendezvous import run_on_rank_zero
from ..state.utils import check_count, named_arguments
from ..strategies.common.checkpoint_files import local_path, save_torch
from ..strategies.common.dataloader_state import dataset_indices
from ..strategies.common.grads import SkippedSteps
from ..strategies.common.loop import LoopFollowing
from ..strategies.upstream.lightning import (
    Callback,
    DDPStrategy,
    DeepSpeedStrategy,
    LightningModule,
    SingleDeviceStrategy,
    Trainer,
    check_trainer,
    rank_zero_warn,
)
from ..strategies.upstream.patches import Patches
from .grad_norm_monitor import total_norm, will_clip_by_norm

_log = logging.getLogger(__name__)
_GAUSSIAN = 1.4826
"""Standard deviations in a median absolute deviation of normally distributed values."""
_NUM_SAMPLES = 32
"""The number of names in a warning."""
_LEAST_DEVIATION = 0.1
"""Of the median. Norms that hardly vary would otherwise make a spike of each one above the median."""


Place = tuple[int, int]
"""Epoch of a micro-batch, and its number there."""


class _Norms:
    """The norms of the last steps, also in order: their median is asked for at every step."""

    def __init__(self, window: int, values: Sequence[float] = ()) -> None:
        self._last: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._last)

    def add(self, norm: float) -> None:
        """Add a norm, in the place of the oldest one where there are as many as the window has."""
        if len(self._last) == self._last.maxlen:
            del self._ordered[bisect_left(self._ordered, self._last[0])]
        self._last.append(norm)
        insort(self._ordered, norm)

    def values(self) -> list[float]:
        """Return the norms, oldest first."""
        return list(self._last)

    def median(self) -> float:
        """Return their median."""
        return statistics.median(self._ordered)  # which are in order already

    def deviation(self) -> float:
        """Return the median of their distances from the median."""
        median = self.median()
        return statistics.median(abs(norm - median) for norm in self._ordered)


class _MicroBatch(NamedTuple):
    """The record of one micro-batch of the accumulation window, in the log and in the saved file."""

    epoch: int
    batch_idx: int
    loss: Tensor | None
    batch: Any

    @property
    def place(self) -> Place:
        return self.epoch, self.batch_idx


class _LeftOut(NamedTuple):
    """An entry of ``leave_out_file``: a run takes no step with a micro-batch from ``first`` to ``last``."""

    first: Place
    last: Place
    num_processes: int
    num_batches: int | None
    """Of each process in an epoch, if known. With other numbers than these two a place has other samples."""


@named_arguments
class StepGuard(Callback):
    """Skips optimizer steps whose gradient norm is not finite, or far above those of the steps before.

    ::

        Trainer(strategy="accel_fsdp2", gradient_clip_val=1.0, callbacks=[StepGuard()])

    A skipped step changes nothing: weights, optimizer state and schedules by step stay as they are, and the gradients
    are dropped. ``trainer.global_step`` counts it, and so do averages of the weights, as for a step that overflows in
    fp16. All processes decide by the same number, the norm over all shards before clipping.

    - A norm that is NaN or infinite is always skipped. In fp16 the gradient scaler skips such a step and halves its
      scale; schedules wait, and the guard counts it only once the scale is down to 1.
    - A spike is a norm above ``median + spike_factor * deviation`` of the last ``window`` steps that were taken. The
      deviation is the median absolute deviation in units of a standard deviation, and at least a tenth of the median.
    - Each skip is a warning on rank 0, with the step, the norm, the threshold, the loss and the micro-batches.
      ``step_guard/skipped`` in the logs is their number, whenever it has changed.

    With ``leave_out_file``, a run goes back to its last checkpoint after too many skips in a row: the error first adds
    the batches of these steps to that file, and a run that resumes leaves them out. Their steps are skipped, whatever
    the norm, so that it equals one process that skips the same steps.

    It works in automatic optimization, with accelight's strategies, ``ddp`` and a single device. Each step waits until
    the norm is known. Norms and counts are saved in checkpoints, so that a run that resumes decides alike.

    Args:
        max_norm: Largest norm that is not skipped, whatever the norms before; default: no such limit.
        spike_factor: Deviations above the median from which on a norm is a spike; None skips no spikes.
        window: Steps whose norms are taken for normal. No spike is found before that many steps.
        max_consecutive_skips: Steps in a row that may be skipped. One more raises RuntimeError on every process.
        save_batches_to: Folder for the micro-batches of skipped steps, one file for each step and process:
            ``step00000012-rank0.pt``, which ``torch.load`` reads. The batches of a window then stay in memory.
        leave_out_file: JSON file for the batches of too many skips in a row, which this run and those after it leave
            out. It need not exist.
        leave_out_before: Steps before the first of these skips that are left out, too. The weights may have gone bad
            there, rather than the batches after them.

    Raises:
        ValueError: If an argument is out of its range; when training starts, if the guard cannot skip steps there.
        RuntimeError: While training, on every process, after more than ``max_consecutive_skips`` skips in a row; when
            training starts, if ``leave_out_file`` cannot be read.
    """

    def __init__(
        self,
        max_norm: float | None = None,
        spike_factor: float | None = 10.0,
        window: int = 100,
        max_consecutive_skips: int = 10,
        save_batches_to: str | Path | None = None,
        leave_out_file: str | Path | None = None,
        leave_out_before: int = 0,
    ) -> None:
        for name, value in (("max_norm", max_norm), ("spike_factor", spike_factor)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0 or None, got {value!r}.")
        check_count("window", window, 2)
        check_count("max_consecutive_skips", max_consecutive_skips, 0)
        check_count("leave_out_before", leave_out_before, 0)
        self.max_norm, self.spike_factor, self.window = max_norm, spike_factor, window
        self.max_consecutive_skips = max_consecutive_skips
        self.save_batches_to = _local(save_batches_to, "save_batches_to")
        self.leave_out_file = _local(leave_out_file, "leave_out_file")
        self.leave_out_before = leave_out_before
        self.num_skipped = 0
        """The number of steps that were skipped so far."""
        self._schedules, self._patches = SkippedSteps(), Patches("callbacks")
        self._restoring: RemovableHandle | None = None
        self._begin()

    def _begin(self) -> None:
        self.num_skipped = 0
        self._norms = _Norms(self.window)
        self._skipped_in_a_row: list[tuple[int, float]] = []
        self._micro_batches: list[_MicroBatch] = []
        self._decided: tuple[float, float] | None = None  # norm and threshold of this step
        self._skips = self._is_left_out = self._has_ended = False
        self._left_out: list[_LeftOut] = []
        self._windows: deque[tuple[int, Place]] = deque()
        """Steps of this fit, with the place that each begins at, from the first one that an error would leave out."""
        self._began: Place | None = None
        self._drawn_epoch: int | None = None
        self._num_logged: int | None = None

    # ------------------------------------------------------------------ the run
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        if stage == "fit":
            _check_possible(trainer, pl_module)
            self._begin()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_optimizer(trainer)
        self._detach()
        self._micro_batches, self._decided, self._has_ended = [], None, False
        self._windows, self._began = deque(), None
        # Under Lightning's strategies, workers of a loader have drawn its order by this epoch.
        has_workers = getattr(trainer.train_dataloader, "num_workers", 0) > 0
        is_lightnings = not isinstance(trainer.strategy, LoopFollowing)
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        self._drawn_epoch = getattr(sampler, "epoch", None) if has_workers and is_lightnings else None
        self._left_out = self._entries(trainer)
        plugin: Any = trainer.precision_plugin
        # Lightning has no hook between clipping, which knows the norm, and the step.
        self._patches.put(plugin, "_clip_gradients", partial(self._clip_and_judge, trainer, plugin._clip_gradients))
        self._schedules.last = False
        self._schedules.hold_back(pl_module, trainer.lr_scheduler_configs)

    def _detach(self) -> None:
        self._patches.remove()
        self._schedules.detach()
        if self._restoring is not None:
            self._restoring.remove()
            self._restoring = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._micro_batches = []  # a new window begins; Lightning may have dropped the last one

    # ------------------------------------------------------------------ the decision
    def _clip_and_judge(
        self, trainer: Trainer, clip: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        strategy: Any = trainer.strategy
        is_deepspeed = isinstance(strategy, DeepSpeedStrategy)
        if not is_deepspeed and will_clip_by_norm(trainer, trainer.lightning_module):
            clip(model, optimizer, *args, **kwargs)
            norm = float(strategy.last_grad_norm)
        else:
            norm = float(strategy.grad_norm() if is_deepspeed else _measure(trainer, optimizer))
            clip(model, optimizer, *args, **kwargs)
        threshold, is_finite, self._has_ended = self._threshold(norm), math.isfinite(norm), True
        self._is_left_out = self._leaves_out(trainer)
        self._skips = self._schedules.last = self._is_left_out or not norm <= threshold or not is_finite
        if self._skips and not is_finite and _loss_scale(trainer) > 1.0:
            self._skips = False  # the scaler skips the step, and needs to see it
            return
        self._decided = norm, threshold
        if self._skips and is_deepspeed:
            optimizer.zero_grad()  # the engine does not step without gradients
        elif self._skips:
            self._drop_gradients(optimizer)
        elif norm > 0:  # without any gradient nothing steps
            self._norms.add(norm)

    def _threshold(self, norm: float) -> float:
        """Return the largest norm that is not skipped, or a lower bound of it that ``norm`` does not exceed."""
        limit = math.inf if self.max_norm is None else float(self.max_norm)
        if self.spike_factor is None or len(self._norms) < self.window:
            return limit
        median = self._norms.median()
        spike = median + self.spike_factor * _LEAST_DEVIATION * median
        if not norm <= spike:  # the deviation takes longer, and most norms need none
            spike = max(spike, median + self.spike_factor * _GAUSSIAN * self._norms.deviation())
        return min(limit, spike)

    def _drop_gradients(self, optimizer: Optimizer) -> None:
        """Leave the optimizer nothing to step on: it passes over parameters without a gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        # Some optimizers also count steps for each group (schedule-free, Prodigy).
        kept = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        self._restoring = optimizer.register_step_post_hook(partial(_restore_groups, kept))

    # ------------------------------------------------------------------ after the step
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._restoring is not None:  # not in the hook itself: torch is going through the hooks then
            self._restoring.remove()
            self._restoring = None
        loss = outputs.get("loss") if isinstance(outputs, dict) else None  # detached by Lightning
        kept = batch if self.save_batches_to is not None else None
        self._micro_batches.append(_MicroBatch(trainer.current_epoch, batch_idx, loss, kept))
        self._began = self._began or self._micro_batches[-1].place
        if self._has_ended:
            self._has_ended = False
            self._end_window(trainer)
            if self.num_skipped != self._num_logged:  # `log` takes half a millisecond
                self._num_logged = self.num_skipped
                pl_module.log("step_guard/skipped", float(self.num_skipped), on_step=True, on_epoch=False, batch_size=1)

    def _end_window(self, trainer: Trainer) -> None:
        micro_batches, self._micro_batches = self._micro_batches, []
        decided, self._decided = self._decided, None
        step = trainer.global_step
        self._windows.append((step, micro_batches[0].place))
        if decided is not None:  # else it is the scaler's, or nothing to step on
            self._skipped_in_a_row = [*self._skipped_in_a_row, (step, decided[0])] if self._skips else []
        if self._is_left_out:  # it says nothing about the steps after it
            self._skipped_in_a_row = []
        first = self._skipped_in_a_row[0][0] if self._skipped_in_a_row else step
        while self._windows[0][0] < first - self.leave_out_before:
            self._windows.popleft()
        if decided is None or not self._skips:
            return
        self.num_skipped += 1
        if self._is_left_out:
            batches = _describe_batches(micro_batches)
            rank_zero_warn(f"StepGuard left out optimizer step {step}: {self.leave_out_file} lists {batches}.")
            return
        norm, threshold = decided
        samples = [self._samples(trainer, each) for each in micro_batches]
        limit = f" is above {threshold:.4g}" if math.isfinite(norm) else ""
        loss, rank = _describe_loss(trainer, micro_batches)
        rank_zero_warn(
            f"StepGuard skipped optimizer step {step}: the gradient norm {norm:.4g}{limit}. {loss}; "
            f"{_describe_batches(micro_batches)}{_describe_samples(trainer, samples, rank)}."
        )
        if self.save_batches_to is not None:
            self._save(trainer, micro_batches, samples, norm, threshold)
        if len(self._skipped_in_a_row) > self.max_consecutive_skips:
            self._give_up(trainer, micro_batches[-1].place)

    def _give_up(self, trainer: Trainer, last: Place) -> None:
        steps = ", ".join(f"{step} (norm {norm:.4g})" for step, norm in self._skipped_in_a_row)
        what = (
            f"StepGuard skipped {len(self._skipped_in_a_row)} optimizer steps in a row, more than "
            f"max_consecutive_skips={self.max_consecutive_skips}: {steps}."
        )
        if (path := self.leave_out_file) is not None:
            entry = _LeftOut(self._windows[0][1], last, *_numbers(trainer))
            run_on_rank_zero(
                lambda: _write_left_out(path, [*_read_left_out(path), entry]), f"{what} Adding their batches to {path}"
            )
            raise RuntimeError(
                f"{what} {path} lists their batches now, from {_describe_place(entry.first)} to "
                f"{_describe_place(entry.last)}. Resume from a checkpoint that was saved before, which "
                "accelight.strategies.newest_checkpoint finds: these batches are left out then."
            )
        raise RuntimeError(
            f"{what} Look at the batches of these steps (save_batches_to=...). If they are as they should be, the "
            "weights or the optimizer state are not: resume from an earlier checkpoint with a lower learning rate, or "
            "without these batches (leave_out_file=...). If the norms have become larger for good, raise "
            f"max_norm={self.max_norm} and spike_factor={self.spike_factor}."
        )

    def _samples(self, trainer: Trainer, micro_batch: _MicroBatch) -> list[int] | None:
        """Return the dataset's indices in this process's micro-batch, or None where its sampler does not give them."""
        epoch, began = micro_batch.epoch, self._began
        if began is not None and epoch == began[0]:
            if began[1] > 0:  # Lightning counts on, but not every loader continues there
                return None
            epoch = epoch if self._drawn_epoch is None else self._drawn_epoch
        return dataset_indices(trainer.train_dataloader, micro_batch.batch_idx, epoch)

    def _save(
        self,
        trainer: Trainer,
        micro_batches: list[_MicroBatch],
        samples: list[list[int] | None],
        norm: float,
        threshold: float,
    ) -> None:
        folder = Path(str(self.save_batches_to))
        path = folder / f"step{trainer.global_step:08d}-rank{trainer.global_rank}.pt"
        content = {
            "step": trainer.global_step,
            "norm": norm,
            "threshold": threshold,
            "epochs": [each.epoch for each in micro_batches],
            "batch_indices": [each.batch_idx for each in micro_batches],
            "dataset_indices": samples,
            "losses": [None if each.loss is None else float(each.loss) for each in micro_batches],
            "batches": [each.batch for each in micro_batches],
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_torch(content, path)
        except Exception as error:  # noqa: BLE001 (on one rank it would let the others wait; training needs no file)
            _log.warning("StepGuard could not save %s: %s", path, error)

    # ------------------------------------------------------------------ what is left out
    def _entries(self, trainer: Trainer) -> list[_LeftOut]:
        """Return the entries of ``leave_out_file`` that hold for this run; all ranks call it."""
        path = self.leave_out_file
        if path is None:
            return []
        entries, numbers = run_on_rank_zero(partial(_read_left_out, path), f"Reading {path}"), _numbers(trainer)
        for other in sorted({one[2:] for one in entries} - {numbers}, key=str):
            rank_zero_warn(
                f"StepGuard does not leave out what {path} lists for num_processes, num_batches of {other}: this run "
                f"has {numbers}, and other samples in its batches. Resume with those numbers to leave them out."
            )
        return [one for one in entries if one[2:] == numbers]

    def _leaves_out(self, trainer: Trainer) -> bool:
        """Return whether a micro-batch of the window that is about to step is listed."""
        if not self._left_out:
            return False
        places = [*(each.place for each in self._micro_batches), (trainer.current_epoch, trainer.fit_loop.batch_idx)]
        found = [one for one in self._left_out if any(one.first <= place <= one.last for place in places)]
        if found and self.leave_out_before and not self._windows and found[0].first < places[0]:
            rank_zero_warn(
                f"This run resumes at {_describe_place(places[0])}, and {self.leave_out_file} lists the batches from "
                f"{_describe_place(found[0].first)} on: the checkpoint may hold steps that were to be left out. "
                "Resume from an earlier one."
            )
        return bool(found)

    # ------------------------------------------------------------------ checkpoints
    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "num_skipped": self.num_skipped,
            "norms": self._norms.values(),
            "skipped_in_a_row": [list(each) for each in self._skipped_in_a_row],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_skipped = state_dict["num_skipped"]
        self._norms = _Norms(self.window, state_dict["norms"])
        self._skipped_in_a_row = [(step, norm) for step, norm in state_dict["skipped_in_a_row"]]


# ------------------------------------------------------------------------------------------------
# The abilities of a strategy.


def is_known_strategy(strategy: Any) -> bool:
    """Return whether a strategy is one of accelight's, Lightning's ``ddp``, or a single device."""
    is_plain_ddp = isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    return isinstance(strategy, LoopFollowing | SingleDeviceStrategy) or is_plain_ddp


def _check_possible(trainer: Trainer, module: LightningModule) -> None:
    strategy = trainer.strategy
    if not module.automatic_optimization:
        raise ValueError(
            "StepGuard skips steps in automatic optimization. In manual optimization skip them in training_step(): "
            "'norm = self.trainer.strategy.clip_grad_norm(optimizer, max_norm)' under AccelFSDPStrategy, "
            "'torch.nn.utils.clip_grad_norm_(...)' under others, and call optimizer.step() only if it is finite."
        )
    if not is_known_strategy(strategy):
        raise ValueError(
            f"StepGuard cannot skip steps of {type(strategy).__name__}. Use AccelFSDPStrategy, "
            "AccelDeepSpeedStrategy, 'ddp' or a single device."
        )


def _check_optimizer(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError("StepGuard cannot skip a step of LBFGS, which computes several. Use another optimizer.")
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        if has_scaler and is_fused and not hasattr(trainer.strategy, "last_grad_norm"):
            raise ValueError(
                f"A fused {type(optimizer).__name__} unscales fp16 gradients inside its step, so that StepGuard cannot "
                "see their norm. Use fused=False, bf16, or AccelFSDPStrategy."
            )


def _measure(trainer: Trainer, optimizer: Optimizer) -> Tensor:
    """Return the global norm of the gradients, or infinity instead of NaN where ranks compute it each for itself."""
    norm = total_norm(trainer, optimizer)
    if isinstance(trainer.strategy, DDPStrategy) and trainer.world_size > 1:
        # Gradients that ddp does not reduce may differ, and ranks that decide differently never agree again. MAX over
        # ranks does not always return NaN.
        norm = torch.where(torch.isfinite(norm), norm, math.inf).to(trainer.strategy.root_device)
        norm = trainer.strategy.reduce(norm, reduce_op="max")
    return norm


def _loss_scale(trainer: Trainer) -> float:
    """Return the factor that a gradient scaler can still lower, 1 without one."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        engine: Any = trainer.model
        return float(engine.optimizer.loss_scale) if engine.fp16_enabled() and engine.dynamic_loss_scale() else 1.0
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _restore_groups(kept: list[dict[str, Any]], optimizer: Optimizer, *_: Any) -> None:
    for group, options in zip(optimizer.param_groups, kept, strict=True):
        for name, value in options.items():
            if isinstance(value, Tensor) and isinstance(group[name], Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


# ------------------------------------------------------------------------------------------------
# Batches that are left out.


def _local(path: str | Path | None, name: str) -> Path | None:
    return None if path is None else local_path(str(path), name)


def _numbers(trainer: Trainer) -> tuple[int, int | None]:
    """Return the settings that must be equal for a place to have the same samples."""
    num_batches = trainer.num_training_batches
    return trainer.world_size, None if math.isinf(num_batches) else int(num_batches)


def _read_left_out(path: Path) -> list[_LeftOut]:
    if not path.exists():
        return []
    try:
        entries = [_LeftOut(**one) for one in json.loads(path.read_text())]
        return [one._replace(first=_place(one.first), last=_place(one.last)) for one in entries]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must be a list of entries with first, last (each an epoch and a batch), num_processes and "
            f"num_batches, but: {error}. Mend it, or remove it to leave out nothing."
        ) from error


def _place(of: Sequence[int]) -> Place:
    epoch, batch = map(int, of)
    return epoch, batch


def _write_left_out(path: Path, entries: list[_LeftOut]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("first", "last", "num_processes", "num_batches")
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(json.dumps([dict(zip(names, one, strict=True)) for one in entries], indent=1))
    os.replace(unfinished, path)


def _describe_place(place: Place) -> str:
    return f"batch {place[1]} of epoch {place[0]}"


# ------------------------------------------------------------------------------------------------
# The log of an accumulation window.


def _describe_loss(trainer: Trainer, micro_batches: list[_MicroBatch]) -> tuple[str, int]:
    """Return the loss over all ranks, and the rank that stands out; every rank calls it."""
    losses = [each.loss.float() for each in micro_batches if each.loss is not None]
    own = torch.stack([loss.reshape(()) for loss in losses]).sum() if losses else torch.tensor(math.nan)
    by_rank = trainer.strategy.all_gather(own.to(trainer.strategy.root_device)).reshape(-1).tolist()
    loss = f"Loss {statistics.fmean(by_rank):.4g}"
    broken = [str(rank) for rank, one in enumerate(by_rank) if not math.isfinite(one)]
    rank = int(broken[0]) if broken else by_rank.index(max(by_rank))
    if len(by_rank) == 1:
        return loss, rank
    if broken:
        more = " and others" if len(broken) > 8 else ""
        return f"{loss} (not finite on rank {', '.join(broken[:8])}{more})", rank
    return f"{loss} (largest {max(by_rank):.4g} on rank {rank})", rank


def _describe_batches(micro_batches: list[_MicroBatch]) -> str:
    return "batches " + ", ".join(f"{each.batch_idx} of epoch {each.epoch}" for each in micro_batches)


def _describe_samples(trainer: Trainer, samples: list[list[int] | None], rank: int) -> str:
    """Return the samples of one rank, if they are known; every rank calls it."""
    known: list[list[int] | None] = trainer.strategy.broadcast(samples, src=rank)
    indices = list(itertools.chain.from_iterable(one or () for one in known))
    if not indices or None in known:
        return ""
    more = f" and {len(indices) - _NUM_SAMPLES} more" if len(indices) > _NUM_SAMPLES else ""
    of_rank = f" of rank {rank}" if trainer.world_size > 1 else ""
    return f"; samples{of_rank}: {', '.join(map(str, indices[:_NUM_SAMPLES]))}{more}"
