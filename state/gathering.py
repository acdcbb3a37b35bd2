"""Values from all processes on all processes: gather, reduce, pad and broadcast over nested structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from .agreement import agree, agree_on_tensors, sending_device
from .nested import map_tensors, tensors_of
from .process_record import communication_group, shared

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
Reduction = Literal["mean", "sum", "max", "none"]


def gather(tensor: T) -> T:
    """Gather the tensors of a nested structure from all processes, joined along the first dimension in process order.

    Sizes along the first dimension may differ between processes; all else must agree. A tensor of no dimensions counts
    as one of size 1. Results have no gradient, and lie on the device of the input.

    Raises:
        TypeError: If the structure holds anything but tensors.
        ValueError: If the processes' structures, dtypes or other dimensions differ.

    Source: accelerate 1.15 ``utils/operations.py`` (``gather``), which wants equal sizes.
    """
    group = communication_group("gather")
    tensors = tensors_of(tensor)
    if group is None:
        return map_tensors(_at_least_1d, tensor)
    return replace_tensors(tensor, [torch.cat(blocks) for blocks in gather_blocks(tensors, group)])


def gather_interleaved(data: T, num_rows: int) -> T:
    """Gather the first ``num_rows`` rows of each process, dealing one from each process in turn.

    That is the dataset's order under ``DistributedSampler``. ``num_rows`` may differ between processes.
    """
    data = map_tensors(lambda tensor: tensor.detach()[:num_rows], data)
    group = communication_group("gather")
    if group is None:
        return data
    return replace_tensors(data, [_interleaved(blocks) for blocks in gather_blocks(tensors_of(data), group)])


def _interleaved(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    order = interleaved_order([len(block) for block in blocks])
    joined = torch.cat(list(blocks))
    return joined[torch.tensor(order, dtype=torch.int64, device=joined.device)]


def interleaved_order(sizes: Sequence[int]) -> list[int]:
    """Return positions in the joined blocks of these sizes, dealing one from each block in turn."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        start + turn for turn in range(max(sizes)) for start, size in zip(starts, sizes, strict=True) if turn < size
    ]


