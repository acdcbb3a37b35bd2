"""Tensor parallelism cuts the layers of one copy of the model, by a plan.

The ranks of a group see the same batch, and each computes a part of each planned layer. FSDP2 shards what is left to
each of them over the other ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

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
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from ...checkpoint.names import clean_name
from ..sharded_tensors.shards import local_part, note_copies
from .config import matching, no_match

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
_ADAPTERS: Mapping[type[ParallelStyle], str] = {ColwiseParallel: "lora_B", RowwiseParallel: "lora_A"}
"""The one of PEFT's matrices that has the dimension that a style divides."""
_MOST_DIFFERENT = 1e-2
"""By which norms of one gradient may differ in a group: kernels of GPUs add up in other orders."""


class TensorParallel:
    """Cuts the layers of a plan over one dimension of a mesh.

    Args:
        mesh: Of all ranks; the dimension is called ``tp``.
        plan: See `Plan`; None takes the one that a model of transformers has.
    """

    def __init__(self, mesh: DeviceMesh, plan: Plan | None) -> None:
        self.whole_mesh, self.mesh, self._plan = mesh, mesh["tp"], plan
        self.group = self.mesh.get_group()
        self.size, self.rank = self.mesh.size(), self.mesh.get_local_rank()
        self.styles: dict[str, str] = {}
        """The style by which each module was cut."""
        self._num_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Of each optimizer, whose gradients are compared in some of them."""
        note_copies(mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")], self.rank, self.size)

    def apply(self, model: nn.Module) -> None:
        """Cut the layers, unless the user has; their parameters become DTensors. Ranks hold the same values, or none.

        Raises:
            ValueError: If there is no plan, or it does not fit the model.
        """
        if cut := parallelized(model):
            for name, one in cut.items():
                if is_cut(one):
                    self.styles.setdefault(name.rpartition(".")[0], f"{one.placements[0]!r}")
            return
        modules = dict(model.named_modules())
        chosen = {
            full: own
            for name, style in self._chosen(model).items()
            for full, own in _layers(name, modules[name], style)
        }
        self._check_ties(model, [modules[name] for name in chosen])
        for name, style in chosen.items():
            self._check_sizes(name, modules[name], style)
            parallelize_module(modules[name], self.mesh, style, src_data_rank=None)
            self.styles[clean_name(name)] = _described(style)

    def check_parallelized(self, cut: Mapping[str, DTensor]) -> None:
        """Check what the user has cut before, in ``configure_model()``.

        Raises:
            ValueError: If it is cut over other ranks, or there is a plan, too.
        """
        for name, one in cut.items():
            if self._plan is not None:
                raise ValueError(
                    f"{name} is a DTensor already, and there is a tp_plan. Omit the plan, or build the model without "
                    "parallelize_module()."
                )
            if one.device_mesh.ndim != 1 or one.device_mesh.get_group() is not self.group:
                raise ValueError(
                    f"{name} is a DTensor over {one.device_mesh}, which is not the mesh that AccelFSDPStrategy shares "
                    'layers over. Use self.device_mesh["tp"] in configure_model(), and leave fully_shard() to the '
                    "strategy."
                )
            placed = one.placements[0]
            dim = placed.dim if isinstance(placed, Shard) else None
            if not (placed.is_replicate() if dim is None else one.shape[dim] % self.size == 0):
                raise ValueError(
                    f"{name} of shape {tuple(one.shape)} is placed as {placed} over tp_size={self.size}. Use "
                    "Replicate(), or Shard() of a dimension that tp_size divides."
                )

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
            "(base_model_tp_plan), and this module has none. Nor did configure_model() cut layers over "
            'self.device_mesh["tp"].'
        )

    def _match(
        self, plan: Mapping[str, Any], model: nn.Module, prefix: str, *, must_match: bool = True
    ) -> dict[str, ParallelStyle]:
        names = {clean_name(name): name for name, _ in model.named_modules() if name}
        found: dict[str, ParallelStyle] = {}
        for pattern, style in plan.items():
            matched = matching(pattern, names)
            if not matched:
                if not must_match:
                    continue  # of a variant of the architecture
                raise no_match("tp_plan", pattern, names)
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
        if is_parametrized(module):
            raise ValueError(
                f"tp_plan: {clean_name(name)} is parametrized (weight_norm, spectral_norm), and its weight has no "
                "parameter to cut. Leave it out of the plan."
            )
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
        for prefix, module in model.named_modules():  # a module with two names stays one
            for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
                held.setdefault(id(parameter), []).append(clean_name(name))
        for key, names in held.items():
            if key in own and len(names) > 1:
                raise ValueError(
                    f"tp_plan cuts {names[0]}, which is tied to {', '.join(names[1:])}: each would get a tensor of its "
                    "own. Leave these modules out of the plan, or untie them (tie_word_embeddings=False)."
                )

    def table(self) -> list[str]:
        """Return a line for each kind of module and how it was cut: layers that differ in a number are of one kind."""
        kinds = Counter((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), style) for name, style in self.styles.items())
        width = max((len(name) for name, _ in kinds), default=0)
        return [f"{name:<{width}}  {style}  {number} x" for (name, style), number in kinds.items()]

    def check_gradients(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Check that the group has one gradient of what no plan cuts; all ranks call it before each step.

        It differs where a layer sees a part of the activations on each rank, such as a norm over the heads. Steps 1, 2,
        4, 8 and so on are looked at: a layer that begins as zeros, or is frozen, hides what comes before it.

        Raises:
            RuntimeError: On every rank of a group that has several.
        """
        number = self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1
        if number & (number - 1):
            return
        norms = {
            clean_name(name): float(local_part(one.grad).norm())
            for name, one in module.named_parameters()
            if one.grad is not None and not is_cut(one)
        }
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, norms, group=self.group)
        for name in dict.fromkeys(name for one in everyone for name in one):
            of_all = [one.get(name, 0.0) for one in everyone]
            if max(of_all) - min(of_all) > _MOST_DIFFERENT * max(of_all):
                raise RuntimeError(
                    f"The gradient of {name}, which tp_plan does not cut, differs between the processes that share "
                    "layers: each computes it from its part of the activations. Leave the layers before it out of the "
                    "plan, or let them give whole activations ('colwise_rep')."
                )


