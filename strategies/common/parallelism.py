"""How the processes are divided: `ParallelismConfig`, the mesh that it makes, and tensor parallelism over a part of it.

Tensor parallelism cuts the layers of one copy of the model: its ranks see the same batch, and each computes a part of
each planned layer. FSDP2 shards what is left to each of them over the other ranks.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from ...checkpoint.names import clean_name
from ...state.process_group import require_group, timeout_of
from ..upstream.torch_core import tree_leaves
from .dataloader_state import random_state, set_random_state
from .sharded_tensors import local_part, note_copies

_PREFIX = "PARALLELISM_CONFIG_"


@dataclass
class ParallelismConfig:
    """Into how many parts each dimension of parallelism divides the processes, for ``AccelFSDPStrategy``.

    Args:
        dp_replicate_size: Copies of the sharded model (HSDP). Default 1.
        dp_shard_size: Processes that FSDP2 shards over. Default: all that the others leave.
        tp_size: Processes that share the layers of the tensor-parallel plan, and see the same batches. Default 1.
        cp_size: Context parallelism. Not supported: must be 1.
        sp_size: Sequence parallelism (Ulysses). Not supported: must be 1.

    Each is taken from ``PARALLELISM_CONFIG_DP_SHARD_SIZE`` and so on where it is not given.

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
        for name in ("cp_size", "sp_size"):
            if getattr(self, name) != 1:
                what = "Context" if name == "cp_size" else "Sequence"
                raise ValueError(
                    f"{what} parallelism ({name}={getattr(self, name)}) is not supported. Set {name}=1, and "
                    "recompute activations (activation_checkpointing=True) or cut layers by tp_size."
                )

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are cut."""
        return self._tp > 1

    @property
    def _tp(self) -> int:
        return self.tp_size or 1

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that see different batches, once ``dp_shard_size`` is known."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def total_size(self) -> int:
        """Number of processes, once ``dp_shard_size`` is known."""
        return self.data_parallel_size * self._tp

    def for_processes(self, world_size: int) -> ParallelismConfig:
        """Return the config with each size, for as many processes.

        Raises:
            ValueError: If they do not multiply to that number.
        """
        others = (self.dp_replicate_size or 1) * self._tp
        shard = self.dp_shard_size or max(world_size // others, 1)
        if shard * others != world_size:
            raise ValueError(
                f"ParallelismConfig divides into dp_replicate_size={self.dp_replicate_size} x dp_shard_size="
                f"{self.dp_shard_size or 'the rest'} x tp_size={self.tp_size}, which is not the number of processes, "
                f"{world_size}. Change one of them, or start another number."
            )
        return replace(self, dp_shard_size=shard)


# ------------------------------------------------------------------------------------------------
# The mesh over all ranks.


_KNOWN: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[str, int], ...], DeviceMesh]] = WeakKeyDictionary()
"""Of each default group, so that one fit after another does not start new groups."""


def build_named_mesh(sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """Return a mesh over all ranks, whose groups are started one by one.

    `init_device_mesh` would split the default group where it is bound to a device, as the Trainer binds it on GPUs. The
    gloo part of it, for what lies on the CPU, cannot be split in the second process group of a process: that ends the
    process (torch 2.13, github.com/pytorch/pytorch/issues/192106).

    Args:
        sizes: Of the dimensions by name, the outermost first.
        device_type: Such as ``"cpu"`` or ``"cuda"``.
    """
    group = require_group("device_mesh")
    known, key = _KNOWN.setdefault(group, {}), tuple(sizes.items())
    if key not in known:
        ranks = torch.arange(group.size()).view(*sizes.values())
        groups = []
        for dim, size in enumerate(ranks.shape):  # of each dimension: the ranks that differ in it alone
            members = ranks.movedim(dim, -1).reshape(-1, size)
            own, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout_of(group))  # type: ignore[no-untyped-call]
            groups.append(own)
        known[key] = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(sizes))
    return known[key]


# ------------------------------------------------------------------------------------------------
# Tensor parallelism.


Plan = Mapping[str, "str | ParallelStyle"]
"""Patterns (``fnmatch``) over names of modules, and how each is cut."""
STYLES: Mapping[str, type[ParallelStyle] | Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}
"""torch's styles by the names that transformers' plans have."""
_CUT_SIZES: Mapping[type[ParallelStyle], tuple[str, str]] = {
    ColwiseParallel: ("out_features", "embedding_dim"),
    RowwiseParallel: ("in_features", "num_embeddings"),
}
"""Attributes of `nn.Linear` and `nn.Embedding` with the size that a style divides."""
_MOST_DIFFERENT = 1e-2
"""By which norms of one gradient may differ in a group: kernels of GPUs add up in other orders."""


class TensorParallel:
    """Cuts the layers of a plan over one dimension of a mesh.

    Args:
        mesh: Of all ranks; the dimension is called ``tp``.
        plan: See `Plan`; None takes the one that a model of transformers has.
    """

    def __init__(self, mesh: DeviceMesh, plan: Plan | None) -> None:
        self.mesh, self._plan = mesh["tp"], plan
        self.group = self.mesh.get_group()
        self.size, self.rank = self.mesh.size(), self.mesh.get_local_rank()
        self.styles: dict[str, str] = {}
        """How each module was cut."""
        self._checked: WeakSet[Optimizer] = WeakSet()
        """Whose gradients were found to be the same on all ranks of the group."""
        note_copies(mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")], self.rank, self.size)

    def apply(self, model: nn.Module) -> None:
        """Cut the layers; their parameters become DTensors. All ranks hold the same values, or none.

        Raises:
            ValueError: If there is no plan, or it does not fit the model.
        """
        present = next((name for name, one in model.named_parameters() if isinstance(one, DTensor)), None)
        if present is not None:
            raise ValueError(
                f"{clean_name(present)} is a DTensor already. Build the model without parallelize_module(), and give "
                "the plan to AccelFSDPStrategy(tp_plan={...}): it cuts the layers when all ranks have the same values."
            )
        chosen = self._chosen(model)
        modules = dict(model.named_modules())
        self._check_ties(model, [modules[name] for name in chosen])
        for name, style in chosen.items():
            self._check_sizes(name, modules[name], style)
            parallelize_module(modules[name], self.mesh, style, src_data_rank=None)
            self.styles[clean_name(name)] = _described(style)

    def _chosen(self, model: nn.Module) -> dict[str, ParallelStyle]:
        if self._plan is not None:
            return self._match(self._plan, model, "")
        for prefix, module in model.named_modules():
            plan = getattr(module, "tp_plan", None)
            if plan and (found := self._match(dict(plan), module, f"{prefix}." if prefix else "", must_match=False)):
                _check_heads(module, self.size)
                return found
        raise ValueError(
            "tp_size > 1 needs a plan: tp_plan={'model.blocks.*.up': 'colwise', 'model.blocks.*.down': 'rowwise'}, "
            "with patterns over the names of model.named_modules(). Models of transformers bring one of their own "
            "(base_model_tp_plan), and this module has none."
        )

    def _match(
        self, plan: Mapping[str, Any], model: nn.Module, prefix: str, *, must_match: bool = True
    ) -> dict[str, ParallelStyle]:
        names = {clean_name(name): name for name, _ in model.named_modules() if name}
        found: dict[str, ParallelStyle] = {}
        for pattern, style in plan.items():
            matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            if not matched:
                if not must_match:
                    continue  # of a variant of the architecture
                raise ValueError(
                    f"tp_plan: {pattern!r} matches no module. The model has {', '.join(list(names)[:8])}"
                    f"{' and more' if len(names) > 8 else ''}."
                )
            if isinstance(style, str) and style not in STYLES:
                whose = "tp_plan" if must_match else f"{type(model).__name__}'s own plan"
                raise ValueError(
                    f"{whose}: {style!r} for {pattern!r} is no style. Allowed: {', '.join(STYLES)}"
                    f"{'.' if must_match else '. Give a plan of these: AccelFSDPStrategy(tp_plan={...}).'}"
                )
            for name in matched:
                if (full := f"{prefix}{names[name]}") in found and must_match:
                    raise ValueError(f"tp_plan: {name} is matched by several patterns, {pattern!r} being one.")
                found[full] = STYLES[style]() if isinstance(style, str) else style
        return found

    def _check_sizes(self, name: str, module: nn.Module, style: ParallelStyle) -> None:
        for kind, sizes in _CUT_SIZES.items():
            for size in sizes if isinstance(style, kind) else ():
                number = getattr(module, size, None)
                if isinstance(number, int) and number % self.size:
                    raise ValueError(
                        f"tp_plan: {clean_name(name)} with {size}={number} cannot be divided by tp_size={self.size}."
                    )

    def _check_ties(self, model: nn.Module, cut: Sequence[nn.Module]) -> None:
        own = {id(parameter) for module in cut for parameter in module.parameters()}
        held: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            held.setdefault(id(parameter), []).append(clean_name(name))
        for key, names in held.items():
            if key in own and len(names) > 1:
                raise ValueError(
                    f"tp_plan cuts {names[0]}, which is tied to {', '.join(names[1:])}: each would get a tensor of its "
                    "own. Leave these modules out of the plan, or untie them (tie_word_embeddings=False)."
                )

    def share_random_states(self, device: torch.device) -> None:
        """Give all ranks of the group the first one's random states: dropout of what all of them have is the same."""
        states: list[Any] = [random_state(device)]
        dist.broadcast_object_list(states, group=self.group, group_src=0)
        if self.rank != 0:
            set_random_state(states[0], device)

    def check_gradients(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Check before an optimizer's first step that the group has one gradient of what no plan cuts; all call it.

        It differs where a layer sees a part of the activations on each rank, such as a norm over the heads.

        Raises:
            RuntimeError: On every rank of a group that has several.
        """
        if optimizer in self._checked:
            return
        norms = {
            clean_name(name): float(local_part(one.grad).norm())
            for name, one in module.named_parameters()
            if one.grad is not None and not is_cut(one)
        }
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, norms, group=self.group)
        for name in norms:
            of_all = [one.get(name, 0.0) for one in everyone]
            if max(of_all) - min(of_all) > _MOST_DIFFERENT * max(of_all):
                raise RuntimeError(
                    f"The gradient of {name}, which tp_plan does not cut, differs between the processes that share "
                    "layers: each computes it from its part of the activations. Leave the layers before it out of the "
                    "plan, or let them give whole activations ('colwise_rep')."
                )
        if all(isfinite(norm) for one in everyone for norm in one.values()):  # else a scaler's first steps
            self._checked.add(optimizer)

    def check_batch(self, batch: Any) -> None:
        """Check that the ranks of the group have the same batch; every rank calls it.

        Raises:
            RuntimeError: On every rank of a group that has not.
        """
        tensors = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
        own = [(tuple(one.shape), float(one.detach().double().sum().nan_to_num())) for one in tensors]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own, group=self.group)
        if any(one != everyone[0] for one in everyone):
            ranks = dist.get_process_group_ranks(self.group)
            raise RuntimeError(
                f"The processes {', '.join(map(str, ranks))} share the layers of one copy of the model (tp_size="
                f"{self.size}), and got different batches. Deal samples by "
                "trainer.strategy.distributed_sampler_kwargs: Trainer(use_distributed_sampler=True) does."
            )


def _check_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(f"{type(model).__name__} has {name}={heads}, which tp_size={size} does not divide.")


def _described(style: ParallelStyle) -> str:
    return type(style).__name__.removesuffix("Parallel").lower()


def own_part(cut: torch.Tensor, shard: DTensor) -> torch.Tensor:
    """Return what FSDP gives this rank of its group's part of a layer.

    Args:
        cut: That part, gathered.
        shard: The parameter, sharded over a mesh of which one dimension is ``tp``.
    """
    names = shard.device_mesh.mesh_dim_names or ()
    placed = {name: one for name, one in zip(names, shard.placements, strict=True) if name != "tp"}
    placements = [Replicate() if one.is_replicate() else Shard(one.dim) for one in placed.values()]  # type: ignore[attr-defined]
    return distribute_tensor(cut, shard.device_mesh[tuple(placed)], placements, src_data_rank=None).to_local()


def is_cut(tensor: torch.Tensor) -> bool:
    """Return whether a rank of a tensor-parallel group has another part of this tensor than the others."""
    if not isinstance(tensor, DTensor) or "tp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    at = (tensor.device_mesh.mesh_dim_names or ()).index("tp")
    return not tensor.placements[at].is_replicate()
