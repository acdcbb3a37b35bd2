"""`ExactEvaluation`: validation and test metrics of many processes equal those of one.

Samplers pad the last batches so that ranks stay together. The callback removes the padded samples from what steps and
metrics receive; empty outputs, logged values and the states of torchmetrics' metrics are handled below.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from itertools import islice
from numbers import Number
from types import MethodType
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from ..state import GradientState, gather
from ..state.collectives import agree, gather_interleaved, gather_replicas, map_tensors, tensors_of
from ..state.process_record import communication_group
from ..state.utils import named_arguments
from ..strategies.common.modules import GatherReplicas
from ..strategies.upstream.lightning import (
    Callback,
    DistributedSamplerWrapper,
    LightningModule,
    Trainer,
    _get_dataloader_init_args_and_kwargs,
    _reinstantiate_wrapped_cls,
    check_trainer,
    extract_batch_size,
    is_param_in_hook_signature,
)
from ..strategies.upstream.patches import Patches

T = TypeVar("T")


@named_arguments
class ExactEvaluation(Callback):
    """Makes validation and test metrics of many processes equal to those of one, although all get equally many samples.

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
    - Processes that share one copy of the model (tensor or sequence parallelism) have the same samples, and count as
      one.

    Floating-point sums of another order may differ in their last bits, as they do between batch sizes.

    It raises instead of giving a wrong number where it cannot know: loaders that divide samples in an unknown way, a
    loader that drops samples, numbers logged at the epoch's end that differ between processes. It does not see values
    that a step keeps in the module by itself; let such a step use `gather`, or look at `num_samples`.

    Args:
        assume_disjoint: Accept loaders that do not show which process has which samples (iterable datasets, samplers of
            your own), because each of their samples is on exactly one process.
    """

    def __init__(self, assume_disjoint: bool = False) -> None:
        self.assume_disjoint = assume_disjoint
        self._patches = Patches("callbacks")
        self._strategy_patch = Patches("callbacks")
        self._values: dict[tuple[Any, ...], LoggedValue] = {}
        self._loader: Any = None
        self._num_samples: int | None = None
        self._in_batch = False
        self._group_size = 1
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
            raise RuntimeError("num_samples is known only in validation and test steps that the Trainer runs.")
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
            return gather_replicas(data, self._group_size)
        rows = max(num_samples, 1)  # a repetition alone in its batch is one row
        for path, tensor in tensors_of(data).items():
            if tensor.ndim == 0 or len(tensor) != rows:
                raise ValueError(
                    f"{path} has shape {list(tensor.shape)}, but this process's batch has {rows} sample(s). Return "
                    "one row per sample, or reduce values with accelight.state.reduce."
                )
        return gather_interleaved(data, num_samples, self._group_size)

    # ------------------------------------------------------------------ loaders
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        self._close()
        self._group_size = getattr(trainer.strategy, "non_data_parallel_size", 1)
        if trainer.world_size == 1:
            return
        warnings.filterwarnings("ignore", r".*recommended to use .Trainer\(devices=1.*")  # "to be exact": this is
        process = trainer.strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            processed = process(dataloader)
            evaluating = trainer.validating or trainer.sanity_checking or trainer.testing
            return self._without_repetitions(trainer, processed) if evaluating else processed

        self._strategy_patch.put(trainer.strategy, "process_dataloader", process_dataloader)

    def _without_repetitions(self, trainer: Trainer, loader: Any) -> Any:
        sampler = real_samples_of(loader, trainer.world_size // self._group_size)
        if sampler is not None:
            return _with_all_of(sampler, loader) if sampler is not loader.sampler else loader
        if not self.assume_disjoint:
            raise ValueError(
                f"ExactEvaluation cannot determine how {_described(loader)} distributes samples over "
                f"{trainer.world_size} processes. Use a map-style dataset and let the Trainer add the sampler, or "
                "use torch's DistributedSampler(dataset, **trainer.strategy.distributed_sampler_kwargs); or, if each "
                "sample is on exactly one process, use ExactEvaluation(assume_disjoint=True)."
            )
        if hasattr(loader, "__len__"):
            self._check_equally_many(len(loader))
        return loader

    @staticmethod
    def _check_equally_many(num_batches: int) -> None:
        counts = gather(torch.tensor([num_batches])).tolist()
        if len(set(counts)) > 1:
            raise ValueError(
                f"The processes' evaluation loaders have {counts} batches. Sharded models need every process in "
                "every forward pass: use the same number of batches on all processes."
            )

    # ------------------------------------------------------------------ one evaluation
    def _start(self, trainer: Trainer, pl_module: LightningModule, step: str) -> None:
        self._finish()
        loop: Any = trainer._active_loop
        if is_param_in_hook_signature(getattr(pl_module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"ExactEvaluation cannot follow {step}(dataloader_iter), which fetches its own batches. Use "
                f"{step}(batch, batch_idx)."
            )
        if trainer.world_size > 1 and loop.num_dataloaders > 1 and not loop._is_sequential:
            raise ValueError(
                "ExactEvaluation cannot follow a CombinedLoader that mixes several loaders in a batch. Use "
                "CombinedLoader(..., mode='sequential'), or return a list of loaders."
            )
        batch_end = f"on_{step.removesuffix('_step')}_batch_end"
        self._patches.put(pl_module, "log", self._logging(trainer, pl_module, pl_module.log))
        self._patches.put(pl_module, step, self._masking(getattr(pl_module, step)))
        self._patches.put(pl_module, batch_end, self._restoring(getattr(pl_module, batch_end)))
        for metric in metrics_of(pl_module) if trainer.world_size > 1 else ():
            sync = gathering_any_number(metric)
            if sync is not None:
                self._patches.put(metric, "_sync_dist", sync)

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
        @wraps(inspect.unwrap(step))  # Lightning unwraps once, and looks whether it takes batch_idx
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
            elif isinstance(value, (Number, Tensor)) and not arguments["rank_zero_only"]:
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
                f"self.log({name!r}): the {type(metric).__name__} is not an attribute of the module or a submodule, "
                "so steps that must not count would count in it. Store it as an attribute (use torch.nn.ModuleList "
                "for several)."
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
                f"self.log({name!r}, on_step=True, sync_dist=True) averages over processes regardless of how many "
                "samples each has in a step. Remove sync_dist: the value of the epoch covers all processes in any "
                "case."
            )
        if arguments["on_epoch"] is False or reduction is None or value.numel() != 1:
            return arguments  # no value of the epoch, or an error of Lightning's own
        results: Any = trainer._results
        dataloader_idx = results.dataloader_idx if arguments["add_dataloader_idx"] else None
        key = (pl_module._current_fx_name, name, dataloader_idx)
        if key not in self._values:
            self._values[key] = _new_value(name, reduction, value, self._group_size)
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
    def _same_everywhere(name: str, value: Any) -> Tensor:
        """Return process 0's value of a number logged outside of steps.

        Raises:
            ValueError: On all processes, if they have different ones.
        """
        mine = torch.as_tensor(value).detach().reshape(-1)
        [everyone] = gather({f"self.log({name!r})": mine}).values()
        first = everyone[: len(mine)]
        if not torch.allclose(everyone.double(), first.double().repeat(len(everyone) // len(first)), equal_nan=True):
            raise ValueError(
                f"self.log({name!r}) got {everyone.tolist()} on the processes, outside a step: the number of samples "
                "behind each value is unknown. Log it in the step, use a metric of torchmetrics, or gather the "
                "values that it is computed from (ExactEvaluation.of(trainer).gather)."
            )
        return first.reshape(torch.as_tensor(value).shape)

    # ------------------------------------------------------------------ the end
    def _finish(self) -> None:
        self._patches.remove()
        self._values, self._states, self._in_batch = {}, None, False
        self._unfollow()

    def _close(self) -> None:
        self._finish()
        self._strategy_patch.remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()


def _new_value(name: str, reduction: Reduction, value: Tensor, group_size: int) -> LoggedValue:
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32  # as Lightning keeps what is logged
    return LoggedValue(name, reduction, dtype, value.device, group_size)


def _described(loader: Any) -> str:
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [type(part).__name__ for part in (dataset, sampler, batch_sampler) if part is not None]
    return f"a {type(loader).__name__}" + (f" over {', '.join(parts)}" if parts else "")


# ------------------------------------------------------------------------------------------------
# The result of a step for a batch without samples.


def without_samples(output: Any) -> Any:
    """Return the output of a step over one sample that must not count, with no samples in it.

    A tensor with one row has none then. A scalar becomes NaN, as a mean over nothing is; a whole number becomes 0.
    """
    return map_tensors(_emptied, output)


def _emptied(tensor: Tensor) -> Tensor:
    if tensor.ndim > 0 and len(tensor) == 1:
        return tensor[:0]
    if tensor.ndim > 0:
        return tensor  # not one row a sample
    return torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 0)


# ------------------------------------------------------------------------------------------------
# Numbers that evaluation steps log: summed over the samples of all processes, each once.


Reduction = Literal["mean", "sum", "max", "min"]
_NEUTRAL: dict[Reduction, float] = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}


def reduction_named(reduce_fx: Any) -> Reduction | None:
    """Return which of the reductions ``self.log(reduce_fx=...)`` names, None if none of them."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = "mean" if name.lower() == "avg" else name.lower()
    return cast("Reduction", name) if name in _NEUTRAL else None