def parallelized(model: nn.Module) -> dict[str, DTensor]:
    """Return the parameters that are DTensors, by name."""
    return {clean_name(name): one for name, one in model.named_parameters() if isinstance(one, DTensor)}


def check_parallelized(model: nn.Module, parallel: TensorParallel | None, *, from_rank_zero: bool) -> None:
    """Check that a model is not sharded yet, or cut as `TensorParallel` would have cut it.

    Args:
        model: Before sharding.
        parallel: What cuts layers.
        from_rank_zero: Whether only rank 0 has weights.

    Raises:
        ValueError: If it is not.
    """
    cut = parallelized(model)
    for name, module in model.named_modules():
        size = getattr(module, "tp_size", None) if hasattr(module, "tp_plan") else None
        if isinstance(size, int) and size > 1 and not parallelized(module):
            raise ValueError(
                f"{clean_name(name) or type(model).__name__} was cut by transformers over {size} processes, and its "
                "parts are plain tensors: those of process 0 would take the place of all others. Use a version whose "
                'parts are DTensors (5.23 is one), over self.device_mesh["tp"].'
            )
    if not cut:
        return
    if parallel is None:
        name, one = next(iter(cut.items()))
        raise ValueError(
            f"{name} is a DTensor over {one.device_mesh} before AccelFSDPStrategy has sharded it. To cut layers in "
            'configure_model(), set ParallelismConfig(tp_size=...) and use self.device_mesh["tp"]; leave '
            "fully_shard() to the strategy."
        )
    if from_rank_zero:
        raise ValueError(WITHOUT_WEIGHTS)
    parallel.check_parallelized(cut)


WITHOUT_WEIGHTS = (
    "cpu_ram_efficient_loading=True cannot load a model that configure_model() cuts itself: only process 0 has "
    "weights, and each process cuts its own. Give the plan to AccelFSDPStrategy(tp_plan={...}), or the weights in "
    "pretrained_weights."
)


def _layers(name: str, module: nn.Module, style: ParallelStyle) -> Iterator[tuple[str, ParallelStyle]]:
    """Return the layers to cut of a module: of PEFT's LoRA the base, and each adapter's matrix on the side of the cut.

    Raises:
        ValueError: If torch cannot cut it.
    """
    if type(style) not in _CUT_SIZES or isinstance(module, (nn.Linear, nn.Embedding)):
        yield name, style  # a style of the user's own knows what it can cut
        return
    base, adapters = getattr(module, "base_layer", None), getattr(module, _ADAPTERS[type(style)], None)
    has_more = any(len(getattr(module, more, ())) for more in ("lora_embedding_A", "lora_magnitude_vector"))
    if not isinstance(base, nn.Linear) or not isinstance(adapters, nn.ModuleDict) or has_more:
        raise ValueError(
            f"tp_plan cuts linear layers, embeddings, and LoRA of linear layers (without DoRA), and {clean_name(name)} "
            f"is a {type(module).__name__}. Leave it out of the plan."
        )
    yield f"{name}.base_layer", style
    for adapter in adapters:
        yield f"{name}.{_ADAPTERS[type(style)]}.{adapter}", style


def _check_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(f"{type(model).__name__} has {name}={heads}, which tp_size={size} does not divide.")


def _described(style: ParallelStyle) -> str:
    return type(style).__name__.removesuffix("Parallel").lower()


def own_part(cut: torch.Tensor, shard: DTensor) -> torch.Tensor:
    """Return FSDP's shard of the group's part of a layer on this rank.

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
