"""FSDP2 in a plain PyTorch loop: the same sharding as under the strategy, with the model itself as the root."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from .config.plugin import FullyShardedDataParallelPlugin
from .config.settings import FSDP2Settings
from .config.wrapping import resolve_ignored
from .engines.fsdp2 import FSDP2Engine
from .units.master_weights import make_masters
from .units.mesh import build_mesh
from .units.sharded_root import recall_form
from .weights.initial_weights import prepare_with_weights


class Accelerator(Protocol):
    """What is needed of an ``accelerator``; it may have a ``device_mesh``, too."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        ...

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        ...

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin:
        """How to shard."""
        ...


class _InPlaceEngine(FSDP2Engine):
    """Makes the model itself the root: nobody redirects its ``forward`` here."""

    refuses_holders = False  # users hold the original parameters, for `map_parameters`

    @override
    def _root_of(self, model: nn.Module) -> nn.Module:
        return model


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard ``model`` in place as the plugin says; a model that is sharded already is left alone.

    Every rank calls it, in a running process group. Parameters become new objects: make the optimizer afterwards, or
    switch it (`parameters_by_name`, `map_parameters`, `fsdp2_switch_optimizer_parameters`). Where the plugin's
    ``mixed_precision_policy`` has a ``param_dtype``, what is trained is stored in fp32, as in Accelerate. With
    ``cpu_ram_efficient_loading=True`` rank 0's weights and buffers are sent to all; the other ranks' may be on the
    meta device.

    Args:
        accelerator: Anything with ``device``, ``is_main_process``, ``fsdp_plugin`` and, if it likes, ``device_mesh``:
            a mesh, ``(replicate, shard)``, or None to shard over every rank. A connected strategy gives its precision.
        model: Not sharded with FSDP1.

    Returns:
        ``model``.

    Raises:
        ValueError: If the plugin is for FSDP1, or does not fit the model.
        RuntimeError: If there is no process group, if ``model`` was sharded by a strategy, or if rank 0's weights
            cannot be sent.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``.
    """
    plugin = accelerator.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp2_prepare_model needs a plugin with fsdp_version=2, got fsdp_version={plugin.fsdp_version}. "
            "Set FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    if isinstance(model, FSDPModule):
        return model
    if recall_form(model, FSDP2Engine.version) is not None:
        raise RuntimeError(
            f"{type(model).__name__} was sharded by AccelFSDPStrategy, whose Trainer calls it through a root of its "
            "own. Use it under that strategy, or build a new model."
        )
    if not dist.is_initialized():
        raise RuntimeError("There is no process group: call torch.distributed.init_process_group() first.")
    engine = _engine_for(accelerator)
    if engine.settings.precision.param_dtype is not None:
        make_masters(model, without=resolve_ignored(model, engine.settings.ignored_modules))
    prepare_with_weights(engine, model, accelerator)
    return model


def _engine_for(accelerator: Accelerator) -> _InPlaceEngine:
    connected = getattr(accelerator, "_engine", None)  # a strategy knows the Trainer's precision
    if isinstance(connected, FSDP2Engine):
        return _InPlaceEngine(connected.settings, connected.mesh, connected.device)
    given = getattr(accelerator, "device_mesh", None)
    if isinstance(given, DeviceMesh) and given.ndim == 1:
        mesh = given
    else:
        mesh = build_mesh(given, dist.get_world_size(), accelerator.device.type)
    settings = accelerator.fsdp_plugin.settings(dp_replicate=mesh.size(0) if mesh.ndim == 2 else 1)
    if not isinstance(settings, FSDP2Settings):
        raise TypeError(f"expected FSDP2Settings, got {type(settings).__name__}.")
    return _InPlaceEngine(settings, mesh, accelerator.device)
