"""What the strategy is told: a DeepSpeed config with every ``"auto"`` filled, and its values by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .config_precision import Precision, precision_of
from .hf_config import HfDeepSpeedConfig


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """A resolved config. Make it with `auto_values.resolve`."""

    config: dict[str, Any]
    """For ``deepspeed.initialize``; nothing in it is ``"auto"`` but where DeepSpeed itself knows that word."""
    gradient_accumulation_steps: int
    """Micro-batches in a full window."""
    gradient_clipping: float
    """Largest norm of the gradients; 0 for no clipping."""
    mixed_precision: Precision
    """Half precision that the engine computes in."""
    zero_stage: int
    """0 to 3."""

    @classmethod
    def of(cls, config: HfDeepSpeedConfig) -> DeepSpeedSettings:
        """Return the settings of a config that has no ``"auto"`` left."""
        return cls(
            config=config.config,
            gradient_accumulation_steps=config.get_value("gradient_accumulation_steps", 1),
            gradient_clipping=config.get_value("gradient_clipping", 0.0),
            mixed_precision=precision_of(config),
            zero_stage=config.get_value("zero_optimization.stage", 0),
        )
