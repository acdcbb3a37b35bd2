"""States of torchmetrics' metrics: whether they can be exact; put back after a step that must not count; gathered."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean
from torchmetrics.utilities.distributed import gather_all_tensors


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
                f"self.log({name!r}): {kind}(sync_on_compute=False) computes from the samples of one process alone. "
                "Leave sync_on_compute out."
            )
        averaged = [
            state
            for state, reduction in one._reductions.items()
            if reduction is dim_zero_mean and not _is_default(one, state)
        ]
        if averaged:
            raise ValueError(
                f"self.log({name!r}): {kind} averages {averaged} over processes, whatever number of samples each has. "
                "Use a metric whose states are summed or concatenated (dist_reduce_fx='sum' or 'cat')."
            )


def _is_default(metric: Metric, state: str) -> bool:
    """Whether a state never changed: a constant (PSNR's data_range) is equal to its mean."""
    return torch.equal(getattr(metric, state), torch.as_tensor(metric._defaults[state]))


class MetricStates:
    """What a module's metrics hold now.

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
                setattr(metric, name, _emptied(getattr(metric, name)) if joined else before)
            if metric._update_count > update_count:  # 0 would make torchmetrics warn that nothing came
                metric._update_count = max(update_count, 1)
            metric._computed = computed


def _emptied(added: Any) -> Any:
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
    dist.all_gather_object(described, {name: _described(elements) for name, elements in mine.items()}, group=group)
    senders: dict[int, list[int]] = {}
    for name, elements in mine.items():
        counts = [one[name][0] for one in described]
        form = next((form for _, form in (one[name] for one in described) if form is not None), None)
        if form is None:
            if len(set(counts)) > 1:
                raise ValueError(
                    f"{type(self).__name__}.{name} holds {counts} things on the processes that are no tensors: "
                    "torchmetrics gathers equally many only. Use a batch size that divides the number of samples."
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


def _described(elements: Any) -> tuple[int, tuple[int, torch.dtype] | None]:
    """Return how many there are, and what they are like where they are tensors."""
    first = elements[0] if len(elements) else None
    return len(elements), (first.ndim, first.dtype) if isinstance(first, Tensor) else None
