"""Plans of sharded saves, kept for the next: who writes what is the same while names, shapes and meshes are.

torch's planning sends rank 0 a description of each piece of each rank, and all of them back, at each save. (Its own
``enable_plan_caching`` still has the four collectives of objects, and keeps one plan for all models of a process.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from ...common.store_messages import StoreMessages, store_messages
from ...upstream.torch_core import ShardedTensor, _StorageInfo
from .dcp_writer import Written
from .saving_plan import FullFromRankZero

_MOST_PLANS = 2  # with and without optimizers, as a rule


@dataclass
class KeptPlan:
    """What was planned for states of one form."""

    number: int
    """The same on all ranks."""
    form: Any
    """Equal for states to which the plan fits, on this rank."""
    plan: SavePlan
    """What this rank writes."""
    metadata: Metadata | None
    """On rank 0: of the whole checkpoint, without the places of its pieces."""
    indices: list[list[MetadataIndex]] = field(default_factory=list)
    """On rank 0: what each rank writes, in its plan's order."""


class KeptPlans:
    """The last plans of one model; all ranks keep theirs together."""

    def __init__(self) -> None:
        self.number = 0
        """Of the model, the same on all ranks; 0 before that is agreed on."""
        self._plans: list[KeptPlan] = []
        self._group: dist.ProcessGroup | None = None
        self._num_plans = 0

    @property
    def messages(self) -> StoreMessages:
        """Of whichever thread writes this model's checkpoints; another model's may write at the same time."""
        return store_messages(f"the saves of model {self.number}")

    def find(self, form: Any) -> KeptPlan | None:
        """Return the plan for a form, if one was made by this process group."""
        if self._group is not dist.group.WORLD:
            self._group = dist.group.WORLD
            self._plans.clear()
        return next((one for one in self._plans if one.form == form), None)

    @property
    def numbers(self) -> list[int]:
        """Of the plans that are kept."""
        return [one.number for one in self._plans]

    def keep(self, form: Any, planner: FullFromRankZero, metadata: Metadata) -> KeptPlan:
        """Keep what was planned, and return it; every rank calls it, after what went well on all."""
        self._num_plans += 1
        kept = KeptPlan(self._num_plans, form, planner.plan, None)
        if dist.get_rank() == 0:
            kept.metadata = metadata
            kept.indices = [[item.index for item in plan.items] for plan in planner.global_plan]
        self._plans = [kept, *self._plans[: _MOST_PLANS - 1]]
        return kept


def form_of(planner: FullFromRankZero) -> Any:
    """Return what decides a plan: of each entry its name, its place in the state, and how it is sharded.

    Args:
        planner: Which was given the state.
    """
    return dict(planner.mappings), {name: _form(value) for name, value in planner.state_dict.items()}


def _form(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.metadata()
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value.requires_grad, value.placements, value.device_mesh
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, value.layout
    return None


@dataclass
class Places:
    """Where a rank wrote what its plan says: as few bytes as tell it."""

    files: list[str]
    numbers: array[int]
    """Of each item of the plan: size of its content, the file's number, offset and length there, digest."""

    @classmethod
    def of(cls, plan: SavePlan, results: Sequence[WriteResult]) -> Self:
        """Pack what ``write_data`` returned for ``plan``."""
        by_index = {one.index: one for one in results if isinstance(one, Written)}  # FolderWriter's all are
        files: dict[str, int] = {}
        numbers = array("q")
        for item in plan.items:
            one = by_index[item.index]
            place = one.storage_data
            number = files.setdefault(place.relative_path, len(files))
            numbers.extend((one.size_in_bytes, number, place.offset, place.length, one.digest))
        return cls(list(files), numbers)

    def results(self, indices: Sequence[MetadataIndex]) -> list[WriteResult]:
        """Return what was packed, for rank 0 to write into the metadata."""
        numbers = self.numbers.tolist()
        written: list[WriteResult] = []
        for index, at in zip(indices, range(0, len(numbers), 5), strict=True):
            size, file, offset, length, digest = numbers[at : at + 5]
            written.append(Written(index, size, _StorageInfo(self.files[file], offset, length), digest))
        return written
