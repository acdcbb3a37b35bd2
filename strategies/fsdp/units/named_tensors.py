"""The tensors of a sharded model as places to be filled: by which names, how large, and which part lies here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from ....checkpoint.names import clean_name
from ...upstream.torch_core import compute_local_shape_and_global_offset
from ...upstream.torch_fsdp2 import groups_of_state
from .sharded_root import inside_root


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """One parameter or buffer, however many names it has."""

    names: tuple[str, ...]
    """Free of traces of wrappers; tied tensors have several."""
    tensor: Tensor
    persistent: bool
    """Whether it stands in state dicts."""

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the full tensor."""
        return tuple(self.tensor.shape)

    def part(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offsets and sizes of the part that this rank holds.

        Raises:
            ValueError: If the tensor is laid out in another way than by even or uneven chunks.
        """
        if not isinstance(self.tensor, DTensor):
            return (0,) * self.tensor.ndim, self.shape
        if any(type(placement) not in (Shard, Replicate) for placement in self.tensor.placements):
            raise ValueError(f"{self.name!r} has placements {self.tensor.placements}; only Shard and Replicate fit.")
        sizes, offsets = compute_local_shape_and_global_offset(
            self.tensor.shape, self.tensor.device_mesh, self.tensor.placements
        )
        return tuple(offsets), tuple(sizes)

    def local(self) -> Tensor:
        """Return this rank's part itself, to be written into."""
        with torch.no_grad():
            return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor.detach()


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Return the distinct parameters and buffers of ``model``, in the order of registration."""
    names: dict[Tensor, list[str]] = {}
    persistent: set[Tensor] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is None:
                continue
            full_name = clean_name(f"{prefix}.{name}" if prefix else name)
            known = names.setdefault(tensor, [])
            if full_name not in known:
                known.append(full_name)
            if name not in module._non_persistent_buffers_set:
                persistent.add(tensor)
    return [NamedTensor(tuple(found), tensor, tensor in persistent) for tensor, found in names.items()]


def reshard(model: nn.Module) -> None:
    """Leave no unit of ``model`` gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def open_tensors(root: nn.Module, device: torch.device) -> tuple[list[NamedTensor], Callable[[], list[Tensor]]]:
    """Return what of an FSDP2 model is to be filled, and a function that gives it memory.

    Non-persistent buffers that have values are left alone.

    Args:
        root: Sharded, on the meta device or with values; the strategy's own root is left out of names.
        device: Where meta tensors get memory; shards under CPU offloading get it on the CPU.
    """
    reshard(root)
    model = inside_root(root)
    tensors = [named for named in named_tensors(model) if named.persistent or named.tensor.is_meta]

    def targets() -> list[Tensor]:
        materialize(root, device)
        after = {named.names: named for named in named_tensors(model)}
        return [after[named.names].local() for named in tensors]

    return tensors, targets


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory with undefined values, in place: optimizers, ties and sets still hold the same objects.

    Args:
        model: Sharded or not.
        device: Where to; shards under CPU offloading go to the CPU.
    """
    offloaded = _offloaded(model)
    for named in named_tensors(model):
        if named.tensor.is_meta:
            swap_for_empty(named.tensor, torch.device("cpu") if named.tensor in offloaded else device)
    # FSDP2 notices new memory here, and pads and pins it.
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


def swap_for_empty(tensor: Tensor, device: torch.device) -> None:
    """Give ``tensor``, which stays the same object, undefined values on ``device``; on ``meta`` it takes no memory."""
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]


def _offloaded(model: nn.Module) -> set[Tensor]:
    """Return the sharded parameters that torch keeps on the CPU."""
    found: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of_state(module._get_fsdp_state()):
                found |= {param.sharded_param for param in group.fsdp_params if param.offload_to_cpu}
    return found