def gather_blocks(tensors: dict[str, torch.Tensor], group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """Return for each tensor what each process holds, in process order."""
    flat = {path: _at_least_1d(tensor) for path, tensor in tensors.items()}
    sizes = agree_on_tensors("gather", flat, 0, group)
    return [
        _gather_padded(tensor, [process_sizes[position] for process_sizes in sizes], group)
        for position, tensor in enumerate(flat.values())
    ]


def gather_object(object: Sequence[T]) -> list[T]:
    """Gather lists of picklable objects from all processes into one list, in process order.

    Raises:
        TypeError: If ``object`` is not a list or tuple: ``gather_object([thing])`` sends one thing.
    """
    if not isinstance(object, (list, tuple)):
        raise TypeError(f"gather_object takes a list, got {type(object).__name__}. Write gather_object([thing]).")
    group = communication_group("gather_object")
    if group is None:
        return list(object)
    import torch.distributed as dist

    agree("gather_object", [], [], group)
    received: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(received, list(object), group)
    return [item for items in received for item in items]


def pad_across_processes(tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
    """Pad the tensors of a nested structure to the largest size that any process has along ``dim``.

    Tensors without such a dimension stay as they are; sizes along other dimensions may differ, too, and stay.

    Args:
        tensor: Tensor or nested structure of tensors.
        dim: Dimension to pad; negative counts from the end.
        pad_index: Value to pad with.
        pad_first: Pad at the beginning instead of the end.

    Raises:
        TypeError: If the structure holds anything but tensors.
        ValueError: If the processes' structures, dtypes or numbers of dimensions differ.
    """
    group = communication_group("pad_across_processes")
    tensors = tensors_of(tensor)
    if group is None:
        return tensor
    sizes = agree_on_tensors("pad_across_processes", tensors, dim, group, others_free=True)
    largest = iter(max(column) for column in zip(*sizes, strict=True))
    return map_tensors(
        lambda leaf: _pad(leaf, dim, next(largest), pad_index, pad_first) if _has(leaf, dim) else leaf, tensor
    )


def reduce(tensor: T, reduction: Reduction = "mean", scale: float = 1.0) -> T:
    """Reduce the tensors of a nested structure over all processes; the inputs stay as they are.

    Args:
        tensor: Tensor or nested structure of tensors, of the same shapes everywhere.
        reduction: ``"mean"`` (of whole numbers: a float), ``"sum"`` (of booleans: how many are true), ``"max"`` of each
            element (of booleans: whether any is true), or ``"none"``, which only scales.
        scale: Factor on the result, on every device. Accelerate applies it on XLA alone.

    Raises:
        ValueError: If ``reduction`` is another word, or the processes' structures, dtypes, shapes or reductions differ.
        TypeError: If complex numbers are to be compared by ``"max"``.

    Source: accelerate 1.15 ``utils/operations.py`` (``reduce``), whose default this is; ``Accelerator.reduce`` sums by
    default.
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be one of {', '.join(map(repr, get_args(Reduction)))}; got {reduction!r}.")
    group = communication_group("reduce")
    tensors = tensors_of(tensor)
    if reduction == "max":
        _check_ordered(tensors)
    if group is None or reduction == "none":
        totals, count = list(tensors.values()), 1
    else:
        import torch.distributed as dist

        agree_on_tensors("reduce", tensors, None, group, how=f"by {reduction!r}")
        totals = [_all_reduce(leaf, reduction, group) for leaf in tensors.values()]
        count = dist.get_world_size(group)
    return replace_tensors(tensor, [_scaled(total, reduction, count, scale) for total in totals])


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Overwrite the tensors of a nested structure with those of one process, in place, and return the structure.

    Args:
        tensor: Tensor or nested structure of tensors, of the same shapes and dtypes everywhere.
        from_process: Whose values all get.

    Raises:
        TypeError: If the structure holds anything but tensors.
        ValueError: If there is no such process, or the processes' structures, dtypes, shapes or ``from_process``
            differ.

    Source: accelerate 1.15 ``utils/operations.py`` (``broadcast``).
    """
    group = communication_group("broadcast")
    _check_process(from_process)
    tensors = tensors_of(tensor)
    if group is None:
        return tensor
    agree_on_tensors("broadcast", tensors, None, group, how=f"from process {from_process}")
    is_source = shared.current().process_index == from_process
    for leaf in tensors.values():
        _broadcast(leaf.detach(), from_process, group, is_source=is_source)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the list's picklable elements with those of one process, and return the list.

    Raises:
        TypeError: If it is not a list.
        ValueError: If there is no such process, or the processes' lengths or ``from_process`` differ.
    """
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list fills a list in place, got {type(object_list).__name__}.")
    group = communication_group("broadcast_object_list")
    _check_process(from_process)
    if group is None:
        return object_list
    import torch.distributed as dist

    agree("broadcast_object_list", [f"{len(object_list)} objects from process {from_process}"], [], group)
    if object_list:
        dist.broadcast_object_list(object_list, src=from_process, group=group)
    return object_list


def _check_process(from_process: int) -> None:
    num_processes = shared.current().num_processes
    if not 0 <= from_process < num_processes:
        raise ValueError(f"from_process={from_process} is out of range: there are {num_processes} process(es).")


def _check_ordered(tensors: dict[str, torch.Tensor]) -> None:
    for path, tensor in tensors.items():
        if tensor.is_complex():
            raise TypeError(f"{path} is {tensor.dtype}, which has no largest value. Reduce its .abs(), or by 'sum'.")


def _broadcast(tensor: torch.Tensor, from_process: int, group: dist.ProcessGroup, *, is_source: bool) -> None:
    """Overwrite ``tensor``. Bytes are sent, as in `_gather_padded`."""
    import torch.distributed as dist

    if not tensor.numel():
        return
    device = sending_device(tensor.device, group)
    sent = tensor.to(device).contiguous()
    dist.broadcast(sent.view(-1).view(torch.uint8), src=from_process, group=group)
    if not is_source and sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def _gather_padded(tensor: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return each process's tensor. Bytes are sent, not numbers: not every backend knows every dtype."""
    import torch.distributed as dist

    device = sending_device(tensor.device, group)
    sent = _pad(tensor.detach().to(device), 0, max(sizes), 0, False).contiguous()
    received = torch.empty(len(sizes), *sent.shape, dtype=sent.dtype, device=device)
    if sent.numel():
        blocks = received.view(len(sizes), -1).view(torch.uint8)
        dist.all_gather(list(blocks.unbind()), sent.view(-1).view(torch.uint8), group)
    return [block[:size].to(tensor.device) for block, size in zip(received, sizes, strict=True)]


def _all_reduce(tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum or maximum over processes in the tensor's own dtype; sums of integers and booleans are int64."""
    import torch.distributed as dist

    whole = not (tensor.is_floating_point() or tensor.is_complex())
    total = tensor.detach().to(sending_device(tensor.device, group), torch.int64 if whole else None, copy=True)
    total = total.contiguous()
    if total.numel():
        dist.all_reduce(total, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=group)
    return total.to(tensor.device, tensor.dtype if reduction == "max" else None)


def _scaled(total: torch.Tensor, reduction: Reduction, count: int, scale: float) -> torch.Tensor:
    total = total.detach()
    if total.dtype == torch.bool and reduction not in ("none", "max"):
        total = total.long()
    if reduction == "mean":
        total = total / count
    return total * scale if scale != 1.0 else total.clone()


def _pad(tensor: torch.Tensor, dim: int, size: int, value: float, first: bool) -> torch.Tensor:
    if tensor.shape[dim] == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    padded = tensor.new_full(shape, value)
    padded.narrow(dim, size - tensor.shape[dim] if first else 0, tensor.shape[dim]).copy_(tensor)
    return padded


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()


def _has(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def replace_tensors(data: T, tensors: Sequence[torch.Tensor]) -> T:
    """Return ``data`` with other tensors in the places of its own."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), data)
