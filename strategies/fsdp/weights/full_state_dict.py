"""A full state dict on rank 0 into a sharded model: each rank is sent its own shards and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....state.agreement import sending_device
from ...common.agreed_outcome import failing_together, num_ranks, raise_together
from ..units.named_tensors import NamedTensor, named_tensors, open_tensors
from ..units.sharded_root import inside_root

_WHAT = "Loading a full state dict into the sharded model"
_NUM_IN_BATCH = 4
_MAX_LISTED = 20


class Process(Protocol):
    """What of an ``accelerator`` is needed: the strategy, ``PartialState`` and Accelerate's own all have it."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        ...

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        ...


@dataclass(frozen=True)
class _Need:
    """What one rank wants to be sent for one tensor."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool


def fsdp2_load_full_state_dict(
    accelerator: Process,
    model: nn.Module,
    full_sd: Mapping[str, Any] | None,
    *,
    buffers_from: nn.Module | Mapping[str, Tensor] | None = None,
) -> None:
    """Load rank 0's full state dict into a sharded model, in place; every rank calls it.

    Rank 0 cuts each tensor and sends each rank its part: no byte crosses the wire that the receiver does not keep, and
    a receiver holds its shards and, where dtype or device differ, one part more. Names decide what goes where. Tensors
    on the meta device get memory, and stay the same objects: ties and optimizers keep holding them. The model's dtypes
    stay, values are cast.

    Args:
        accelerator: Anything with ``device`` and ``is_main_process``.
        model: Sharded, on the meta device or with values; ignored parameters and buffers are unsharded.
        full_sd: The weights and persistent buffers, on rank 0. Ignored elsewhere.
        buffers_from: On rank 0, a module with the same names, or its buffers by name, for non-persistent buffers
            that are on the meta device somewhere. Default: ``model`` itself. Non-persistent buffers with values are
            left alone.

    Raises:
        RuntimeError: On every rank, before anything is sent or changed: if names are missing or unexpected or shapes
            differ (all are listed), or tied names stand for different values.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``, which broadcasts each full tensor to every rank.
    """
    with failing_together(_WHAT):
        tensors, targets = open_tensors(model, accelerator.device)
        buffers = buffers_by_name(inside_root(model) if buffers_from is None else buffers_from)
    send_from_rank_zero(accelerator, tensors, full_sd or {}, buffers, targets)


def send_from_rank_zero(
    accelerator: Process,
    tensors: Sequence[NamedTensor],
    full_sd: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
    targets: Callable[[], list[Tensor]],
) -> None:
    """Fill this rank's part of each tensor with rank 0's values; every rank calls it.

    Args:
        accelerator: Anything with ``device`` and ``is_main_process``.
        tensors: The tensors to fill.
        full_sd: Rank 0's values of persistent tensors, by any of their names; ignored elsewhere.
        buffers: Rank 0's values of the others, likewise.
        targets: Returns the memory of this rank's part of each tensor, called when all is found to fit.

    Raises:
        RuntimeError: On every rank, before anything is sent, if names, shapes, dtypes or ties do not fit.
    """
    reports: list[Any] = [None] * num_ranks()
    with failing_together(_WHAT):
        needs = [_need(named) for named in tensors]
        if accelerator.is_main_process != (_rank() == 0):
            raise ValueError(f"is_main_process={accelerator.is_main_process}: the state dict must be on rank 0.")
    if num_ranks() == 1:
        reports = [needs]
    else:
        dist.gather_object(needs, reports if _rank() == 0 else None, dst=0)
    sources: dict[str, Tensor] = {}
    problems: list[str] = []
    if _rank() == 0:
        sources = {name: value for name, value in full_sd.items() if isinstance(value, Tensor)}
        others = sorted(set(full_sd) - set(sources))
        problems = [f"not tensors in the state dict: {listed(others)}"] if others else []
        problems += _compare(sources, reports)
        problems += _compare_dtypes(reports)
        problems += _find_buffers(sources, buffers, reports)
    raise_together(_WHAT, problems)
    with failing_together(_WHAT):
        parts = targets()
    device = accelerator.device if num_ranks() == 1 else sending_device(accelerator.device, _world())
    if num_ranks() > 1 and device.type != "cpu":  # NCCL's first communication must be one of all ranks
        dist.all_reduce(torch.zeros((), device=device))
    if _rank() == 0:
        _send(sources, reports, device)
        for need, part in zip(needs, parts, strict=True):
            part.copy_(_cut(_source_of(need, sources), need))
    else:
        _receive(needs, parts, device)


def _rank() -> int:
    return dist.get_rank() if num_ranks() > 1 else 0


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("There is no process group.")
    return group


def _need(named: NamedTensor) -> _Need:
    offsets, sizes = named.part()
    return _Need(named.names, named.shape, offsets, sizes, named.tensor.dtype, named.persistent)


def _compare(sources: Mapping[str, Tensor], reports: list[list[_Need]]) -> list[str]:
    """Return what is wrong with names, shapes and ties."""
    problems: dict[str, None] = {}
    wanted = {need.names: need for needs in reports for need in needs if need.persistent}
    missing = sorted(names[0] for names in wanted if not any(name in sources for name in names))
    unexpected = sorted(set(sources) - {name for names in wanted for name in names})
    for kind, found in (("missing in", missing), ("unexpected in", unexpected)):
        if found:
            problems[f"{kind} the state dict: {listed(found)}"] = None
    for need in (need for needs in reports for need in needs if need.persistent):
        present = [name for name in need.names if name in sources]
        for name in present:
            if tuple(sources[name].shape) != need.shape:
                problems[f"{name!r} is {tuple(sources[name].shape)} in the state dict, {need.shape} in the model"] = (
                    None
                )
    for names in wanted:
        first, *others = [name for name in names if name in sources] or [""]
        for other in others:
            if not _same(sources[first], sources[other]):
                problems[f"{first!r} and {other!r} are tied in the model, and differ in the state dict"] = None
    problems.update(
        {f"{name!r} is on the meta device in the state dict": None for name in sources if sources[name].is_meta}
    )
    return list(problems)


def _compare_dtypes(reports: list[list[_Need]]) -> list[str]:
    """Return which tensors have other dtypes on other ranks: gathering their shards would mix up bytes."""
    first = {need.names: need.dtype for need in reports[0]}
    problems: dict[str, None] = {}
    for rank, needs in enumerate(reports):
        for need in needs:
            if need.dtype != first.get(need.names, need.dtype):
                problems[f"{need.names[0]!r} is {first[need.names]} on rank 0 and {need.dtype} on rank {rank}"] = None
    return list(problems)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride():
        return True
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.to(one.device))


def buffers_by_name(source: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the non-persistent buffers of a module under all their names; a mapping is returned as it is."""
    if not isinstance(source, nn.Module):
        return source
    return {name: named.tensor for named in named_tensors(source) if not named.persistent for name in named.names}


