"""Collectives over nested structures: gather, reduce, pad, broadcast, agreement between ranks, and metrics."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from .gradient_state import active_entry
from .process_group import backends_by_device
from .process_record import communication_group, shared
from .utils import like_mapping

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
    return gather_replicas(tensor, 1)


def gather_replicas(tensor: T, group_size: int) -> T:
    """Gather as :func:`gather` does, from one of each ``group_size`` consecutive processes: they have the same."""
    group = communication_group("gather")
    tensors = tensors_of(tensor)
    if group is None:
        return map_tensors(_at_least_1d, tensor)
    return replace_tensors(tensor, [torch.cat(blocks[::group_size]) for blocks in gather_blocks(tensors, group)])


def gather_interleaved(data: T, num_rows: int, group_size: int = 1) -> T:
    """Gather the first ``num_rows`` rows of each process, dealing one from each process in turn.

    That is the dataset's order under ``DistributedSampler``. ``num_rows`` may differ between processes. Of each
    ``group_size`` consecutive processes, which have the same rows, the first one counts.
    """
    data = map_tensors(lambda tensor: tensor.detach()[:num_rows], data)
    group = communication_group("gather")
    if group is None:
        return data
    blocks = gather_blocks(tensors_of(data), group)
    return replace_tensors(data, [_interleaved(of_tensor[::group_size]) for of_tensor in blocks])


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
        raise TypeError(f"gather_object expects a list, got {type(object).__name__}. Write gather_object([thing]).")
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
    sent = tensor.to(device).resolve_conj().resolve_neg().contiguous()
    dist.broadcast(_bytes_of(sent), src=from_process, group=group)
    if not is_source and sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def _gather_padded(tensor: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return each process's tensor. Bytes are sent, not numbers: not every backend knows every dtype."""
    import torch.distributed as dist

    device = sending_device(tensor.device, group)
    own = tensor.detach().to(device).resolve_conj().resolve_neg()  # as bytes, they are what memory has
    sent = _pad(own, 0, max(sizes), 0, False).contiguous()
    received = torch.empty(len(sizes), *sent.shape, dtype=sent.dtype, device=device)
    if sent.numel():
        blocks = received.view(len(sizes), -1).view(torch.uint8)
        dist.all_gather(list(blocks.unbind()), _bytes_of(sent), group)
    return [block[:size].to(tensor.device) for block, size in zip(received, sizes, strict=True)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, which may have any stride where it has one element."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _all_reduce(tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum or maximum over processes in the tensor's own dtype; sums of integers and booleans are int64."""
    import torch.distributed as dist

    whole = not (tensor.is_floating_point() or tensor.is_complex())
    total = tensor.detach().to(sending_device(tensor.device, group), torch.int64 if whole else None, copy=True)
    total = total.contiguous()
    if total.numel():
        if reduction == "max":
            all_reduce_max(total, group)
        else:
            dist.all_reduce(total, group=group)
    return total.to(tensor.device, tensor.dtype if reduction == "max" else None)


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace a tensor by its maximum over processes, NaN where one of them has NaN: gloo's may lose it."""
    import torch.distributed as dist

    has_nan = tensor.isnan().to(torch.uint8) if tensor.is_floating_point() else None
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    if has_nan is not None:
        dist.all_reduce(has_nan, dist.ReduceOp.MAX, group=group)
        tensor.masked_fill_(has_nan.bool(), torch.nan)


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


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Return ``data`` with ``function`` applied to each tensor, in the order of :func:`tensors_of`."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return like_mapping(data, {key: map_tensors(function, value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(function, value) for value in data)
    return data


def tensors_of(data: Any, path: str = "data") -> dict[str, torch.Tensor]:
    """Return the tensors by their place, like ``data['logits'][0]``.

    Raises:
        TypeError: If there is anything else in ``data``, or a tensor that cannot be sent.
    """
    if isinstance(data, torch.Tensor):
        _check_sendable(data, path)
        return {path: data}
    items: list[tuple[Any, Any]]
    if isinstance(data, Mapping):
        items = list(data.items())
    elif isinstance(data, (list, tuple)):
        items = list(enumerate(data))
    else:
        raise TypeError(
            f"{path} is {type(data).__name__}, but only tensors can be sent this way, in lists, tuples and dicts. "
            "Use gather_object for other objects."
        )
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        found.update(tensors_of(value, f"{path}[{key!r}]"))
    return found


def holds_only_tensors(data: Any) -> bool:
    """Whether ``data`` is a tensor, or a structure of at least one and nothing else."""
    if isinstance(data, torch.Tensor):
        return True
    if isinstance(data, Mapping):
        data = list(data.values())
    return isinstance(data, (list, tuple)) and len(data) > 0 and all(map(holds_only_tensors, data))


def _check_sendable(tensor: torch.Tensor, path: str) -> None:
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{path} is a DTensor: call .full_tensor() (or .to_local()) on it first, to select which one to send."
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise TypeError(
            f"{path} is a {tensor.layout} tensor on {tensor.device}: only dense tensors with values can be sent. "
            "Call .to_dense() or load its values first."
        )


# ------------------------------------------------------------------------------------------------
# Checks that all processes enter the same collective.
#
# [Note: header] Collectives on tensors that differ between processes hang or mix up bytes. So each call first exchanges
# one small header: a hash of everything that must agree (the operation, places, dtypes, shapes), and the sizes along
# the one dimension that may differ. On a mismatch all processes raise the same error, with what each of them has.


_NUM_SIZES = 30  # so many sizes travel in the header itself; more go in a message of their own


def agree(what: str, described: Sequence[str], sizes: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Return each process's sizes, once all are known to call ``what`` on the same ``described`` things.

    Raises:
        ValueError: On all processes, if they do not.
    """
    mine = [what, *described]
    digest = zlib.crc32("\n".join(mine).encode())
    padding = [0] * (_NUM_SIZES - len(sizes))
    headers = _exchange([digest, *sizes[:_NUM_SIZES], *padding], group)
    if any(header[0] != digest for header in headers):
        _raise_mismatch(mine, group)
    if len(sizes) > _NUM_SIZES:
        return _exchange(sizes, group)
    return [header[1 : 1 + len(sizes)] for header in headers]


def agree_on_tensors(
    what: str,
    tensors: dict[str, torch.Tensor],
    free_dim: int | None,
    group: dist.ProcessGroup,
    *,
    others_free: bool = False,
    how: str | None = None,
) -> list[list[int]]:
    """Return each process's sizes along ``free_dim``, of the tensors that have it.

    All else must agree, ``how`` included; with ``others_free``, not the sizes along the other dimensions.

    Raises:
        ValueError: On all processes, if it does not.
    """
    described: list[str] = [] if how is None else [how]
    sizes: list[int] = []
    for path, tensor in tensors.items():
        shape: list[int | str] = ["*"] * tensor.ndim if others_free else list(tensor.shape)
        if free_dim is not None and -tensor.ndim <= free_dim < tensor.ndim:
            sizes.append(tensor.shape[free_dim])
            shape[free_dim] = "*"
        described.append(f"{path}: {str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]")
    return agree(what, described, sizes, group)


def sending_device(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Return ``device`` if the group can send from it, else one it can: NCCL takes no CPU tensors, gloo no MPS."""
    backends = backends_by_device(group)
    if device.type in backends:
        return device
    own = shared.current().device
    return own if own.type in backends else torch.device(next(iter(backends)))


def _exchange(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Return the numbers of each process; all must give equally many."""
    import torch.distributed as dist

    device = sending_device(torch.device("cpu"), group)
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = torch.empty(dist.get_world_size(group), len(numbers), dtype=torch.int64, device=device)
    dist.all_gather(list(everyone.unbind()), mine, group)
    return everyone.tolist()


def _raise_mismatch(mine: list[str], group: dist.ProcessGroup) -> None:
    import torch.distributed as dist

    received: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(received, mine, group)
    lines = [
        f"process {index}: {what}({'; '.join(described)})"
        for index, (what, *described) in enumerate(received)
        if index == 0 or [what, *described] != received[0]
    ]
    raise ValueError("The processes do not communicate the same data:\n" + "\n".join(lines))


AllReduceMaxAsync = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""As `all_reduce_max_async`."""


def all_reduce_max_async(values: Sequence[int]) -> Callable[[], Sequence[int]]:
    """Begin to reduce int32 numbers to their maximum over all ranks; all ranks must call it at the same point.

    Returns:
        A function that waits for the slowest rank and returns the numbers. A rank that does not need them need not
        call it.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: values
    maxima = torch.tensor(values, dtype=torch.int32)
    if "cpu" not in dist.get_backend_config() and dist.get_backend() != "gloo":
        maxima = maxima.to(torch.accelerator.current_accelerator())
    work = dist.all_reduce(maxima, dist.ReduceOp.MAX, async_op=True)

    def wait() -> Sequence[int]:
        work.wait()  # returns at once when called again
        return maxima.tolist()

    return wait


def gather_for_metrics(input_data: T, use_gather_object: bool = False) -> T:
    """Gather a batch's predictions or labels from all processes, without the samples that padding has added.

    Under ``DistributedSampler`` the samples are put back into the order in which one process would have seen them. A
    tensor whose first dimension is not the batch is gathered in process order and kept whole. Which batch is the last
    is known inside ``GradientState().track(dataloader)`` or a Trainer's loop; elsewhere no padding is dropped.
    Processes that share one copy of the model (tensor or sequence parallelism) have the same samples, and count as one.

    Args:
        input_data: Tensor, or nested structure of tensors; a list of other things is gathered as objects.
        use_gather_object: Gather a list as objects even if it holds tensors: theirs may differ in any dimension.

    Source: accelerate 1.15 ``accelerator.py`` (``gather_for_metrics``), which cuts the end off in process order, and so
    drops real samples and keeps padding where a sampler interleaves.
    """
    if use_gather_object or not holds_only_tensors(input_data):
        return _gather_objects(input_data)  # type: ignore[return-value]
    group = communication_group("gather_for_metrics")
    tensors = tensors_of(input_data)
    if group is None:
        return map_tensors(lambda tensor: _arrange([_at_least_1d(tensor)]), input_data)
    return replace_tensors(input_data, [_arrange(blocks) for blocks in gather_blocks(tensors, group)])


def _gather_objects(things: Any) -> list[Any]:
    if not isinstance(things, (list, tuple)):
        raise TypeError(
            f"gather_for_metrics expects tensors, or a list with one item per sample, got {type(things).__name__}."
        )
    blocks = _of_replicas(gather_object([list(things)]))
    joined = [thing for block in blocks for thing in block]
    return [joined[position] for position in _order([len(block) for block in blocks])]


def _of_replicas(blocks: Sequence[T]) -> Sequence[T]:
    """Return one process's of each group that sees the same batches.

    The sampler decides where it is known: in the next Trainer, Lightning's own strategies deal to all processes again.
    """
    entry = active_entry()
    replicas = None if entry is None else entry.layout.num_replicas
    return blocks[:: len(blocks) // (replicas or shared.current().data_parallel_size)]


def _arrange(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    blocks = _of_replicas(blocks)
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
        # Not counted from `total`: a sampler may have left repetitions out already (callbacks/exact_evaluation.py).
        return order[: max(0, len(sizes) * layout.last_batch_size - max(0, entry.remainder))]
    if not at_end:
        return list(range(total))
    num_real = entry.num_real_in_last_batch or total - max(0, entry.remainder)
    return list(range(max(0, min(total, num_real))))
