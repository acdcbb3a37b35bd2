"""Norms of gradients by parameter name, whatever shards the parameters: FSDP1, FSDP2, other DTensors, nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.names import clean_name
from .common.gradients import local_tensor, norm_powers, reduce_powers
from .fsdp.units.sharded_root import inside_root

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Belongs = Callable[[str], bool] | None


@dataclass(frozen=True)
class NamedGradient:
    """What one process holds of a parameter's gradient."""

    name: str
    """Name of the original parameter in the LightningModule."""
    values: Tensor
    """This process's part, maybe empty."""
    groups: tuple[ProcessGroup, ...] = ()
    """Groups over whose processes the gradient is spread; none where each process has all of it."""


def named_gradients(root: nn.Module, parameters: Collection[Tensor]) -> Iterator[NamedGradient]:
    """Yield the gradients of ``parameters`` by the names of the original parameters, in the same order on all ranks.

    Args:
        root: The strategy's model: sharded, wrapped, or as it is.
        parameters: What an optimizer holds; flat parameters in FSDP1 without ``use_orig_params``.
    """
    chosen = {id(parameter) for parameter in parameters}
    flattened: set[int] = set()
    for prefix, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield from _of_handle(prefix, module._handle, chosen, flattened)
    plain = root.module if isinstance(root, DistributedDataParallel) else inside_root(root)
    for name, parameter in plain.named_parameters():
        if id(parameter) in chosen and id(parameter) not in flattened and parameter.grad is not None:
            yield NamedGradient(clean_name(name), local_tensor(parameter.grad), _groups_of(parameter.grad))


def _of_handle(prefix: str, handle: Any, chosen: set[int], flattened: set[int]) -> Iterator[NamedGradient]:
    """Yield the gradients of one FSDP1 unit; empty ones where this rank's shard has nothing of a parameter."""
    flat = handle.flat_param
    flattened.add(id(flat))
    groups = (handle.process_group,) if handle.uses_sharded_strategy else ()
    for index, (fqn, place) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
        name = clean_name(f"{prefix}.{fqn}" if prefix else fqn)
        if handle._use_orig_params:
            original = flat._params[index]
            flattened.add(id(original))
            if id(original) in chosen and original.requires_grad:
                yield NamedGradient(name, flat.new_empty(0) if original.grad is None else original.grad, groups)
        elif id(flat) in chosen and flat.requires_grad:
            values = flat.new_empty(0)
            if flat.grad is not None and place.in_shard:
                values = flat.grad.narrow(0, place.offset_in_shard, place.numel_in_shard)
            yield NamedGradient(name, values, groups)


def _groups_of(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(gradient.placements) if placement.is_shard())


@torch.no_grad()
def norms_by_label(
    gradients: Iterator[NamedGradient], labels: Mapping[str, Belongs], norm_type: float = 2.0
) -> dict[str, Tensor]:
    """Return a norm for each label, over the gradients whose names belong to it.

    All labels travel in one reduction for each set of groups that gradients are spread over; plain FSDP has one.

    Args:
        gradients: As `named_gradients` yields them.
        labels: For each label what tells whether a name belongs to it, None for all names. A name may belong to
            several labels, or to none.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        float32 scalars, the same on every rank.

    Raises:
        ValueError: If a label has no gradient; the message has the names there are.
    """
    by_groups: dict[tuple[ProcessGroup, ...], list[NamedGradient]] = defaultdict(list)
    for gradient in gradients:
        by_groups[gradient.groups].append(gradient)
    names = [gradient.name for members in by_groups.values() for gradient in members]
    for label, belongs in labels.items():
        if belongs is not None and not any(map(belongs, names)):
            found = ", ".join(names) or "nothing"
            raise ValueError(f"No gradient belongs to {label!r}. There are gradients of {found}.")
    if not names:
        return dict.fromkeys(labels, torch.tensor(0.0))
    powers = [_powers(members, groups, labels, norm_type) for groups, members in by_groups.items()]
    stacked = torch.stack([power.to(powers[0].device) for power in powers])
    norms = stacked.amax(0) if math.isinf(norm_type) else stacked.sum(0) ** (1.0 / norm_type)
    return dict(zip(labels, norms.unbind(), strict=True))


def _powers(
    members: list[NamedGradient],
    groups: tuple[ProcessGroup, ...],
    labels: Mapping[str, Belongs],
    norm_type: float,
) -> Tensor:
    """Return norm**p (the norm itself for inf) of each label, over all processes of the groups."""
    infinite = math.isinf(norm_type)
    filled = [member for member in members if member.values.numel()]  # an empty part has no largest value
    if filled:
        own = norm_powers([part.values for part in filled], norm_type)
        mask = torch.tensor([[belongs is None or belongs(part.name) for part in filled] for belongs in labels.values()])
        # Not by a product with the mask: an infinite norm would turn every label into NaN.
        rows = torch.where(mask.to(own.device), own, torch.zeros((), device=own.device))
        powers = rows.amax(1) if infinite else rows.sum(1)
    else:
        powers = torch.zeros(len(labels), device=members[0].values.device)
    reduce_powers(powers, groups, norm_type)
    return powers
