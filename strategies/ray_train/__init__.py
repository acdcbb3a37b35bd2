"""Ray Train: the strategies that its ``prepare_trainer`` takes, and what its workers continue from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.config import lazy_names

if TYPE_CHECKING:
    from .storage import reported_checkpoint
    from .strategies import RayAccelDeepSpeedStrategy, RayAccelFSDPStrategy

__all__ = ["RayAccelDeepSpeedStrategy", "RayAccelFSDPStrategy", "reported_checkpoint"]

_HOMES = {  # the strategies are subclasses of Ray's, which is imported with them
    "RayAccelDeepSpeedStrategy": ".strategies",
    "RayAccelFSDPStrategy": ".strategies",
    "reported_checkpoint": ".storage",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
