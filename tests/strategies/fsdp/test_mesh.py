"""The mesh for hybrid sharding, in every process group that a process has."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from accelight.strategies.fsdp.units.mesh import build_mesh
from tests.ranks import free_port, run_on_ranks


def _reduce_twice(ports: list[int]) -> list[tuple[float, float, bool]]:
    rank, found = int(os.environ["RANK"]), []
    for port in ports:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
        mesh, value = build_mesh((2, 2), 4, "cpu"), torch.tensor([1.0, 10.0, 100.0, 1000.0])[rank]
        shard, replicate = value.clone(), value.clone()
        dist.all_reduce(shard, group=mesh.get_group("shard"))
        dist.all_reduce(replicate, group=mesh["replicate"].get_group())
        found.append((shard.item(), replicate.item(), build_mesh((2, 2), 4, "cpu") is mesh))
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_hybrid_groups_of_one_process_group_after_another() -> None:
    found = run_on_ranks(4, _reduce_twice, [free_port(), free_port()], init_group=False)
    expected = [(11.0, 101.0, True), (11.0, 1010.0, True), (1100.0, 101.0, True), (1100.0, 1010.0, True)]
    assert found == [[each] * 2 for each in expected]
