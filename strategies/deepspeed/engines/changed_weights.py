"""Weights that the user's code has changed: those that the optimizer steps on follow, or the change is refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import partitions


class LostChanges:
    """Refuses changes in place that stage 3 loses: those made to a parameter while it is partitioned.

    Args:
        module: The model, partitioned.
        names: The parameters' names.
    """

    def __init__(self, module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._versions: dict[nn.Parameter, int] = {}
        for parameter in module.parameters():
            self._watch(parameter)

    def _watch(self, parameter: Any) -> None:
        """Take note when ``GatheredParameters`` hands changed values over; any other change in place is lost."""
        partition = getattr(parameter.partition, "__wrapped__", parameter.partition)  # not an earlier engine's watch

        @functools.wraps(partition)
        def partition_noting(
            param_list: list[nn.Parameter] | None = None, *args: Any, has_been_updated: bool = False, **kwargs: Any
        ) -> None:
            partition(param_list, *args, has_been_updated=has_been_updated, **kwargs)
            if has_been_updated:
                self._versions.update((each, each._version) for each in param_list or [parameter])

        parameter.partition = partition_noting
        self._versions[parameter] = parameter._version

    def accept(self) -> None:
        """Accept the values that parameters have now: they come from a checkpoint."""
        self._versions = {parameter: parameter._version for parameter in self._versions}

    def refuse(self) -> None:
        """Raise if a change has been lost.

        Raises:
            RuntimeError: Once for each change; it names the parameters.
        """
        lost = [self._names[each] for each, version in self._versions.items() if each._version != version]
        if lost:
            self.accept()
            raise RuntimeError(
                f"{', '.join(lost)} was changed in place while stage 3 had it partitioned, so that the change is lost. "
                "Change weights inside 'with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):', on "
                "every rank."
            )


def take_changed_weights(zero: Any) -> None:
    """Let the weights that a ZeRO optimizer steps on follow what the user's code has written into the parameters."""
    for master, weights in zip(partitions.masters(zero), partitions.computing_weights(zero), strict=True):
        if weights is None or weights.data_ptr() == master.data_ptr():
            continue
        if weights.dtype == master.dtype and weights.device == master.device:
            master.data.copy_(weights)
            continue
        on_device = weights.to(master.device)
        changed = on_device != master.detach().to(on_device.dtype)
        if bool(changed.any()):
            master.data.copy_(torch.where(changed, on_device.to(master.dtype), master.detach()))
