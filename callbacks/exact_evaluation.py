"""``ExactEvaluation``: validation and test metrics of many processes equal those of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from ..state import GradientState, gather
from ..state.agreement import agree
from ..state.arguments import named_arguments
from ..state.gathering import gather_interleaved
from ..state.nested import tensors_of
from ..state.process_record import communication_group
from ..strategies.upstream.lightning import (
    Callback,
    LightningModule,
    Trainer,
    _update_dataloader,
    extract_batch_size,
    is_param_in_hook_signature,
)
from .empty_output import without_samples
from .logged_values import LoggedValue, Reduction, reduction_named
from .metric_states import MetricStates, check_exact, gathering_any_number, metrics_of
from .real_samples import RealSamples, real_samples_of
from .trainer_package import check_trainer

T = TypeVar("T")


@named_arguments
class ExactEvaluation(Callback):
    """Makes validation and test metrics of many processes equal to those of one, though samples are dealt out evenly.

    Adding it is enough for steps that log numbers or torchmetrics' metrics, by ``self.log`` or ``self.log_dict``::

        Trainer(strategy="accel_fsdp2", callbacks=[ExactEvaluation()])

    - The samples that ``DistributedSampler`` repeats to make the processes' shares equal are left out of the batches.
      Where a repetition would have been alone in its batch, the batch stays: sharded models need every process in every
      forward pass. Nothing of such a step counts: metrics get back what they held, numbers logged are left out, and
      what the step returns has no samples.
    - A number logged per step (``self.log("val_loss", loss)``) is averaged over the samples of all processes, whether
      ``sync_dist`` was given or not, with the true number of samples of each batch (or ``batch_size=``, if given) and
      in double precision. ``reduce_fx`` of sum, max and min go over all processes, too.
    - A metric needs nothing: torchmetrics gathers its states, and they know each sample once.

    Floating-point sums of another order may differ in their last bits, as they do between batch sizes.

    What it cannot know raises instead of giving a wrong number: loaders that deal samples in an unknown way, a loader
    that drops samples, numbers logged at the epoch's end that differ between processes. What it cannot see are values
    that a step keeps in the module by itself; let such a step use `gather`, or look at `num_samples`.

    Args:
        assume_disjoint: Accept loaders whose dealing cannot be read (iterable datasets, samplers of your own), because
            each of their samples lies on exactly one process.
    """

    def __init__(self, assume_disjoint: bool = False) -> None:
        self.assume_disjoint = assume_disjoint
        self._patches: list[tuple[Any, str]] = []
        self._strategy_patch: list[tuple[Any, str]] = []
        self._values: dict[tuple[Any, ...], LoggedValue] = {}
        self._loader: Any = None
        self._num_samples: int | None = None
        self._in_batch = False
        self._states: MetricStates | None = None

    # ------------------------------------------------------------------ what steps may ask
    @classmethod
    def of(cls, trainer: Trainer) -> ExactEvaluation:
        """Return the Trainer's callback of this kind.

        Raises:
            RuntimeError: If it has none.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, cls):
                return callback
        raise RuntimeError("The Trainer has no ExactEvaluation. Add it: Trainer(callbacks=[ExactEvaluation()]).")

    @property
    def num_samples(self) -> int | None:
        """Real samples in this process's batch; 0 in a step that must not count, None where it is not known.

        Raises:
            RuntimeError: Outside of validation and test steps.
        """
        if not self._in_batch:
            raise RuntimeError("num_samples is known in validation and test steps, while the Trainer runs them.")
        return self._num_samples

    @property
    def is_padding(self) -> bool:
        """Whether this step's batch is only a repetition: the step must not count."""
        return self.num_samples == 0

    def gather(self, data: T) -> T:
        """Gather per-sample tensors of a step: each sample of the global batch once, in the dataset's order.

        Every process calls it, and gets the same. What is computed from it is what one process with the global batch
        size computes.

        Args:
            data: Tensor, or nested structure of tensors, with one row for each sample of the batch that the step got.

        Raises:
            ValueError: If a tensor has another number of rows.
        """
        num_samples = self.num_samples
        if num_samples is None:
            return gather(data)
        rows = max(num_samples, 1)  # a repetition alone in its batch is one row
        for path, tensor in tensors_of(data).items():
            if tensor.ndim == 0 or len(tensor) != rows:
                raise ValueError(
                    f"{path} has shape {list(tensor.shape)}, but this process's batch has {rows} sample(s). Give one "
                    "row for each sample, or reduce values with accelight.state.reduce."
                )
        return gather_interleaved(data, num_samples)

    # ------------------------------------------------------------------ loaders
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        self._close()
        if trainer.world_size == 1:
            return
        warnings.filterwarnings("ignore", r".*recommended to use .Trainer\(devices=1.*")  # "to be exact": this is
        process = trainer.strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            processed = process(dataloader)
            evaluating = trainer.validating or trainer.sanity_checking or trainer.testing
            return self._without_repetitions(trainer, processed) if evaluating else processed

        self._replace(self._strategy_patch, trainer.strategy, "process_dataloader", process_dataloader)

    def _without_repetitions(self, trainer: Trainer, loader: Any) -> Any:
        sampler = real_samples_of(loader, trainer.world_size)
        if sampler is not None:
            return _update_dataloader(loader, sampler) if sampler is not loader.sampler else loader
        if not self.assume_disjoint:
            raise ValueError(
                f"ExactEvaluation cannot tell which of its samples {_described(loader)} gives to which of "
                f"{trainer.world_size} processes. Use a map-style dataset and leave the sampler to the Trainer, or use "
                "torch's DistributedSampler; or, if each sample lies on exactly one process, "
                "ExactEvaluation(assume_disjoint=True)."
            )
        if hasattr(loader, "__len__"):
            self._check_equally_many(len(loader))
        return loader

    @staticmethod
    def _check_equally_many(num_batches: int) -> None:
        counts = gather(torch.tensor([num_batches])).tolist()
        if len(set(counts)) > 1:
            raise ValueError(
                f"The processes' evaluation loaders have {counts} batches. Sharded models need every process in every "
                "forward pass: give all of them equally many."
            )

    # ------------------------------------------------------------------ one evaluation
    def _start(self, trainer: Trainer, pl_module: LightningModule, step: str) -> None:
        self._finish()
        loop: Any = trainer._active_loop
        if is_param_in_hook_signature(getattr(pl_module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"ExactEvaluation cannot follow {step}(dataloader_iter), which fetches its batches by itself. "
                "Let it take (batch, batch_idx)."
            )
        if trainer.world_size > 1 and loop.num_dataloaders > 1 and not loop._is_sequential:
            raise ValueError(
                "ExactEvaluation cannot follow a CombinedLoader that mixes several loaders in a batch. Use "
                "CombinedLoader(..., mode='sequential'), or return a list of loaders."
            )
        batch_end = f"on_{step.removesuffix('_step')}_batch_end"
        self._replace(self._patches, pl_module, "log", self._logging(trainer, pl_module, pl_module.log))
        self._replace(self._patches, pl_module, step, self._masking(getattr(pl_module, step)))
        self._replace(self._patches, pl_module, batch_end, self._restoring(getattr(pl_module, batch_end)))
        for metric in metrics_of(pl_module) if trainer.world_size > 1 else ():
            sync = gathering_any_number(metric)
            if sync is not None:
                self._replace(self._patches, metric, "_sync_dist", sync)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module, "validation_step")

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module, "test_step")

    def _start_batch(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int, dataloader_idx: int) -> None:
        loop: Any = trainer._active_loop
        loader = loop._combined_loader.flattened[dataloader_idx]
        sampler = getattr(loader, "sampler", None)
        self._num_samples = sampler.num_real_in(batch_idx) if isinstance(sampler, RealSamples) else None
        self._in_batch = True
        self._states = MetricStates(pl_module) if self.is_padding else None
        self._follow(loader, batch_idx)

    def _follow(self, loader: Any, batch_idx: int) -> None:
        """Tell `GradientState` of the loader, unless the strategy has: that is where `gather_for_metrics` looks."""
        state = GradientState()
        if state.active_dataloader is not loader:
            self._unfollow()
            state._add_dataloader(loader)
            self._loader = loader
        if self._loader is loader and hasattr(loader, "__len__"):
            state._set_end_of_dataloader(loader, batch_idx + 1 == len(loader))

    def _unfollow(self) -> None:
        if self._loader is not None:
            GradientState()._remove_dataloader(self._loader)
            self._loader = None

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._start_batch(trainer, pl_module, batch_idx, dataloader_idx)

    on_test_batch_start = on_validation_batch_start

    def _end_batch(self, trainer: Trainer, batch_idx: int, dataloader_idx: int) -> None:
        """After a loader's last step, make sure that all processes have logged the same names: each is a collective."""
        loop: Any = trainer._active_loop
        group = communication_group("ExactEvaluation")
        if group is not None and batch_idx + 1 == loop.max_batches[dataloader_idx]:
            results: Any = trainer._results
            agree("logged values", [key for key, value in results.items() if not value.has_reset], [], group)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._end_batch(trainer, batch_idx, dataloader_idx)

    on_test_batch_end = on_validation_batch_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish()

    on_test_end = on_validation_end

    # ------------------------------------------------------------------ the module's methods, meanwhile
    def _masking(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def masked_step(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            return without_samples(output) if self.is_padding else output

        return masked_step

    def _restoring(self, batch_end: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(batch_end)
        def restoring_batch_end(*args: Any, **kwargs: Any) -> Any:
            result = batch_end(*args, **kwargs)
            if self._states is not None:
                self._states.restore()
                self._states = None
            self._in_batch = False
            return result

        return restoring_batch_end

    def _logging(self, trainer: Trainer, pl_module: LightningModule, log: Callable[..., None]) -> Callable[..., None]:
        parameters = signature(log)

        @wraps(log)
        def exact_log(*args: Any, **kwargs: Any) -> None:
            given = parameters.bind(*args, **kwargs)
            given.apply_defaults()
            arguments = given.arguments
            value = arguments["value"]
            if isinstance(value, Metric):
                if trainer.world_size > 1:
                    self._check_metric(pl_module, value, arguments["name"])
            elif isinstance(value, (int, float, Tensor)) and not arguments["rank_zero_only"]:
                if self._in_batch:
                    arguments = self._exact_arguments(trainer, pl_module, dict(arguments))
                elif trainer.world_size > 1:
                    arguments = {**arguments, "value": self._same_everywhere(arguments["name"], value)}
            log(**arguments)

        return exact_log

    @staticmethod
    def _check_metric(pl_module: LightningModule, metric: Metric, name: str) -> None:
        if all(metric is not module for module in pl_module.modules()):
            raise ValueError(
                f"self.log({name!r}): the {type(metric).__name__} is not an attribute of the module or a submodule, so "
                "that steps that must not count would count in it. Make it one (torch.nn.ModuleList for several)."
            )
        check_exact(metric, name)

    def _exact_arguments(
        self, trainer: Trainer, pl_module: LightningModule, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments that log the value by a metric of ours."""
        name, value = arguments["name"], torch.as_tensor(arguments["value"], device=pl_module.device).detach()
        reduction = reduction_named(arguments["reduce_fx"])
        if arguments["on_step"] and arguments["sync_dist"] and trainer.world_size > 1:
            raise ValueError(
                f"self.log({name!r}, on_step=True, sync_dist=True) averages over processes whatever number of samples "
                "each has in a step. Leave sync_dist out: the epoch's value is over all processes in any case."
            )
        if arguments["on_epoch"] is False or reduction is None or value.numel() != 1:
            return arguments  # no value of the epoch, or an error of Lightning's own
        results: Any = trainer._results
        dataloader_idx = results.dataloader_idx if arguments["add_dataloader_idx"] else None
        key = (pl_module._current_fx_name, name, dataloader_idx)
        if key not in self._values:
            self._values[key] = _new_value(name, reduction, value)
        logged = self._values[key]
        logged.add(value.reshape(()), self._weight_of(results, reduction, arguments["batch_size"]))
        return {**arguments, "value": logged, "metric_attribute": f"ExactEvaluation.{name}", "sync_dist": False}

    def _weight_of(self, results: Any, reduction: Reduction, given: int | None) -> int:
        if self._num_samples == 0:
            return 0
        if given is not None or reduction != "mean":
            return 1 if given is None else given
        return extract_batch_size(results.batch) if self._num_samples is None else self._num_samples

    @staticmethod
    def _same_everywhere(name: str, value: float | Tensor) -> Tensor:
        """Return process 0's value of a number logged outside of steps.

        Raises:
            ValueError: On all processes, if they have different ones.
        """
        mine = torch.as_tensor(value).detach().reshape(-1)
        [everyone] = gather({f"self.log({name!r})": mine}).values()
        first = everyone[: len(mine)]
        if not torch.allclose(everyone.double(), first.double().repeat(len(everyone) // len(first)), equal_nan=True):
            raise ValueError(
                f"self.log({name!r}) got {everyone.tolist()} on the processes, outside of a step: how many samples "
                "stand behind each is not known. Log it in the step, or use a metric of torchmetrics, or gather what "
                "it is computed from (ExactEvaluation.of(trainer).gather)."
            )
        return first.reshape(torch.as_tensor(value).shape)

    # ------------------------------------------------------------------ the end
    @staticmethod
    def _replace(patches: list[tuple[Any, str]], owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Let an attribute of the instance hide a method of its class."""
        patches.append((owner, name))
        owner.__dict__[name] = method

    @staticmethod
    def _put_back(patches: list[tuple[Any, str]]) -> None:
        while patches:
            owner, name = patches.pop()
            owner.__dict__.pop(name, None)

    def _finish(self) -> None:
        self._put_back(self._patches)
        self._values, self._states, self._in_batch = {}, None, False
        self._unfollow()

    def _close(self) -> None:
        self._finish()
        self._put_back(self._strategy_patch)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()


def _new_value(name: str, reduction: Reduction, value: Tensor) -> LoggedValue:
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32  # as Lightning keeps what is logged
    return LoggedValue(name, reduction, dtype, value.device)


def _described(loader: Any) -> str:
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [type(part).__name__ for part in (dataset, sampler, batch_sampler) if part is not None]
    return f"a {type(loader).__name__}" + (f" over {', '.join(parts)}" if parts else "")
