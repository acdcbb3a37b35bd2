"""`ShardedEMA`: averages of the weights, each process those of its own shards.

The averages themselves, how they change places with the weights, and what checkpoints have of them are below.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn
from typing_extensions import override

from ..checkpoint.formats.base import AVERAGED_NAMES, AVERAGED_WEIGHTS
from ..checkpoint.names import clean_name
from ..state.utils import check_count, named_arguments
from ..strategies.sharded_tensors.shards import FlatShard, Sharded, gathered, local_part, part_of
from ..strategies.upstream.lightning import (
    Callback,
    LightningModule,
    Trainer,
    check_trainer,
    rank_zero_warn,
)
from ..strategies.upstream.patches import Patches
from .single_file import ties_of
from .step_guard import is_known_strategy

Average = Callable[[list[Tensor], list[Tensor], Any], None]
"""As torch's ``multi_avg_fn``: changes the averages, given the weights and how often these were averaged before."""


@named_arguments
class ShardedEMA(Callback):
    """Averages the weights while they train, and evaluates with the averages.

    ::

        Trainer(strategy="accel_fsdp2", callbacks=[ShardedEMA(decay=0.999), ModelCheckpoint(monitor="val_loss")])

    Each process averages its own shards of what the optimizer steps on (the fp32 weights in mixed precision), so that a
    step needs no communication, and memory of one shard more. Works with accelight's strategies, ``ddp`` and a single
    device; the averages equal those of one process.

    - In validation, test and predict the model has the averages, and training continues with the trained weights.
      Metrics that ``ModelCheckpoint`` and ``EarlyStopping`` look at are those of the averages.
    - Checkpoints have both, with accelight's strategies also those of ``save_weights_only``. Training resumes from them
      on another number of processes and on the other FSDP version; ``Trainer.test(ckpt_path=...)`` with this callback
      tests the averages.
    - ``accelight merge-weights --weights ema`` and ``MergeShardedCheckpoint(weights="ema")`` export the averages, and
      `averaged_weights` lets the model have them elsewhere. In one file they are under ``"averaged_weights"``.

    What is averaged are parameters that train; of the others, and of buffers, the model has what it has. A parameter
    that begins to train later counts with the value that it had before. `fit` begins new averages unless it resumes.

    Args:
        decay: Weight of the average in ``average = decay * average + (1 - decay) * weights``. Default 0.999.
        averaging: ``"exponential"``; ``"uniform"``, the mean of all (SWA); or a function like torch's
            ``multi_avg_fn``, which changes its first list in place, element by element: ``(averages, weights,
            num_averaged)``. The lists hold this process's shards.
        every_n_steps: Optimizer steps from one update to the next.
        start_step: The optimizer step after which the average begins, as a copy of the weights. Default: the first
            multiple of ``every_n_steps``.
        use_buffers: Whether persistent floating-point buffers (BatchNorm's statistics) are averaged, too.
        device: Where the averages are kept, such as ``"cpu"``; default: where the weights are.

    Raises:
        ValueError: If an argument is out of its range; when the Trainer starts, if its strategy shards in another way.

    Source: torch 2.13 ``optim.swa_utils.AveragedModel``; lightning 2.6 ``WeightAveraging``.
    """

    def __init__(
        self,
        decay: float | None = None,
        *,
        averaging: Literal["exponential", "uniform"] | Average = "exponential",
        every_n_steps: int = 1,
        start_step: int = 0,
        use_buffers: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        if averaging not in ("exponential", "uniform") and not callable(averaging):
            raise ValueError(f"averaging must be 'exponential', 'uniform' or a function, got {averaging!r}.")
        if decay is not None and averaging != "exponential":
            raise ValueError(f"decay={decay} has no effect with averaging={averaging!r}. Omit one of them.")
        if decay is not None and not 0.0 <= decay <= 1.0:
            raise ValueError(
                f"decay must be between 0 and 1, got {decay!r}. 0.999 averages about the last 1000 updates."
            )
        check_count("every_n_steps", every_n_steps)
        check_count("start_step", start_step, 0)
        self.decay = 0.999 if decay is None and averaging == "exponential" else decay
        self.averaging, self.use_buffers = averaging, use_buffers
        self.every_n_steps, self.start_step = every_n_steps, start_step
        self.device = None if device is None else torch.device(device)
        self.num_averaged = 0
        """The number of times that the weights were averaged."""
        self._averages: Averages | None = None
        self._patches = Patches("callbacks")
        self._stored: Any = None
        self._stored_names: Container[str] = ()
        self._last_step = 0
        self._trained: list[bool] = []

    @property
    def _average(self) -> Average:
        if self.averaging == "exponential":
            exponential: Average = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
            return exponential
        if self.averaging == "uniform":
            uniform: Average = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
            return uniform
        return self.averaging

    # ------------------------------------------------------------------ setup
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        _check_strategy(trainer.strategy)
        self._patches.remove()
        if stage == "fit":
            self.num_averaged, self._averages = 0, None
        else:
            if self._averages is not None and self._averages.module is not pl_module:
                self._averages = None
            self._patches.put(trainer.strategy, "load_checkpoint", self._reading(trainer, pl_module))
        self._show(trainer)

    def _reading(self, trainer: Trainer, pl_module: LightningModule) -> Callable[..., dict[str, Any]]:
        """Return what reads the checkpoint to evaluate: Lightning shows callbacks none of weights alone."""
        load = trainer.strategy.load_checkpoint

        def load_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
            checkpoint = load(*args, **kwargs)
            self.on_load_checkpoint(trainer, pl_module, checkpoint)
            return checkpoint

        return load_checkpoint

    def _show(self, trainer: Trainer) -> None:
        """Put the averages into the strategy's checkpoints."""
        if self._averages is not None:
            self._averages.strategy = trainer.strategy
        if hasattr(trainer.strategy, "averages"):
            trainer.strategy.averages = self._averages

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_stored(trainer, pl_module)
        self._last_step, self._trained = trainer.global_step, []

    # ------------------------------------------------------------------ training
    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take note of parameters that begin to train, while they have the value that they had before."""
        if self._averages is not None:
            trained = [parameter.requires_grad for parameter in pl_module.parameters()]
            if trained != self._trained:
                self._averages.add_new()
                self._trained = trained

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, step = self._last_step, trainer.global_step
        self._last_step = step
        begin, every = max(1, self.start_step), self.every_n_steps
        if step < begin or (step - self.start_step) // every == (before - self.start_step) // every:
            return
        if self._averages is None:
            self._averages = Averages(trainer.strategy, pl_module, self.device, use_buffers=self.use_buffers)
            self._averages.add_new()
            self._show(trainer)
        else:
            self._averages.update(self._average, self.num_averaged)
        self.num_averaged += 1

    # ------------------------------------------------------------------ evaluation
    @contextmanager
    def averaged_weights(self, trainer: Trainer) -> Generator[None, None, None]:
        """Give the model the averages inside this context; every process enters it, between two steps.

        ::

            with ema.averaged_weights(trainer):
                trainer.strategy.save_safetensors("averaged")

        Before the first update the model keeps its weights.
        """
        averages = self._averages
        if averages is None or averages.in_model:
            yield
            return
        averages.enter()
        try:
            yield
        finally:
            averages.leave()

    def _enter(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_stored(trainer, pl_module)
        if self._averages is not None and not self._averages.in_model:
            self._averages.enter()

    def _leave(self, trainer: Trainer) -> None:
        if self._averages is not None and self._averages.in_model:
            self._averages.leave()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter(trainer, pl_module)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter(trainer, pl_module)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._averages is not None and self._averages.in_model:
            self._averages.exchange()  # the other processes may not come to communicate
        self._patches.remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._patches.remove()

    # ------------------------------------------------------------------ checkpoints
    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_averaged": self.num_averaged}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_averaged = state_dict["num_averaged"]

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the averages where the strategy does not: where each process has all of them."""
        if self._averages is not None and not hasattr(trainer.strategy, "averages"):
            weights = checkpoint["state_dict"]
            ties = ties_of({name: value for name, value in weights.items() if isinstance(value, Tensor)})
            with self._averages.aside():
                copies = {name: _copied(value) for name, value in weights.items() if name not in ties}
                averages = {name: local_part(value).clone() for name, value in self._averages.tensors.items()}
            averages = {**copies, **averages}
            checkpoint["state_dict"] = {name: copies[ties.get(name, name)] for name in weights}
            checkpoint[AVERAGED_WEIGHTS] = {**averages, **{name: averages[kept] for name, kept in ties.items()}}
            checkpoint[AVERAGED_NAMES] = sorted(self._averages.tensors)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._stored, self._averages = checkpoint.get(AVERAGED_WEIGHTS), None
        self._stored_names = checkpoint.get(AVERAGED_NAMES, ())
        if self._stored is None:
            self.num_averaged = 0
            rank_zero_warn(
                "ShardedEMA: the checkpoint has no averages: evaluation uses its weights, and averages begin anew. "
                "It was saved without ShardedEMA, or before its first update."
            )

    def _take_stored(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the averages of a checkpoint, once the model is sharded."""
        stored, self._stored = self._stored, None
        if stored is None:
            return
        self._averages = Averages(trainer.strategy, pl_module, self.device, use_buffers=self.use_buffers)
        self._averages.restore(stored, self._stored_names)
        self.num_averaged = max(1, self.num_averaged)  # a checkpoint of weights alone does not count
        self._show(trainer)


def _check_strategy(strategy: Any) -> None:
    if not is_known_strategy(strategy):
        raise ValueError(
            f"ShardedEMA cannot average the weights of {type(strategy).__name__}. Use AccelFSDPStrategy or "
            "AccelDeepSpeedStrategy, 'ddp', or a single device."
        )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# ------------------------------------------------------------------------------------------------
# The averages, and their change of places with the weights.


class Averages:
    """Averages of a module's weights, sharded like these.

    Args:
        strategy: That trains it.
        module: Whose weights.
        device: Where they are kept; None for the weights' own.
        use_buffers: Whether buffers are averaged, too.
    """

    def __init__(
        self, strategy: Any, module: LightningModule, device: torch.device | None, *, use_buffers: bool
    ) -> None:
        self.strategy, self.module = strategy, module
        self.tensors: dict[str, Tensor] = {}
        """By the names of the weights; those of a model that has the averages hold the trained weights, if they can."""
        self.in_model = False
        """Whether the model has the averages."""
        self._device, self._use_buffers = device, use_buffers
        self._trained: dict[str, Tensor] = {}

    def _present(self, also: Container[str] = (), *, all_of_them: bool = False) -> dict[str, Tensor]:
        """Return the averaged tensors, and those of these names: this process's part of parameters, and buffers."""
        if hasattr(self.strategy, "parameter_shards"):
            shards: Mapping[str, tuple[Tensor, bool]] = self.strategy.parameter_shards()
        else:
            shards = {name: (each.detach(), each.requires_grad) for name, each in self.module.named_parameters()}
        found = {
            name: shard
            for name, (shard, is_trained) in shards.items()
            if (is_trained or name in self.tensors or name in also or all_of_them)
            and (shard.is_floating_point() or shard.is_complex())
        }
        for prefix, module in self.module.named_modules() if self._use_buffers else ():
            for name, buffer in module._buffers.items():
                persistent = buffer is not None and name not in module._non_persistent_buffers_set
                if persistent and buffer.is_floating_point():
                    found[clean_name(f"{prefix}.{name}" if prefix else name)] = buffer.detach()
        return found

    @torch.no_grad()
    def add_new(self, also: Container[str] = ()) -> None:
        """Begin to average what trains, or has one of these names, and is not averaged yet."""
        for name, shard in self._present(also).items():
            if name not in self.tensors:
                self.tensors[name] = self._like(shard)

    def _like(self, shard: Tensor) -> Tensor:
        dtype = torch.promote_types(shard.dtype, torch.float32)
        with torch.inference_mode(False):  # an evaluation may take them, and training update them
            return shard.detach().to(device=self._device or shard.device, dtype=dtype, copy=True)

    @torch.no_grad()
    def update(self, average: Average, num_averaged: int) -> None:
        """Average the weights once more; no process communicates."""
        averages, weights = list[Tensor](), list[Tensor]()
        present = self._present()
        for name, shard in present.items():
            if name in self.tensors:
                held = local_part(self.tensors[name])
                averages.append(held)
                weights.append(local_part(shard).to(held.device, held.dtype))
        if averages:
            average(averages, weights, num_averaged)

    def restore(self, stored: Any, names: Container[str]) -> None:
        """Take the averages of a checkpoint; every process calls it.

        Args:
            stored: Full tensors by name, or what fills shards from a folder.
            names: Of what was averaged, whether or not it trains now.
        """
        self.add_new(names)
        if hasattr(stored, "fill"):
            stored.fill(self.tensors)
            return
        missing = sorted(set(self.tensors) - set(stored))
        if missing:
            raise RuntimeError(
                f"ShardedEMA: the checkpoint has no averages of {', '.join(missing[:5])}"
                f"{' and others' if missing[5:] else ''}, which train now. Train what trained when it was saved, or "
                "load its weights into the module and begin new averages."
            )
        with torch.no_grad():
            for name, average in self.tensors.items():
                local_part(average).copy_(local_part(part_of(stored[name], average)))

    def enter(self) -> None:
        """Give the model the averages; every process calls it."""
        self.exchange()
        self._push()

    def leave(self) -> None:
        """Restore the model's trained weights; every process calls it."""
        self.exchange()
        self._push()

    def _push(self) -> None:
        if hasattr(self.strategy, "push_parameter_shards"):
            self.strategy.push_parameter_shards()

    @contextmanager
    def aside(self) -> Generator[bool, None, None]:
        """Give the model the trained weights, and `tensors` the averages, while a checkpoint is saved.

        Yields:
            Whether the model has them for this context alone.
        """
        was_in_model = self.in_model
        if was_in_model:
            self.leave()
        try:
            yield was_in_model
        finally:
            if was_in_model:
                self.enter()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange this process's shards of the weights and of the averages, without communication where both match."""
        present = self._present(all_of_them=True)
        self.in_model = not self.in_model
        for name, average in self.tensors.items():
            shard, mean = local_part(present[name]), local_part(average)
            if name in self._trained:
                shard.copy_(self._trained.pop(name))
                continue
            matches = _is_alike(average, present[name])
            if not matches:  # the strategy that evaluates now shards in another way
                mean = local_part(part_of(gathered(average), present[name]))
            before = shard.clone()
            shard.copy_(mean)
            if matches and (mean.dtype, mean.device) == (shard.dtype, shard.device):
                mean.copy_(before)
            else:
                self._trained[name] = before


def _is_alike(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, FlatShard) and isinstance(other, FlatShard):
        return one.place.is_alike(other.place)
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.device_mesh == other.device_mesh and one.placements == other.placements
    return not isinstance(one, Sharded) and not isinstance(other, Sharded)
