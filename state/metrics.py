"""Gathering for evaluation: every sample once, in the dataset's order, on any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from .gathering import gather, gather_blocks, gather_object, interleaved_order, replace_tensors
from .gradient_state import active_entry
from .nested import holds_only_tensors, tensors_of
from .process_record import communication_group

T = TypeVar("T")


def gather_for_metrics(input_data: T, use_gather_object: bool = False) -> T:
    """Gather a batch's predictions or labels from all processes, without the samples that padding has added.

    Under ``DistributedSampler`` the samples are put back into the order in which one process would have seen them. A
    tensor whose first dimension is not the batch is gathered in process order and kept whole. Which batch is the last
    is known inside ``GradientState().track(dataloader)`` or a Trainer's loop; elsewhere this is :func:`gather`.

    Args:
        input_data: Tensor, or nested structure of tensors; a list of other things is gathered as objects.
        use_gather_object: Gather a list as objects even if it holds tensors: theirs may differ in any dimension.

    Source: accelerate 1.15 ``accelerator.py`` (``gather_for_metrics``), which cuts the end off in process order, and so
    drops real samples and keeps padding where a sampler interleaves.
    """
    if use_gather_object or not holds_only_tensors(input_data):
        return _gather_things(input_data)  # type: ignore[return-value]
    group = communication_group("gather_for_metrics")
    if active_entry() is None:
        return gather(input_data)
    tensors = tensors_of(input_data)
    if group is None:
        blocks = [[tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()] for tensor in tensors.values()]
    else:
        blocks = gather_blocks(tensors, group)
    return replace_tensors(input_data, [_arrange(of_tensor) for of_tensor in blocks])


def _gather_things(things: Any) -> list[Any]:
    if not isinstance(things, (list, tuple)):
        raise TypeError(
            f"gather_for_metrics takes tensors, or a list with one thing per sample, got {type(things).__name__}."
        )
    blocks: list[list[Any]] = gather_object([list(things)])
    joined = [thing for block in blocks for thing in block]
    return [joined[position] for position in _order([len(block) for block in blocks])]


def _arrange(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = [len(block) for block in blocks]
    joined = torch.cat(list(blocks))
    order = _order(sizes)
    if order == list(range(len(joined))):
        return joined
    return joined[torch.tensor(order, dtype=torch.int64, device=joined.device)]


def _order(sizes: Sequence[int]) -> list[int]:
    """Return which samples of the processes' joined batches to take, in their order."""
    total = sum(sizes)
    entry = active_entry()
    if entry is None:
        return list(range(total))
    layout, at_end = entry.layout, entry.gave_last_batch
    if layout.interleaved:
        possible = [layout.last_batch_size] if at_end else [layout.batch_size, layout.last_batch_size]
        if max(sizes) not in possible:
            return list(range(total))  # not one row a sample
        order = interleaved_order(sizes)
        if not at_end or layout.last_batch_size is None:
            return order
        # Not counted from `total`: a sampler may have left repetitions out already (callbacks/real_samples.py).
        return order[: max(0, len(sizes) * layout.last_batch_size - max(0, entry.remainder))]
    if not at_end:
        return list(range(total))
    num_real = entry.num_real_in_last_batch or total - max(0, entry.remainder)
    return list(range(max(0, min(total, num_real))))
