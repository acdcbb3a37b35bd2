"""Weights that users' code changes while they are unsharded: in a forward, a forward hook, or `training_step`.

FSDP frees unsharded parameters, and every change with them. Under ``ddp`` a change stays: momentum encoders, initial
values from the first batch, clamps before a forward. So before a unit is resharded, each rank takes the changed
elements of its own part over.

Version counters show changes in place. A change through ``parameter.data`` leaves them as they are, so the first
training step of a fit compares checksums as well; a unit whose weights it finds changed is compared in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...common.global_tensors import local_part, part_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**20
_version = attrgetter("_version")


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of a tensor, each element weighted by its place."""
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    weights = torch.arange(1, min(_PIECE, bits.numel()) + 1, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in torch.split(bits, _PIECE):  # each needs eight bytes an element
        total = total * 31 + (piece * weights[: piece.numel()]).sum()
    return total


def take_changes(part: Tensor, shard: Tensor) -> None:
    """Let ``shard`` have the elements of ``part`` that differ from it in the dtype of ``part``."""
    part = part.to(shard.device)
    torch.where(part != shard.to(part.dtype), part.to(shard.dtype), shard, out=shard)


class GroupChanges:
    """Follows one parameter group of FSDP2.

    Args:
        group: torch's.
        is_probing: Whether checksums are to be compared now.
    """

    def __init__(self, group: Any, is_probing: Callable[[], bool]) -> None:
        self._group, self._is_probing = group, is_probing
        self._versions: list[int] = []
        self._sums: list[Tensor] = []
        self._compares = False
        self._reshard, self._wait = type(group).reshard, type(group).wait_for_unshard
        group.reshard, group.wait_for_unshard = self.reshard, self.wait_for_unshard

    def wait_for_unshard(self) -> None:
        """Note what the parameters are when they have been gathered."""
        group = self._group
        was_unsharded = group.is_unsharded
        self._wait(group)
        if was_unsharded or not group.is_unsharded:
            return
        leaves = self._leaves()
        self._versions = list(map(_version, leaves))
        if self._is_probing():
            self._sums = [checksum(leaf) for leaf in leaves]

    def reshard(self) -> None:
        """Take over what has changed, then reshard."""
        group = self._group
        if group.is_unsharded and self._versions:
            leaves = self._leaves()
            versions = list(map(_version, leaves))
            if versions != self._versions or self._compares or self._sums:
                self._take(leaves, versions)
        self._reshard(group)

    def _leaves(self) -> list[Any]:
        return [param._unsharded_param for param in self._group.fsdp_params]

    @torch.no_grad()
    def _take(self, leaves: list[Any], versions: list[int]) -> None:
        if self._sums:
            sums = [checksum(leaf) for leaf in leaves]
            self._compares |= any(bool(one != other) for one, other in zip(sums, self._sums, strict=True))
            self._sums = []
        if versions == self._versions and not self._compares:
            return
        self._versions = versions
        for param, leaf in zip(self._group.fsdp_params, leaves, strict=True):
            shard = param.sharded_param
            take_changes(local_part(part_of(leaf, shard)), local_part(shard))


class FlatChanges:
    """Follows the flat parameter of one unit of FSDP1.

    Changes in place of FSDP1's views raise an error of torch's; those through ``.data`` are taken over.

    Args:
        handle: torch's, of a sharded unit.
        is_probing: Whether checksums are to be compared now.
    """

    def __init__(self, handle: Any, is_probing: Callable[[], bool]) -> None:
        self._handle, self._is_probing = handle, is_probing
        self._sum: Tensor | None = None
        self._compares = False
        self._reshard = type(handle).reshard
        handle.reshard = self.reshard

    def after_unshard(self) -> None:
        """Note what the parameters are when they have been gathered."""
        if self._is_probing():
            self._sum = checksum(self._handle.flat_param)

    def takes_writes(self, storage: int) -> bool:
        """Return whether ``storage`` is that of the unsharded parameters; if so, they are compared from now on."""
        flat_param = self._handle.flat_param
        is_mine = storage == flat_param.untyped_storage().data_ptr()
        self._compares |= is_mine
        return bool(is_mine)

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Take over what has changed, then reshard."""
        if self._sum is not None or self._compares:
            self._take()
        self._reshard(self._handle, free_unsharded_flat_param)

    @torch.no_grad()
    def _take(self) -> None:
        flat_param = self._handle.flat_param
        shard: Tensor = flat_param._local_shard
        if flat_param.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
            return  # sharded already
        before, self._sum = self._sum, None
        if before is not None and bool(before != checksum(flat_param)):
            self._compares = True
        if self._compares:
            full = flat_param.detach().view(-1)
            begin = min(full.numel(), self._handle.rank * shard.numel())
            part = full.narrow(0, begin, min(shard.numel(), full.numel() - begin))
            take_changes(part, shard.narrow(0, 0, part.numel()))
