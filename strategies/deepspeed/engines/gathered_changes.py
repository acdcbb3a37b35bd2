"""Changes that users' code makes in stage 3's parameters while they are gathered."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
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
        """Give partitions all changes that this rank has seen.

        Raises:
            RuntimeError: If a parameter was changed in place while it was partitioned, where it has no values.
        """
        for each in self._versions:
            parameter: Any = each
            if self._is_changed(parameter) and not is_gathered_by_user(parameter):
                parameter.ds_active_sub_modules.clear()  # as DeepSpeed does when it steps
                parameter.partition()
        lost = [self._names[each] for each in self._versions if self._has_new_version(each)]
        if lost:
            self.accept()
            were, them = ("were", "them") if lost[1:] else ("was", "it")
            raise RuntimeError(
                f"{', '.join(lost)} {were} changed in place while stage 3 had {them} partitioned, so that the change "
                "is lost. Change weights in a hook, such as on_train_batch_start() or on_train_batch_end(), or inside "
                "'with strategy.full_parameters(module):', on every rank."
            )

    def end_probing(self) -> None:
        """Stop comparing values, once the optimizer steps for the first time; every rank must call it."""
        if self._probes and dist.get_world_size() > 1:
            found = agree([each in self._always for each in self._versions], self._device).some
            self._always = {each for each, is_found in zip(self._versions, found, strict=True) if is_found}
        self._probes = False


def _differs_from_partition(parameter: Any) -> bool:
    held: Tensor = parameter.ds_tensor
    if held.dtype != parameter.dtype or hasattr(held, "ds_quant_scale") or held.numel() < parameter.partition_numel():
        return False  # quantized, or on NVMe
    start, count = partitions.range_in_partition(parameter, held.numel())
    own = parameter.detach().reshape(-1).narrow(0, start if count else 0, count)
    return not torch.equal(own.to(held.device), held.narrow(0, 0, count))
