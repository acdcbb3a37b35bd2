"""The mesh over all ranks that a model is sharded on."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ....state.process_group import require_group, timeout_of

_HYBRID: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], DeviceMesh]] = WeakKeyDictionary()
"""Of each default group, so that one fit after another does not start new groups."""


def build_mesh(given: tuple[int, int] | DeviceMesh | None, world_size: int, device_type: str) -> DeviceMesh:
    """Return the mesh ``("shard",)``, or ``("replicate", "shard")`` for hybrid sharding.

    Args:
        given: What the user asked for: the two sizes, a mesh of two dimensions, or None to shard over every rank.
        world_size: Number of ranks.
        device_type: Such as ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: If ``given`` has not two dimensions, or they do not multiply to ``world_size``.
    """
    if given is None:
        # Not init_device_mesh(): where CUDA is visible and the group is gloo's, it starts another one for each mesh.
        return DeviceMesh.from_group(require_group("Sharding"), device_type, mesh_dim_names=("shard",))
    shape = tuple(given.shape) if isinstance(given, DeviceMesh) else tuple(given)
    if len(shape) != 2 or shape[0] * shape[1] != world_size:
        raise ValueError(
            f"device_mesh={given} must be (replicate, shard) with replicate * shard = {world_size}, the number of "
            "processes."
        )
    if isinstance(given, DeviceMesh):
        return given
    known = _HYBRID.setdefault(require_group("device_mesh"), {})
    if shape not in known:
        known[shape] = _hybrid_mesh(shape, device_type)
    return known[shape]


def _hybrid_mesh(shape: tuple[int, int], device_type: str) -> DeviceMesh:
    """Return a mesh over groups that are started one by one.

    `init_device_mesh` would split the default group where it is bound to a device, as the Trainer binds it on GPUs. The
    gloo part of it, for what lies on the CPU, cannot be split in the second process group of a process: that ends the
    process (torch 2.13, github.com/pytorch/pytorch/issues/192106).
    """
    ranks = torch.arange(shape[0] * shape[1]).view(shape)
    timeout = timeout_of(require_group("device_mesh"))
    groups = []
    for members in (ranks.T, ranks):  # of each dimension: the ranks that differ in it alone
        own, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout)  # type: ignore[no-untyped-call]
        groups.append(own)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=("replicate", "shard"))