class LoggedValue(Metric):
    """A number logged at each step, and its reduction over the steps of all processes.

    Sums are kept in double precision, so that the order in which processes add up hardly shows.

    Args:
        name: Under which it is logged.
        reduction: How.
        dtype: Of the result.
        device: Of the value.
        group_size: Processes with consecutive ranks that log the same.
    """

    full_state_update = False
    total: Tensor
    weight: Tensor
    _forward_cache: Any

    def __init__(
        self, name: str, reduction: Reduction, dtype: torch.dtype, device: torch.device, group_size: int
    ) -> None:
        super().__init__(sync_on_compute=False)  # `compute` gathers by itself, and notices where processes differ
        self.name, self.reduction, self.result_dtype, self.group_size = name, reduction, dtype, group_size
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no double precision
        self.add_state("total", torch.tensor(_NEUTRAL[reduction], dtype=wide, device=device))
        self.add_state("weight", torch.tensor(0, dtype=torch.int64, device=device))

    def add(self, value: Tensor, weight: int) -> None:
        """Add a step's value and keep it as that of the step, which ``on_step=True`` shows."""
        self.update(value, weight)
        self._forward_cache = value

    @override
    def update(self, value: Tensor, weight: int) -> None:
        """Add a step's value, with its number of samples; 0 leaves the value out."""
        if weight == 0:
            return
        value = value.to(self.total)
        if self.reduction == "mean":
            self.total = self.total + value * weight
        elif self.reduction == "sum":
            self.total = self.total + value
        else:
            self.total = (torch.maximum if self.reduction == "max" else torch.minimum)(self.total, value)
        self.weight = self.weight + weight

    @override
    def compute(self) -> Tensor:
        """Return the reduction over all processes, the same on each."""
        parts = gather_replicas({f"self.log({self.name!r})": [self.total, self.weight]}, self.group_size)
        totals, weights = next(iter(parts.values()))
        if self.reduction == "mean":
            result = totals.sum() / weights.sum()
        elif self.reduction == "sum":
            result = totals.sum()
        else:
            result = totals.amax() if self.reduction == "max" else totals.amin()
        return result.to(self.result_dtype)


