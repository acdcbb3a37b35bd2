"""The division of the processes: `ParallelismConfig`, meshes over them, and those that see the same batches."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...state.process_group import require_group, timeout_of
from ...state.utils import flag_from_env
from ..common.dataloader_state import random_state, set_random_state, tensors_in

_PREFIX, _IS_GIVEN = "PARALLELISM_CONFIG_", "ACCELERATE_USE_PARALLELISM_CONFIG"


@dataclass
class ParallelismConfig:
    """Into how many parts each dimension of parallelism divides the processes, for ``AccelFSDPStrategy``.

    Args:
        dp_replicate_size: Copies of the sharded model (HSDP). Default 1.
        dp_shard_size: Processes that FSDP2 shards over. Default: all that the others leave.
        tp_size: Processes that share the layers of the tensor-parallel plan, and see the same batches. Default 1.
        cp_size: Processes that share each sequence (context parallelism, by gathered keys), and see the same batches.
            Default 1.
        sp_size: The same by heads (Ulysses). Default 1.

    Each is taken from ``PARALLELISM_CONFIG_DP_SHARD_SIZE`` and so on where it is not given. The strategy
    without a config takes all from there if ``accelerate launch`` has one (``ACCELERATE_USE_PARALLELISM_CONFIG``).

    Raises:
        ValueError: If a size is not allowed.

    Source: accelerate 1.15 ``parallelism_config.py``, whose ``dp_shard_size`` is 1 by default.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    sp_size: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            size = getattr(self, one.name)
            given = os.environ.get(variable := f"{_PREFIX}{one.name.upper()}")
            if size is None and given is not None:
                if not given.strip().isdecimal():
                    raise ValueError(f"{variable}={given!r} must be a number of processes.")
                size = int(given)
            if size is None and one.name != "dp_shard_size":
                size = 1
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{one.name} must be at least 1, got {size!r}.")
            setattr(self, one.name, size)
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(f"cp_size={self.cp_size} and sp_size={self.sp_size} both divide sequences. Set one to 1.")

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are cut."""
        return self._tp > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are cut, and their keys gathered."""
        return (self.cp_size or 1) > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are cut, and exchanged for heads."""
        return (self.sp_size or 1) > 1

    @property
    def _tp(self) -> int:
        return self.tp_size or 1

    @property
    def _parts(self) -> int:
        return (self.cp_size or 1) * (self.sp_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that see the same batches; their ranks are consecutive."""
        return self._parts * self._tp

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that see different batches, once ``dp_shard_size`` is known."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def total_size(self) -> int:
        """Number of processes, once ``dp_shard_size`` is known."""
        return self.data_parallel_size * self.non_data_parallel_size

    def for_processes(self, world_size: int) -> ParallelismConfig:
        """Return the config with each size, for as many processes.

        Raises:
            ValueError: If they do not multiply to that number.
        """
        others = (self.dp_replicate_size or 1) * self.non_data_parallel_size
        shard = self.dp_shard_size or max(world_size // others, 1)
        if shard * others != world_size:
            raise ValueError(
                f"ParallelismConfig divides into dp_replicate_size={self.dp_replicate_size} x dp_shard_size="
                f"{self.dp_shard_size or 'the rest'} x cp_size={self.cp_size} x sp_size={self.sp_size} x "
                f"tp_size={self.tp_size}, which is not the number of processes, "
                f"{world_size}. Change one of them, or start another number."
            )
        return replace(self, dp_shard_size=shard)


def launched_parallelism() -> ParallelismConfig | None:
    """Return the config of ``accelerate launch``, where it has one."""
    return ParallelismConfig() if flag_from_env(os.environ, _IS_GIVEN) else None


def as_parallelism(given: Any) -> ParallelismConfig:
    """Return the config that ``given`` is: ours, Accelerate's ``ParallelismConfig``, or ``TorchTensorParallelPlugin``.

    Raises:
        TypeError: If it is none of them.
    """
    if isinstance(given, ParallelismConfig):
        return given
    if not isinstance(getattr(given, "tp_size", None), int):
        raise TypeError(f"parallelism_config must be a ParallelismConfig, got {type(given).__name__}.")
    return ParallelismConfig(**{one.name: getattr(given, one.name, None) for one in fields(ParallelismConfig)})


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names of modules that a pattern (``fnmatch``) of the user's matches."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def no_match(argument: str, pattern: str, names: Iterable[str]) -> ValueError:
    """Return the error for a pattern that matches none of them."""
    known = list(names)
    return ValueError(
        f"{argument}: {pattern!r} matches no module. The model has {', '.join(known[:8])}"
        f"{' and more' if len(known) > 8 else ''}."
    )


# ------------------------------------------------------------------------------------------------
# The mesh over all ranks.


_KNOWN: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, DeviceMesh]] = WeakKeyDictionary()
"""Of each default group, so that one fit after another does not start new groups."""


def build_named_mesh(sizes: Mapping[str, int], device_type: str, order: Sequence[int] = ()) -> DeviceMesh:
    """Return a mesh over all ranks, whose groups are started one by one.

    `init_device_mesh` would split the default group where it is bound to a device, as the Trainer binds it on GPUs. The
    gloo part of it, for what lies on the CPU, cannot be split in the second process group of a process: that ends the
    process (torch 2.13, github.com/pytorch/pytorch/issues/192106).

    Args:
        sizes: Of the dimensions by name, the outermost first.
        device_type: Such as ``"cpu"`` or ``"cuda"``.
        order: Of all ranks; by number if it is empty.
    """
    group = require_group("device_mesh")
    order = tuple(order) or tuple(range(group.size()))
    known, key = _KNOWN.setdefault(group, {}), (*sizes.items(), device_type, order)
    if key not in known:
        ranks = torch.tensor(order).view(*sizes.values())
        groups = []
        for dim, size in enumerate(ranks.shape):  # of each dimension: the ranks that differ in it alone
            members = ranks.movedim(dim, -1).reshape(-1, size)
            own, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout_of(group))  # type: ignore[no-untyped-call]
            groups.append(own)
        known[key] = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(sizes))
    return known[key]


# ------------------------------------------------------------------------------------------------
# The ranks that see the same batches.


class SameBatches:
    """The ranks that share the layers or the sequences of one copy of the model.

    Args:
        group: Of them.
        size: Which they share, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, size: str) -> None:
        self._group, self._size = group, size

    def share_random_states(self, device: torch.device) -> None:
        """Give all ranks of the group the first one's random states: dropout of what all of them have is the same."""
        states: list[Any] = [random_state(device)]
        dist.broadcast_object_list(states, group=self._group, group_src=0)
        if self._group.rank() != 0:
            set_random_state(states[0], device)

    def check_batch(self, batch: Any) -> None:
        """Check that the ranks of the group have the same batch; every rank calls it.

        Raises:
            RuntimeError: On every rank of a group that has not.
        """
        own = [(tuple(one.shape), float(one.detach().double().sum().nan_to_num())) for one in tensors_in(batch)]
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, own, group=self._group)
        if any(one != everyone[0] for one in everyone):
            ranks = dist.get_process_group_ranks(self._group)
            raise RuntimeError(
                f"The processes {', '.join(map(str, ranks))} share one copy of the model ({self._size}), and "
                "got different batches. Deal samples by "
                "trainer.strategy.distributed_sampler_kwargs: Trainer(use_distributed_sampler=True) does."
            )
