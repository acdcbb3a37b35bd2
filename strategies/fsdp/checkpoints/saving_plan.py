"""Who writes what of a sharded checkpoint: each rank knows its own part, and asks nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...common.flat_shards import FlatShard
from ...upstream.torch_core import ShardedTensor


def replica_of(tensor: DTensor | FlatShard) -> tuple[int, int]:
    """Return which of how many equal copies of its shard this rank holds."""
    if isinstance(tensor, FlatShard):
        return tensor.place.replica, tensor.place.num_replicas
    mesh, index, count = tensor.device_mesh, 0, 1
    place = mesh.get_coordinate() or [0] * mesh.ndim  # not get_local_rank(), which asks the groups
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            index, count = index * mesh.size(dim) + place[dim], count * mesh.size(dim)
    return index, count


class OwnPart(DefaultSavePlanner):
    """Plans a rank's part so that all parts are the whole, each piece once.

    Rank 0 writes whatever is unsharded: buffers and metrics may differ, and must fit each other. (torch 2.13 takes each
    such tensor from the rank that has the least to write, BatchNorm's mean from one and its variance from another.)
    Where several ranks hold equal copies of a shard, they share its group's shards by their sizes: each of them knows
    all sizes, and comes to the same result.
    """

    @override
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = plan = dataclasses.replace(plan, items=self._own(plan.items))
        return plan

    def _own(self, items: Sequence[WriteItem]) -> list[WriteItem]:
        own: list[WriteItem] = []
        planned: dict[Any, list[int]] = {}
        for item in items:
            value, data = self.state_dict[item.index.fqn], item.tensor_data
            if not isinstance(value, DTensor | ShardedTensor | FlatShard) or data is None:
                if self.is_coordinator:
                    own.append(item)
                continue
            num_elements = data.chunk.sizes.numel()
            if not num_elements:
                if not data.size.numel() and dist.get_rank() == _first_rank(value):
                    own.append(item)  # else it would be nobody's
                continue
            if isinstance(value, ShardedTensor):
                own.append(item)
                continue
            replica, num_replicas = replica_of(value)
            loads = planned.setdefault(_replicas(value), [0] * num_replicas)
            writer = loads.index(min(loads))
            loads[writer] += num_elements * data.properties.dtype.itemsize
            if writer == replica:
                own.append(item)
        return own


def _first_rank(value: DTensor | ShardedTensor | FlatShard) -> int:
    return int(value.device_mesh.mesh.min()) if isinstance(value, DTensor) else 0


def _replicas(tensor: DTensor | FlatShard) -> Any:
    """Return what is the same for tensors that the same ranks hold equal copies of."""
    if isinstance(tensor, FlatShard):
        return tensor.place.num_replicas
    return tensor.device_mesh, tuple(dim for dim, one in enumerate(tensor.placements) if one.is_replicate())
