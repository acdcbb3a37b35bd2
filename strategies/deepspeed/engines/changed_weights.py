"""Weights that the user's code has changed: those that the optimizer steps on follow, or the change is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import partitions


class ChangedWeights:
    """Lets the weights that a ZeRO optimizer steps on, and those that the model computes with, follow each other.

    The user's code changes either: the module's parameters, or those of ``optimizer.param_groups``, which are the flat
    partitions that the optimizer steps on. Version counters of these show that it was they.

    Args:
        zero: DeepSpeed's optimizer of the stages 1 to 3.
        parameters: That it trains.
        names: Their names.
    """

    def __init__(self, zero: Any, parameters: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        self._zero, self._parameters, self._names = zero, parameters, names
        self.accept()

    def accept(self) -> None:
        """Accept what there is: both are equal."""
        self._masters = [each._version for each in partitions.masters(self._zero)]
        self._weights = [_version_of(each) for each in self._parameters]

    def follow(self) -> None:
        """Let masters follow weights that were changed; what was changed among the masters themselves stays.

        Raises:
            RuntimeError: If both were changed since the last call.
        """
        changed = self._changed_masters()
        if changed:
            pairs = zip(self._parameters, self._weights, strict=True)
            both = [self._names[each] for each, version in pairs if _version_of(each) != version]
            if both:
                raise RuntimeError(
                    f"{', '.join(both[:3])}{' and others' if both[3:] else ''} was changed in the module, and the "
                    "weights of optimizer.param_groups were changed, too, before either had reached the other. Change "
                    "one of them: the module's parameters."
                )
        take_changed_weights(self._zero, except_for=changed)
        self.accept()

    def reach_model(self) -> None:
        """Let the model compute with masters that were changed through the optimizer; every rank must call it."""
        if self._changed_masters():
            self.follow()
            self.push()

    def push(self) -> None:
        """Let the model compute with the masters; every rank must call it."""
        push_masters(self._zero)
        self.accept()

    def switch_mode(self, name: str) -> None:
        """As `switch_mode`, with what the user's code has changed before."""
        self.follow()
        switch_mode(self._zero, name)
        self.accept()

    def _changed_masters(self) -> list[int]:
        flats = partitions.masters(self._zero)
        return [
            place
            for place, (flat, version) in enumerate(zip(flats, self._masters, strict=True))
            if flat._version != version
        ]


def _version_of(parameter: Any) -> int:
    """Return a number that grows with each change in place, also of a partition of stage 3."""
    partition: Tensor | None = getattr(parameter, "ds_tensor", None)
    return int(parameter._version) + (0 if partition is None else int(partition._version))


def switch_mode(optimizer: Any, name: str) -> None:
    """Call ``train()`` or ``eval()`` of the optimizer inside DeepSpeed's, whose weights change, on every rank.

    Args:
        optimizer: DeepSpeed's.
        name: Of the method.
    """
    if not partitions.is_partitioned_optimizer(optimizer):
        getattr(optimizer.optimizer, name)()
        return
    with partitions.groups_with_masters(optimizer):
        getattr(optimizer.optimizer, name)()
    push_masters(optimizer)


@torch.no_grad()
def push_masters(zero: Any) -> None:
    """Copy the weights that a ZeRO optimizer steps on into those that the model computes with, on all ranks.

    Every rank must call it, outside of forward and backward.
    """
    for master, weights in zip(partitions.masters(zero), partitions.computing_weights(zero), strict=True):
        if weights is not None and weights.data_ptr() != master.data_ptr():
            weights.copy_(master)
    if partitions.is_stage_3(zero):
        zero.parameter_offload.partition_all_parameters()
        if zero.persistent_parameters:  # small ones, which stay gathered
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        return
    for flat, parts, group in zip(
        zero.bit16_groups_flat, zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True
    ):
        own = parts[dist.get_rank(group)].clone()
        gathered = [torch.empty_like(own) for _ in parts]
        dist.all_gather(gathered, own, group=group)
        flat.copy_(torch.cat(gathered)[: flat.numel()])


@torch.no_grad()
def take_changed_weights(zero: Any, *, except_for: Sequence[int] = ()) -> None:
    """Let the weights that a ZeRO optimizer steps on follow what the user's code has written into the parameters.

    Args:
        zero: DeepSpeed's optimizer of the stages 1 to 3.
        except_for: Flat partitions that the user's code has changed themselves.
    """
    pairs = zip(partitions.masters(zero), partitions.computing_weights(zero), strict=True)
    for place, (master, weights) in enumerate(pairs):
        if weights is None or place in except_for or weights.data_ptr() == master.data_ptr():
            continue
        if weights.dtype == master.dtype and weights.device == master.device:
            master.data.copy_(weights)
            continue
        on_device = weights.to(master.device)
        changed = on_device != master.detach().to(on_device.dtype)
        if bool(changed.any()):
            master.data.copy_(torch.where(changed, on_device.to(master.dtype), master.detach()))
