"""The memory that training takes, before it is launched: `plan_memory`, and the command ``accelight plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.config import lazy_names

if TYPE_CHECKING:
    from ..common.launch import Unit
    from .memory_plan import MemoryPlan
    from .planner import plan_memory
    from .shape_tensors import PlanningError

__all__ = ["PlanningError", "MemoryPlan", "Unit", "plan_memory"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "PlanningError": ".shape_tensors",
        "MemoryPlan": ".memory_plan",
        "Unit": "..common.launch",
        "plan_memory": ".planner",
    },
)
