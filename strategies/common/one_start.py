"""All ranks begin with rank 0's parameters and buffers, as under ``DistributedDataParallel``.

The ranks compare names, shapes and dtypes first: tensors that differ in size would mix up bytes, or hang.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ...state.agreement import sending_device
from ...state.process_group import require_group
from ..upstream.torch_core import is_traceable_wrapper_subclass
from ..upstream.torch_fake import is_planned
from .agreed_outcome import num_ranks

_BUCKET_BYTES = 2**18
"""Tensors smaller than this are sent together, which takes a copy; larger ones are sent from where they are."""
_PIECE_BYTES = 32 * 2**20
"""Part of a tensor that passes through another device at once."""
_MAX_LISTED = 10


def check_layout(tensors: Mapping[str, Tensor]) -> list[str]:
    """Check that every rank has the same tensors; every rank calls it.

    Args:
        tensors: Parameters and buffers by name.

    Returns:
        The names of those that have values on rank 0 and are on the meta device on another rank.

    Raises:
        RuntimeError: On every rank, if names, shapes or dtypes differ, or if a tensor has values on another rank and
            none on rank 0; it names them.
    """
    if _is_alone():
        return []
    mine = {name: (_described(tensor), tensor.is_meta) for name, tensor in tensors.items()}
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    digests: list[str] = [""] * num_ranks()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return []
    layouts: list[dict[str, tuple[str, bool]]] = [{}] * num_ranks()
    dist.all_gather_object(layouts, mine)
    problems: dict[str, str] = {}
    for rank, other in enumerate(layouts[1:], 1):
        for name in dict.fromkeys([*layouts[0], *other]):
            here, there = layouts[0].get(name, ("missing", False)), other.get(name, ("missing", False))
            if here[0] != there[0]:
                problems.setdefault(name, f"{name!r} is {here[0]} on process 0 and {there[0]} on process {rank}")
            elif here[1] and not there[1]:
                problems.setdefault(name, f"{name!r} is on the meta device on process 0 and not on process {rank}")
        if not problems and list(layouts[0]) != list(other):
            first = next(pair for pair in zip(layouts[0], other, strict=True) if pair[0] != pair[1])
            problems[""] = f"{first[0]!r} on process 0 comes where {first[1]!r} comes on process {rank}"
    if problems:
        raise RuntimeError(
            f"The processes have built different models: {_listed(list(problems.values()))}. Build the same model on "
            "every process: its structure must not depend on the rank or on random numbers."
        )
    return [name for name, (_, is_meta) in layouts[0].items() if not is_meta and any(one[name][1] for one in layouts)]


def send_from_rank_zero(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values, in place; every rank calls it, with tensors that `check_layout` has compared.

    What lies on another device than the process group sends from passes through it in pieces. Tensors on the meta
    device, uninitialised ones and DTensors are left alone.

    Args:
        tensors: Parameters and buffers, in the same order on every rank.
        device: Where this process computes.
    """
    if _is_alone():
        return
    sender = sending_device(device, require_group("The parameters and buffers of process 0"))
    is_source = dist.get_rank() == 0
    with torch.no_grad():
        for bucket in _buckets(piece for tensor in tensors for piece in _plain_parts(tensor)):
            _broadcast(bucket, sender, is_source)


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Check that all ranks have the same values; every rank calls it, after `check_layout`.

    Raises:
        RuntimeError: On every rank, if values differ; it names the tensors.
    """
    if _is_alone():
        return
    mine = {name: _fingerprint(tensor) for name, tensor in tensors.items()}
    everyone: list[dict[str, int]] = [{}] * num_ranks()
    dist.all_gather_object(everyone, mine)
    different = [name for name in mine if any(other.get(name) != everyone[0][name] for other in everyone)]
    if different:
        raise RuntimeError(
            f"The processes begin with different values of {_listed([repr(name) for name in different])}, and "
            "sync_module_states=False keeps each process's own: a sharded parameter would be a mixture of them. Leave "
            "sync_module_states out, so that all begin with the values of process 0, or build the same values "
            "everywhere (seed_everything() before the model is made)."
        )


def _is_alone() -> bool:
    return num_ranks() == 1 or is_planned()


def _described(tensor: Tensor) -> str:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return f"uninitialised {tensor.dtype}"
    shape = getattr(tensor, "ds_shape", tensor.shape)  # of a parameter that DeepSpeed has partitioned
    return f"{tuple(shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _listed(problems: Sequence[str]) -> str:
    more = len(problems) - _MAX_LISTED
    return "; ".join(problems[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold the values of ``tensor``."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer | DTensor):
        return
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(wrapper, name))
    elif not tensor.is_meta and tensor.numel():
        yield tensor.detach()


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    return torch.split(flat, max(1, _PIECE_BYTES // flat.element_size()))


def _fingerprint(tensor: Tensor) -> int:
    checksum = 0
    for part in _plain_parts(tensor):
        flat = part.contiguous().reshape(-1)
        for piece in _pieces(flat):
            content: Any = piece.view(torch.uint8).cpu().numpy()
            checksum = zlib.crc32(content, checksum)
    return checksum


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype and device that are sent together, in an order that is the same on every rank."""
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _BUCKET_BYTES:
            yield [tensor]
            continue
        kind = tensor.dtype
        if sizes.get(kind, 0) + size > _BUCKET_BYTES:
            yield open_buckets.pop(kind)
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + size
    yield from open_buckets.values()


def _broadcast(tensors: list[Tensor], device: torch.device, is_source: bool) -> None:
    if len(tensors) == 1:
        _broadcast_one(tensors[0], device, is_source)
        return
    flat = torch.cat([tensor.to(device).reshape(-1) for tensor in tensors])
    dist.broadcast(flat.view(torch.uint8), src=0)  # as bytes: not every backend knows every dtype
    if not is_source:
        for tensor, values in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            _write(tensor, values)


def _broadcast_one(tensor: Tensor, device: torch.device, is_source: bool) -> None:
    flat = tensor.contiguous().reshape(-1)
    if flat.device == device:
        dist.broadcast(flat.view(torch.uint8), src=0)
    else:
        for piece in _pieces(flat):
            sent = piece.to(device)
            dist.broadcast(sent.view(torch.uint8), src=0)
            if not is_source:
                piece.copy_(sent)
    if not is_source and not tensor.is_contiguous():
        _write(tensor, flat)


def _write(tensor: Tensor, values: Tensor) -> None:
    values = values.view(tensor.shape)
    if 0 not in tensor.stride() or not torch.equal(tensor, values.to(tensor.device)):  # an expanded one takes no copies
        tensor.copy_(values)
