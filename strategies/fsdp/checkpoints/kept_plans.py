"""Plans of sharded saves, kept for the next: who writes what is the same while names, shapes and meshes are.

torch's planning sends rank 0 a description of each piece of each rank, and all of them back, at each save, in
collectives of objects. Here each rank plans its own part (`saving_plan`), and tells rank 0 once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from ...common.flat_shards import FlatShard
from ...common.store_messages import StoreMessages, store_messages
from ...upstream.torch_core import ShardedTensor, _StoragePrefix
from .packed_plans import MergedPlan, PackedPlan, merge_plans
from .saving_plan import OwnPart

_MOST_PLANS = 2  # with and without optimizers, as a rule


@dataclass(frozen=True)
class ToldPlan:
    """What a rank tells rank 0 of the plan that it writes by."""

    number: int
    packed: PackedPlan | None
    """None if rank 0 has it from an earlier save."""
    kept: tuple[int, ...]
    """Numbers of the rank's plans that may come again."""


@dataclass
class KeptPlan:
    """What a rank writes of states of one form."""

    number: int
    """No other plan of this rank has it."""
    form: Any
    """Equal for states to which the plan fits."""
    plan: SavePlan
    packed: PackedPlan | None
    """Until rank 0 has it."""


class KeptPlans:
    """The last plans of one model; on rank 0 also what the other ranks have told of theirs."""

    def __init__(self) -> None:
        self.number = 0
        """Of the model, the same on all ranks; 0 before that is agreed on."""
        self._plans: list[KeptPlan] = []
        self._group: dist.ProcessGroup | None = None
        self._num_plans = 0
        self._told: dict[int, dict[int, PackedPlan]] = {}
        self._merged: dict[tuple[int, ...], MergedPlan] = {}
        self._num_merged = 0

    @property
    def messages(self) -> StoreMessages:
        """Of whichever thread writes this model's checkpoints; another model's may write at the same time."""
        return store_messages(f"the saves of model {self.number}")

    def of(self, planner: OwnPart) -> KeptPlan:
        """Return the plan for the state that ``planner`` was given: one that is kept, or a new one."""
        if self._group is not dist.group.WORLD:
            self._group = dist.group.WORLD
            self._plans.clear()
            self._told.clear()
            self._merged.clear()
        form = form_of(planner)
        found = next((one for one in self._plans if one.form == form), None)
        if found is not None:
            return found
        local = planner.create_local_plan()
        self._num_plans += 1
        plan = SavePlan(local.items, storage_data=_StoragePrefix(f"__{dist.get_rank()}_"))
        return KeptPlan(self._num_plans, form, plan, PackedPlan.of(local))

    def told(self, plan: KeptPlan) -> ToldPlan:
        """Return what rank 0 is to be told of a plan."""
        return ToldPlan(plan.number, plan.packed, tuple(one.number for one in self._with(plan)))

    def keep(self, plan: KeptPlan) -> None:
        """Keep a plan by which a checkpoint was saved; every rank calls it."""
        plan.packed = None
        self._plans = self._with(plan)

    def _with(self, plan: KeptPlan) -> list[KeptPlan]:
        return [plan, *(one for one in self._plans if one is not plan)][:_MOST_PLANS]

    def merge(self, told: Sequence[ToldPlan]) -> MergedPlan:
        """Return what all ranks write together; on rank 0.

        Args:
            told: By each rank.

        Raises:
            ValueError: If it is not one whole.
        """
        for rank, one in enumerate(told):
            plans = self._told.setdefault(rank, {})
            if one.packed is not None:
                plans[one.number] = one.packed
            self._told[rank] = {number: plan for number, plan in plans.items() if number in one.kept}
        key = tuple(one.number for one in told)
        merged = self._merged.pop(key, None)
        if merged is None or any(one.packed is not None for one in told):
            self._num_merged += 1
            merged = merge_plans(self._num_merged, [self._told[rank][one.number] for rank, one in enumerate(told)])
        self._merged = dict(list({key: merged, **self._merged}.items())[:_MOST_PLANS])
        return merged

    @property
    def merged_numbers(self) -> list[int]:
        """Of what was merged and may come again; on rank 0."""
        return [one.number for one in self._merged.values()]


def form_of(planner: OwnPart) -> Any:
    """Return what decides a plan: of each entry its name, its place in the state, and how it is sharded.

    Args:
        planner: Which was given the state.
    """
    return dict(planner.mappings), {name: _form(value) for name, value in planner.state_dict.items()}


def _form(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.metadata()
    if isinstance(value, FlatShard):
        return value.dtype, value.place
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value.requires_grad, value.placements, value.device_mesh
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, value.layout
    return None
