"""Making sure that all processes mean the same collective, before they enter it.

[Note: header] Collectives on tensors that differ between processes hang or mix up bytes. So each call first exchanges
one small header: a hash of everything that must agree (the operation, places, dtypes, shapes), and the sizes along the
one dimension that may differ. On a mismatch all processes raise the same error, with what each of them has.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .process_group import backends_by_device
from .process_record import shared

if TYPE_CHECKING:
    import torch.distributed as dist

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
    raise ValueError("The processes do not communicate the same things:\n" + "\n".join(lines))
