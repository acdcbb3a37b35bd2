"""Weights that the user's code has changed: those that the optimizer steps on follow, or the change is refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...upstream.torch_fake import is_planned
from . import partitions
from .scalars import is_gathered_by_user
from .used_parameters import agree


class GatheredChanges:
    """Keeps what users' code changes in stage 3's parameters while they are gathered.

    DeepSpeed drops gathered values when it partitions a parameter anew; under ``ddp`` a change stays. So each rank
    takes its part over first. Version counters show changes in place, and `GlobalTensors` those that training steps
    make through ``parameter.data``. Of forwards and their hooks it sees none: until the first optimizer step, each
    rank compares the values with its partition, and a parameter that differs is taken over from then on.

    Args:
        module: The model, partitioned.
        names: The parameters' names.
        device: Of the ranks' collectives.
    """

    def __init__(self, module: nn.Module, names: Mapping[nn.Parameter, str], device: torch.device) -> None:
        self._names, self._device = names, device
        self._versions: dict[nn.Parameter, int] = {}
        self._changed: set[nn.Parameter] = set()
        self._always: set[nn.Parameter] = set()
        self._probes = not is_planned()
        for parameter in module.parameters():
            self._watch(parameter)

    def _watch(self, parameter: Any) -> None:
        partition = inspect.unwrap(parameter.partition)  # not an earlier engine's watch

        @functools.wraps(partition)
        def partition_with_changes(
            param_list: list[nn.Parameter] | None = None, *args: Any, has_been_updated: bool = False, **kwargs: Any
        ) -> None:
            both: dict[bool, list[nn.Parameter]] = {False: [], True: []}
            for each in param_list or [parameter]:
                both[has_been_updated or self._is_changed(each)].append(each)
            for is_changed, some in both.items():
                if some:
                    partition(some, *args, has_been_updated=is_changed, **kwargs)
            self._accept(both[True])

        parameter.partition = partition_with_changes
        self._versions[parameter] = parameter._version

    def _is_changed(self, parameter: Any) -> bool:
        if parameter.ds_status.name != "AVAILABLE":
            return False
        if parameter in self._changed or parameter in self._always or self._has_new_version(parameter):
            return True
        if self._probes and _differs_from_partition(parameter):
            self._always.add(parameter)
            return True
        return False

    def _has_new_version(self, parameter: nn.Parameter) -> bool:
        return self._versions[parameter] != parameter._version

    def _accept(self, parameters: Iterable[nn.Parameter]) -> None:
        for each in parameters:
            self._versions[each] = each._version
            self._changed.discard(each)

    def accept(self) -> None:
        """Accept the values that parameters have now: they come from a checkpoint."""
        self._accept(self._versions)

    def note(self, parameter: nn.Parameter) -> None:
        """Take note that users' code changes a parameter, which is gathered."""
        self._changed.add(parameter)

    def take_over(self) -> None:
        """Let partitions have all changes before the optimizer steps on them; every rank must call it.

        Raises:
            RuntimeError: If a parameter was changed in place while it was partitioned, where it has no values.
        """
        for each in self._versions:
            parameter: Any = each
            if parameter.ds_status.name == "AVAILABLE" and not is_gathered_by_user(parameter):
                parameter.partition()  # one that stays gathered (``ds_persist``); DeepSpeed gathers it after its step
        if self._probes and dist.get_world_size() > 1:
            found = agree([each in self._always for each in self._versions], self._device).some
            self._always = {each for each, is_found in zip(self._versions, found, strict=True) if is_found}
        self._probes = False
        lost = [self._names[each] for each in self._versions if self._has_new_version(each)]
        if lost:
            self.accept()
            were, them = ("were", "them") if lost[1:] else ("was", "it")
            raise RuntimeError(
                f"{', '.join(lost)} {were} changed in place while stage 3 had {them} partitioned, so that the change "
                "is lost. Change weights in a hook, such as on_train_batch_start() or on_train_batch_end(), or inside "
                "'with strategy.full_parameters(module):', on every rank."
            )


def _differs_from_partition(parameter: Any) -> bool:
    held: Tensor = parameter.ds_tensor
    if held.dtype != parameter.dtype or hasattr(held, "ds_quant_scale") or held.numel() < parameter.partition_numel():
        return False  # quantized, or on NVMe
    start, count = partitions.range_in_partition(parameter, held.numel())
    own = parameter.detach().reshape(-1).narrow(0, start if count else 0, count)
    return not torch.equal(own.to(held.device), held.narrow(0, 0, count))


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
