"""What the ranks have to agree on before they reduce gradients: which parameters have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .upstream import _get_default_group, _get_grad_fn_or_grad_acc, _will_engine_execute_node

_LARGEST = 2**40


@dataclass(frozen=True)
class Agreed:
    """Of each parameter, in the order given."""

    some: list[bool]
    """Whether some rank has a gradient."""
    mixed: list[bool]
    """Whether some have one and others have none."""
    same_order: bool
    """Whether every rank gave the same ``order``."""


def agree(have: Sequence[bool], device: torch.device, order: int = 0) -> Agreed:
    """Exchange with the other ranks, in one small reduction, which parameters have a gradient here.

    Args:
        have: For each parameter, in the same order on each rank.
        device: Where this rank computes; the CPU is used if the process group has a backend for it.
        order: A number that has to be the same on every rank.
    """
    here = torch.tensor([[*have], [not each for each in have]], dtype=torch.int64)
    check = order % _LARGEST
    vector = torch.cat([here.flatten(), torch.tensor([check, -check])]).to(_device(device))
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    told = vector.tolist()
    some, lacking = told[: len(have)], told[len(have) : 2 * len(have)]
    mixed = [bool(one and other) for one, other in zip(some, lacking, strict=True)]
    return Agreed([bool(each) for each in some], mixed, told[-2] == -told[-1])


def _device(device: torch.device) -> torch.device:
    cpu = torch.device("cpu")
    return cpu if cpu in _get_default_group()._device_types else device


def will_get_gradients(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Tell which parameters the running backward gives a gradient; call it in a hook, before any has one.

    What a reentrant checkpoint computes anew is not in the graph yet, and counts as not used.
    """
    with torch.enable_grad():  # older torch needs it for leaves
        nodes = [_get_grad_fn_or_grad_acc(each) if each.requires_grad else None for each in parameters]
    return [node is not None and _will_engine_execute_node(node) for node in nodes]


def ranks_without(have: bool, device: torch.device) -> list[int]:
    """Return the ranks that call this with False."""
    mine = torch.tensor([int(have)], device=_device(device))
    told: list[Tensor] = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(told, mine)
    return [rank for rank, each in enumerate(told) if not int(each)]
