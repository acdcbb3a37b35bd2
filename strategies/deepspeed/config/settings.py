"""The frozen settings of one engine: a DeepSpeed config with every ``"auto"`` filled, and its values by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config_precision import Precision, precision_of
from .hf_config import HfDeepSpeedConfig


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """A resolved config. Make it with `auto_values.resolve`."""

    config: dict[str, Any]
    """For ``deepspeed.initialize`` only; nothing in it is ``"auto"`` but where DeepSpeed itself knows that word."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in a full window."""
    gradient_clipping: float = 0.0
    """Largest norm of the gradients; 0 for no clipping."""
    mixed_precision: Precision = "no"
    """Half precision that the engine computes in."""
    zero_stage: int = 0
    """0 to 3."""
    offload_optimizer_device: str = "none"
    """``"none"``, ``"cpu"`` or ``"nvme"``."""
    offload_param_device: str = "none"
    """``"none"``, ``"cpu"`` or ``"nvme"``."""
    optimizer_type: str | None = None
    """Lower-case name of the optimizer that the config defines."""
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of that optimizer."""
    forces_deepspeed_cpu_optimizer: bool = True
    """Whether only DeepSpeed's own optimizers may step on offloaded state."""

    @classmethod
    def of(cls, config: HfDeepSpeedConfig) -> DeepSpeedSettings:
        """Return the settings of a config that has no ``"auto"`` left; they have a copy of it."""
        config = HfDeepSpeedConfig(config)
        optimizer_type = config.get_value("optimizer.type")
        return cls(
            config=config.config,
            gradient_accumulation_steps=config.get_value("gradient_accumulation_steps", 1),
            gradient_clipping=config.get_value("gradient_clipping", 0.0),
            mixed_precision=precision_of(config),
            zero_stage=int(config.get_value("zero_optimization.stage", 0)),
            offload_optimizer_device=config.get_value("zero_optimization.offload_optimizer.device") or "none",
            offload_param_device=config.get_value("zero_optimization.offload_param.device") or "none",
            optimizer_type=None if optimizer_type is None else str(optimizer_type).lower(),
            optimizer_params=config.get_value("optimizer.params") or {},
            forces_deepspeed_cpu_optimizer=bool(config.get_value("zero_force_ds_cpu_optimizer", True)),
        )

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is in host memory or on NVMe."""
        return self.offload_optimizer_device != "none"

    @property
    def defines_adam(self) -> bool:
        """Whether the config's optimizer is Adam or AdamW."""
        return self.optimizer_type in ("adam", "adamw")

    def changed(self, changes: Mapping[str, Any]) -> DeepSpeedSettings:
        """Return settings with other values at these keys of the config, such as ``"zero_optimization.stage"``."""
        config = HfDeepSpeedConfig(self.config)
        for key, value in changes.items():
            config.set_value(key, value)
        return self.of(config)
