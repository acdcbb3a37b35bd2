"""Who writes what of a sharded checkpoint."""

from __future__ import annotations

import dataclasses

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...upstream.torch_core import ShardedTensor


class FullFromRankZero(DefaultSavePlanner):
    """Lets rank 0 write whatever is unsharded: buffers and metrics may differ, and must fit each other.

    torch 2.13 takes each such tensor from the rank that has the least to write, BatchNorm's mean from one and its
    variance from another. (Its ``dedup_save_to_lowest_rank`` does so for replicas of shards, too, which are equal: the
    other replicas would have nothing to write.)
    """

    @override
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if not self.is_coordinator:
            items = [
                item for item in plan.items if isinstance(self.state_dict[item.index.fqn], DTensor | ShardedTensor)
            ]
            self.plan = plan = dataclasses.replace(plan, items=items)
        return plan