def _find_buffers(sources: dict[str, Tensor], buffers: Mapping[str, Tensor], reports: list[list[_Need]]) -> list[str]:
    """Add the non-persistent buffers that some rank wants to ``sources``; return what cannot be had."""
    problems: dict[str, None] = {}
    for need in (need for needs in reports for need in needs if not need.persistent):
        buffer = buffers.get(need.names[0])
        if buffer is None or buffer.is_meta:
            problems[
                f"the buffer {need.names[0]!r} is not persistent, on the meta device, and has no values on rank 0: "
                "give a module that has them as buffers_from"
            ] = None
        elif tuple(buffer.shape) != need.shape:
            problems[f"{need.names[0]!r} is {tuple(buffer.shape)} in buffers_from, {need.shape} in the model"] = None
        else:
            sources[need.names[0]] = buffer
    return list(problems)


def listed(names: list[str]) -> str:
    """Return ``names`` for an error, the first of very many."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _source_of(need: _Need, sources: Mapping[str, Tensor]) -> Tensor:
    return next(sources[name] for name in need.names if name in sources)


def _cut(tensor: Tensor, need: _Need) -> Tensor:
    tensor = tensor.detach()
    for dim, (offset, size) in enumerate(zip(need.offsets, need.sizes, strict=True)):
        tensor = tensor.narrow(dim, min(offset, tensor.shape[dim]), size)
    return tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return contiguous ``tensor`` as bytes: not every backend knows every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _send(sources: Mapping[str, Tensor], reports: list[list[_Need]], device: torch.device) -> None:
    """Send each rank its parts, one batch while the next one is made ready.

    Each receives in the order of its own tensors and sends nothing, so that no batch can wait for a later one.
    """
    batch: list[dist.P2POp] = []
    in_flight: deque[tuple[list[dist.Work], list[dist.P2POp]]] = deque()  # tensors must live until they have been sent
    for part, rank in _parts_of_others(sources, reports, device):
        batch.append(dist.P2POp(dist.isend, _as_bytes(part), rank))
        if len(batch) == _NUM_IN_BATCH:
            in_flight.append((dist.batch_isend_irecv(batch), batch))
            batch = []
            if len(in_flight) > 1:
                _wait(in_flight.popleft()[0])
    if batch:
        in_flight.append((dist.batch_isend_irecv(batch), batch))
    for works, _ in in_flight:
        _wait(works)


def _parts_of_others(
    sources: Mapping[str, Tensor], reports: list[list[_Need]], device: torch.device
) -> Iterator[tuple[Tensor, int]]:
    """Yield each part that another rank needs, ready to be sent, and the rank."""
    for index in range(max(map(len, reports))):
        for rank, needs in enumerate(reports):
            if rank != 0 and index < len(needs) and 0 not in needs[index].sizes:
                need = needs[index]
                part = _cut(_source_of(need, sources), need)
                yield part.to(device=device, dtype=need.dtype).contiguous(), rank


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _receive(needs: list[_Need], targets: list[Tensor], device: torch.device) -> None:
    for need, target in zip(needs, targets, strict=True):
        if 0 in need.sizes:
            continue
        direct = target.is_contiguous() and target.device == device
        part = target if direct else torch.empty(need.sizes, dtype=need.dtype, device=device)
        # In a batch of its own: NCCL makes another communicator for each pair that communicates outside of batches.
        _wait(dist.batch_isend_irecv([dist.P2POp(dist.irecv, _as_bytes(part), 0)]))
        if not direct:
            target.copy_(part)
