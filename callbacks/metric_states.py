"""The states of torchmetrics' metrics: whether they can be exact, and put back after a step that must not count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_mean


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

        A list that was empty keeps what was added, with no samples in it: torchmetrics gathers lists by the number of
        dimensions and the dtype of what they hold, which have to be the same on all processes.
        """
        for metric, states, update_count, computed in self._saved:
            for name, before in states.items():
                setattr(metric, name, _emptied(getattr(metric, name)) if before == [] else before)
            if metric._update_count > update_count:  # 0 would make torchmetrics warn that nothing came
                metric._update_count = max(update_count, 1)
            metric._computed = computed


def _emptied(added: Any) -> Any:
    return [tensor[:0] for tensor in added if isinstance(tensor, Tensor) and tensor.ndim > 0]
