"""Where ZeRO's optimizers keep what belongs to a parameter: this rank's piece of it, in a flat partition.

Stages 1 to 3 hand the user's optimizer one flat tensor for each parameter group (stage 3: for each sub-group). The
attributes are those of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Piece:
    """This rank's part of one parameter."""

    parameter: nn.Parameter
    group: int
    """Index of the flat partition."""
    flat_start: int
    """Where it begins in the flat partition."""
    start: int
    """Where it begins in the flattened parameter."""
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """Return this piece of a flat partition, a view."""
        return flat.narrow(0, self.flat_start, self.numel)


def is_partitioned_optimizer(optimizer: Any) -> bool:
    """Whether it is ZeRO's of the stages 1 to 3 (and not DeepSpeed's optimizer for bf16, or torch's own)."""
    return hasattr(optimizer, "parallel_partitioned_bit16_groups") or hasattr(optimizer, "fp32_partitioned_groups_flat")


def is_stage_3(optimizer: Any) -> bool:
    """Whether it is ZeRO's of stage 3."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def parameter_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each flat partition, in its order."""
    groups: list[list[nn.Parameter]] = optimizer.fp16_groups if is_stage_3(optimizer) else optimizer.bit16_groups
    return groups


def masters(optimizer: Any) -> list[Tensor]:
    """Return this rank's flat partitions of the weights that the optimizer steps on."""
    flat: list[Tensor] = (
        optimizer.fp32_partitioned_groups_flat if is_stage_3(optimizer) else optimizer.single_partition_of_fp32_groups
    )
    return flat


def computing_weights(optimizer: Any) -> list[Tensor | None]:
    """Return this rank's flat partitions of the weights that the model computes with; None if they are on NVMe."""
    if is_stage_3(optimizer):
        return list(optimizer.fp16_partitioned_groups_flat)
    return [
        partitions[dist.get_rank(group)]
        for partitions, group in zip(
            optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True
        )
    ]


def pieces(optimizer: Any) -> Iterator[Piece]:
    """Yield this rank's piece of each parameter that it has a part of."""
    return _pieces_3(optimizer) if is_stage_3(optimizer) else _pieces_1_2(optimizer)


def _pieces_1_2(optimizer: Any) -> Iterator[Piece]:
    for group, parameters in enumerate(optimizer.params_in_partition):
        partition = dist.get_rank(optimizer.real_dp_process_group[group])
        for parameter in parameters:
            parameter_id = optimizer.get_param_id(parameter)
            start = int(optimizer.grad_start_offset[group][partition][parameter_id])
            flat_start = int(optimizer.grad_partition_insertion_offset[group][partition][parameter_id])
            numel = min(parameter.numel() - start, int(optimizer.partition_size[group]) - flat_start)
            if numel > 0:
                yield Piece(parameter, group, flat_start, start, numel)


def _pieces_3(optimizer: Any) -> Iterator[Piece]:
    for parameter in (each for group in optimizer.fp16_groups for each in group):
        group, flat_start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = dist.get_rank(parameter.ds_process_group) * size
        numel = min(size, parameter.ds_numel - start)  # the last piece is padded, or empty
        if numel > 0:
            yield Piece(parameter, group, flat_start, start, numel)


def gradient_attribute(zero: Any) -> str:
    """Return where a parameter of stage 1 or 2 has its gradient until the ranks reduce it."""
    return "grad_accum" if getattr(zero, "use_grad_accum_attribute", False) else "grad"