# ------------------------------------------------------------------------------------------------
# States of torchmetrics' metrics: checked for exactness, restored after a step that must not count, gathered.


def metrics_of(module: nn.Module) -> list[Metric]:
    """Return the metrics among a module and its submodules, those inside other metrics included."""
    return [child for child in module.modules() if isinstance(child, Metric)]


def check_exact(metric: Metric, name: str) -> None:
    """Check that a metric's value over several processes is that over all their samples.

    Raises:
        ValueError: If it is not.
    """
    for one in metrics_of(metric):
        kind = type(one).__name__
        if not one.sync_on_compute:
            raise ValueError(
                f"self.log({name!r}): {kind}(sync_on_compute=False) computes from the samples of one process only. "
                "Remove sync_on_compute."
            )
        averaged = [
            state
            for state, reduction in one._reductions.items()
            if reduction is dim_zero_mean and not _is_default(one, state)
        ]
        if averaged:
            raise ValueError(
                f"self.log({name!r}): {kind} averages {averaged} over processes, regardless of how many samples each "
                "has. Use a metric whose states are summed or concatenated (dist_reduce_fx='sum' or 'cat')."
            )


def _is_default(metric: Metric, state: str) -> bool:
    """Whether a state never changed: a constant (PSNR's data_range) is equal to its mean."""
    return torch.equal(getattr(metric, state), torch.as_tensor(metric._defaults[state]))


