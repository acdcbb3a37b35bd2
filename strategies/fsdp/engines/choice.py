"""The one place that asks for the FSDP version."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..config.settings import EngineSettings, FSDP1Settings, FSDP2Settings
from .base import Engine
from .fsdp1 import FSDP1Engine
from .fsdp2 import FSDP2Engine


def build_engine(settings: EngineSettings, mesh: DeviceMesh, device: torch.device) -> Engine[Any]:
    """Return the engine that ``settings`` are for.

    Raises:
        TypeError: If they are for none.
    """
    if isinstance(settings, FSDP1Settings):
        return FSDP1Engine(settings, mesh, device)
    if isinstance(settings, FSDP2Settings):
        return FSDP2Engine(settings, mesh, device)
    raise TypeError(f"settings must be FSDP1Settings or FSDP2Settings, got {type(settings).__name__}.")
