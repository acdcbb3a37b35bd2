"""Which `DeepSpeedPlugin` is in use."""

from __future__ import annotations

from ....state import AcceleratorState, DistributedType
from .plugin import DeepSpeedPlugin


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """Return the active plugin.

    Args:
        state: Accelight's `AcceleratorState`.

    Raises:
        ValueError: If DeepSpeed is not enabled.

    Source: accelerate 1.15 ``utils/deepspeed.py``.
    """
    plugin = state.deepspeed_plugin
    if state.distributed_type != DistributedType.DEEPSPEED or plugin is None:
        raise ValueError(
            f"DeepSpeed is not enabled: distributed_type is {state.distributed_type}. Train with "
            "AccelDeepSpeedStrategy, or make AcceleratorState(deepspeed_plugin=...) before asking for its plugin."
        )
    return plugin