class MetricStates:
    """The present states of a module's metrics.

    Args:
        module: Whose metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._saved = [
            (metric, metric._copy_state_dict(), metric._update_count, metric._computed) for metric in metrics_of(module)
        ]

    def restore(self) -> None:
        """Put it back.

        A list to be concatenated that was empty keeps what was added, with no samples in it: torchmetrics gathers such
        lists by the number of dimensions and the dtype of what they hold, which have to be the same on all processes.
        """
        for metric, states, update_count, computed in self._saved:
            for name, before in states.items():
                joined = before == [] and metric._reductions[name] is dim_zero_cat
                setattr(metric, name, _emptied_state(getattr(metric, name)) if joined else before)
            if metric._update_count > update_count:  # 0 would make torchmetrics warn that nothing came
                metric._update_count = max(update_count, 1)
            metric._computed = computed


def _emptied_state(added: Any) -> Any:
    return [tensor[:0] for tensor in added if isinstance(tensor, Tensor) and tensor.ndim > 0]


def gathering_any_number(metric: Metric) -> Callable[..., None] | None:
    """Return a ``_sync_dist`` for a metric with lists that torchmetrics gathers element by element; None for others.

    Those are the lists that are not concatenated first (``dist_reduce_fx=None``: retrieval, detection, ROUGE).
    torchmetrics 1.9 gathers as many elements as each process has, and hangs or fails where the numbers differ.
    """
    return MethodType(_sync_any_number, metric) if _lists_of_elements(metric) else None


def _lists_of_elements(metric: Metric) -> list[str]:
    return [
        name
        for name, default in metric._defaults.items()
        if isinstance(default, list) and metric._reductions[name] is not dim_zero_cat
    ]


def _sync_any_number(
    self: Metric, dist_sync_fn: Callable[..., list[Tensor]] = gather_all_tensors, process_group: Any = None
) -> None:
    """Fill each process's lists up to the longest, and leave out of what is gathered what was filled in."""
    group = process_group or self.process_group
    mine = {name: getattr(self, name) for name in _lists_of_elements(self)}
    described: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        described, {name: _described_metric(elements) for name, elements in mine.items()}, group=group
    )
    described = described[:: dist_sync_fn.group_size if isinstance(dist_sync_fn, GatherReplicas) else 1]
    senders: dict[int, list[int]] = {}
    for name, elements in mine.items():
        counts = [one[name][0] for one in described]
        form = next((form for _, form in (one[name] for one in described) if form is not None), None)
        if form is None:
            if len(set(counts)) > 1:
                raise ValueError(
                    f"{type(self).__name__}.{name} holds {counts} non-tensor values on the processes: torchmetrics "
                    "gathers only equal numbers. Use a batch size that divides the number of samples."
                )
            continue
        filling = [torch.zeros((0,) * form[0], dtype=form[1], device=self.device)] * (max(counts) - len(elements))
        filled = [element[...] for element in (*elements, *filling)]  # new objects, each with an identity of its own
        for index, element in enumerate(filled):
            senders[id(element)] = [rank for rank, count in enumerate(counts) if index < count]
        setattr(self, name, filled)

    def gather_real(tensor: Tensor, **kwargs: Any) -> list[Tensor]:
        gathered = dist_sync_fn(tensor, **kwargs)
        return [gathered[rank] for rank in senders.get(id(tensor), range(len(gathered)))]

    type(self)._sync_dist(self, gather_real, process_group=process_group)


