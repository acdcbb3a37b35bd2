"""Which parameters get a gradient, and on which ranks: all have to know before they reduce gradients."""

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
    reduced = vector.tolist()
    some, lacking = reduced[: len(have)], reduced[len(have) : 2 * len(have)]
    mixed = [bool(one and other) for one, other in zip(some, lacking, strict=True)]
    return Agreed([bool(each) for each in some], mixed, reduced[-2] == -reduced[-1])


def _device(device: torch.device) -> torch.device:
    cpu = torch.device("cpu")
    return cpu if cpu in _get_default_group()._device_types else device


def will_get_gradients(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return which parameters the running backward will give a gradient; call it in a hook, before any has one.

    What a reentrant checkpoint is still to recompute is not in the graph yet, and counts as unused.
    """
    with torch.enable_grad():  # older torch needs it for leaves
        nodes = [_get_grad_fn_or_grad_acc(each) if each.requires_grad else None for each in parameters]
    return [node is not None and _will_engine_execute_node(node) for node in nodes]


def ranks_without(have: bool, device: torch.device) -> list[int]:
    """Return the ranks that call this with False."""
    mine = torch.tensor([int(have)], device=_device(device))
    answers: list[Tensor] = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(answers, mine)
    return [rank for rank, each in enumerate(answers) if not int(each)]
