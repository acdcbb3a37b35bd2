"""Where ZeRO's optimizers keep what belongs to a parameter: this rank's piece of it, in a flat partition.

Stages 1 to 3 hand the user's optimizer one flat tensor for each parameter group (stage 3: for each sub-group). The
attributes are those of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
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


def show_masters(optimizer: Any) -> None:
    """Let the groups of stage 3's optimizer hold what it steps on, as those of the stages 1 and 2 do.

    DeepSpeed puts one flat partition after another there while it steps, and leaves none.
    """
    if not is_stage_3(optimizer) or getattr(optimizer, "swap_optimizer", False):
        return
    groups = optimizer.optimizer.param_groups
    for group in groups:
        group["params"] = []
    for number, flat in enumerate(masters(optimizer)):
        groups[optimizer.sub_group_to_group_id[number]]["params"].append(flat)


@contextmanager
def groups_with_masters(optimizer: Any) -> Iterator[None]:
    """Let the groups of a ZeRO optimizer hold what it steps on, in this context."""
    before = [group["params"] for group in optimizer.optimizer.param_groups]
    show_masters(optimizer)
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.optimizer.param_groups, before, strict=True):
            group["params"] = parameters


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
    return (piece for piece, _ in _padded_pieces_3(optimizer) if piece.numel > 0)


def _padded_pieces_3(optimizer: Any) -> Iterator[tuple[Piece, int]]:
    """Yield each parameter's piece, which may be empty, and the room for it in the flat partition."""
    for parameter in (each for group in optimizer.fp16_groups for each in group):
        group, flat_start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        yield Piece(parameter, group, flat_start, *range_in_partition(parameter, size)), size


def range_in_partition(parameter: Any, size: int) -> tuple[int, int]:
    """Return where this rank's piece begins in a parameter of stage 3, and its length: the last ones may be shorter."""
    start = dist.get_rank(parameter.ds_process_group) * size
    return start, max(0, min(size, parameter.ds_numel - start))


@torch.no_grad()
def clear_padding(module: nn.Module, optimizer: Any) -> None:
    """Zero what stage 3 leaves unwritten behind the pieces of parameters that the ranks do not divide evenly.

    DeepSpeed takes that memory as it finds it: NaN, or large numbers. It then is in checkpoints, in the weights that
    users look at (``safe_get_local_fp32_param``), and in the scales of quantized weights. Partitions on NVMe are left.

    Args:
        module: Of an engine of stage 3.
        optimizer: Of that engine; another than ZeRO's, or None, has no partitions.
    """
    parameter: Any
    for parameter in module.parameters():
        partition: Tensor | None = getattr(parameter, "ds_tensor", None)
        if partition is not None and partition.numel() == parameter.partition_numel():  # not so while it is on NVMe
            partition[range_in_partition(parameter, partition.numel())[1] :].zero_()
    if not is_partitioned_optimizer(optimizer):
        return
    for piece, size in _padded_pieces_3(optimizer):
        master = masters(optimizer)[piece.group]  # empty while it is on NVMe
        master[piece.flat_start + piece.numel : piece.flat_start + size].zero_()


def process_group(optimizer: Any, group: int) -> dist.ProcessGroup:
    """Return the ranks that hold the other pieces of a flat partition."""
    found: dist.ProcessGroup = (
        optimizer.dp_process_group if is_stage_3(optimizer) else optimizer.real_dp_process_group[group]
    )
    return found


def place_of(optimizer: Any, parameter: Tensor) -> tuple[int, tuple[int, int]]:
    """Return a parameter's flat partition, and how that is cut: where the parameter begins, and a rank's share."""
    for group, parameters in enumerate(parameter_groups(optimizer)):
        begin = 0
        for each in parameters:
            if each is parameter:
                if is_stage_3(optimizer):
                    partition: Any = each
                    return group, (0, int(partition.ds_tensor.numel()))
                return group, (begin, int(optimizer.partition_size[group]))
            begin += each.numel()
    raise KeyError("DeepSpeed's optimizer does not have this parameter.")


def gradient_dtype(optimizer: Any) -> torch.dtype:
    """Return the dtype of reduced gradients."""
    dtype: torch.dtype = optimizer.gradient_accumulation_dtype
    return dtype


def gradient_piece(optimizer: Any, piece: Piece) -> Tensor:
    """Return this rank's piece of a reduced gradient, sharing memory with what the optimizer steps on.

    Raises:
        RuntimeError: If it is not where DeepSpeed 0.19 keeps it.
    """
    offloads = getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False)
    flat = masters(optimizer)[piece.group].grad
    if offloads and flat is not None:
        return piece.of(flat)
    begin = 0
    for part in optimizer.averaged_gradients.get(piece.group) or ():
        if begin <= piece.flat_start and piece.flat_start + piece.numel <= begin + part.numel():
            return part.view(-1).narrow(0, piece.flat_start - begin, piece.numel)
        begin += part.numel()
    raise RuntimeError(
        "DeepSpeed has no reduced gradient of a parameter here. Use p.grad in on_before_optimizer_step(), or "
        "precision and offloading that keep gradients in memory."
    )


def gradient_attribute(zero: Any) -> str:
    """Return where a parameter of stage 1 or 2 has its gradient until the ranks reduce it."""
    return "grad_accum" if getattr(zero, "use_grad_accum_attribute", False) else "grad"