def _described_metric(elements: Any) -> tuple[int, tuple[int, torch.dtype] | None]:
    """Return their number, and dimensions and dtype where they are tensors."""
    first = elements[0] if len(elements) else None
    return len(elements), (first.ndim, first.dtype) if isinstance(first, Tensor) else None


# ------------------------------------------------------------------------------------------------
# A sampler that gives each sample to one process once, and each process the same number of batches.


_KNOWN = (DistributedSampler.__iter__, DistributedSamplerWrapper.__iter__)


class RealSamples(DistributedSampler[Any]):
    """This process's share of a `DistributedSampler` without what was repeated to make the shares equal.

    The repetition is the last sample of a share, if any. It is left out, unless it would be alone in its batch: then it
    stays, since no process may run fewer forward passes than the others. Such a batch has no real sample.

    Args:
        dealt: The sampler that deals to the processes.
        batch_size: Samples in a batch.
    """

    def __init__(self, dealt: DistributedSampler[Any], batch_size: int) -> None:
        self.__dict__.update(vars(dealt))  # dataset, rank, total_size, ...: what others ask a DistributedSampler for
        self.dealt = dealt
        self.batch_size = batch_size

    @property
    def num_real(self) -> int:
        """Samples of this process."""
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def num_real_in(self, batch_idx: int) -> int:
        """Return how many real samples this process has in a batch; 0 where there is only a repetition."""
        return max(0, min(self.batch_size, self.num_real - batch_idx * self.batch_size))

    def __len__(self) -> int:
        alone = self.num_real % self.batch_size == 0
        return len(self.dealt) if alone else self.num_real

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dealt), len(self))

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler that deals."""
        self.epoch = epoch
        self.dealt.set_epoch(epoch)


def _with_all_of(sampler: RealSamples, loader: Any) -> Any:
    """Return the loader with another sampler; ``drop_last`` could only drop a batch that lacks a repetition."""
    args, kwargs = _get_dataloader_init_args_and_kwargs(loader, sampler)
    return _reinstantiate_wrapped_cls(loader, *args, **{**kwargs, "drop_last": False})


def real_samples_of(loader: Any, num_replicas: int) -> RealSamples | None:
    """Return the sampler that leaves a loader's repetitions out, or None where it is not known how samples are dealt.

    Args:
        loader: As the strategy has processed it.
        num_replicas: Processes that see different batches.

    Raises:
        ValueError: If samples are left out that a single process would evaluate.
    """
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    dealt, batch_size = loader.sampler, loader.batch_sampler.batch_size
    if not isinstance(dealt, DistributedSampler) or dealt.num_replicas != num_replicas:
        return None
    if isinstance(dealt, RealSamples):
        return dealt
    if type(dealt).__iter__ not in _KNOWN:
        return None
    sampler = RealSamples(dealt, batch_size)
    num_samples = len(dealt.dataset)  # type: ignore[arg-type]
    if dealt.drop_last and num_samples % num_replicas:
        raise ValueError(
            f"DistributedSampler(drop_last=True) drops {num_samples % num_replicas} of {num_samples} samples on "
            f"{num_replicas} processes: the result cannot equal that of one process. Remove drop_last."
        )
    if loader.batch_sampler.drop_last and len(dealt) % batch_size:
        raise ValueError(
            f"DataLoader(drop_last=True) drops the last {len(dealt) % batch_size} of {len(dealt)} samples of each "
            "process: the result cannot equal that of one process. Remove drop_last from evaluation loaders."
        )
    return sampler
