"""What a fit with FSDP tells of itself at its start."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..common.run_summary import RunSummary, counted, short_dtype
from ..upstream.torch_core import ActivationWrapper
from .config.settings import EngineSettings, FSDP2Settings
from .engines.base import Engine
from .engines.fsdp2_units import own_class
from .units.sharded_root import ShardedForm, ShardedRoot, inside_root
from .whole_parameters import WholeParameters


def summarise_run(strategy: str, engine: Engine[Any], form: ShardedForm, precision: str, saved_by: str) -> RunSummary:
    """Return what a fit tells.

    Args:
        strategy: Name of its class.
        engine: What sharded the module.
        form: The sharded module, nothing of it gathered.
        precision: The Trainer's.
        saved_by: Who writes checkpoints, empty if training does.
    """
    settings, root = engine.settings, form.root
    whole = sum(one.numel for one in WholeParameters(root).of(inside_root(root)))
    return RunSummary(
        strategy=strategy,
        engine=f"FSDP{engine.version}",
        device=engine.device,
        world_size=engine.mesh.size(),
        details=[_mesh(engine), _resharding(root, settings), *_details(settings)],
        parts=[f"units {counted(_unit_classes(root))}", f"{whole:,} parameters, {_held(root):,} of them on rank 0"],
        precision=", ".join([precision, *_dtypes(settings)]),
        checkpoints=f"{settings.state_dict_type}{saved_by}",
    )


def _mesh(engine: Engine[Any]) -> str:
    mesh = engine.mesh
    return "mesh " + " x ".join(f"{name}={mesh.size(at)}" for at, name in enumerate(mesh.mesh_dim_names or ("shard",)))


def _resharding(root: nn.Module, settings: EngineSettings) -> str:
    for unit in root.modules():
        if isinstance(unit, FullyShardedDataParallel):  # torch's own: on one process it does not shard
            return unit.sharding_strategy.name
    if isinstance(settings, FSDP2Settings) and not settings.reshard_after_forward:
        return "resharded after backward"
    return "resharded after forward"


def _details(settings: EngineSettings) -> list[str]:
    found: list[str] = []
    if settings.activation_checkpointing or settings.recomputed is not None:
        found.append("activation checkpointing")
    if settings.cpu_offload:
        found.append("CPU offload")
    if settings.compile_options is not None:
        found.append("compiled units")
    if not settings.reshard_during_accumulation:
        found.append("gathered through accumulation")
    return found


def _unit_classes(root: nn.Module) -> list[type[nn.Module]]:
    """Return the class of each unit as the user wrote it, children before parents."""
    units = [module for module in root.modules() if isinstance(module, (FSDPModule, FullyShardedDataParallel))]
    return [own_class(_unwrapped(unit)) for unit in reversed(units)]


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, (FullyShardedDataParallel, ShardedRoot)):
            module = module.module
        elif isinstance(module, ActivationWrapper):
            module = module._checkpoint_wrapped_module
        else:
            return module


def _held(root: nn.Module) -> int:
    """Return the number of elements that this process holds at rest, with padding."""
    found = [one.to_local() if isinstance(one, DTensor) else one for one in root.parameters()]
    return sum(one.numel() for one in found)


def _dtypes(settings: EngineSettings) -> list[str]:
    named = {"gathered": settings.precision.param_dtype, "reduced": settings.precision.reduce_dtype}
    return [f"{what} in {short_dtype(dtype)}" for what, dtype in named.items() if dtype is not None]
