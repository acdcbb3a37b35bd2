"""What a DeepSpeed config computes in: its ``fp16`` and ``bf16`` sections."""

from __future__ import annotations

from typing import Literal

from .hf_config import HfDeepSpeedConfig

Precision = Literal["no", "fp16", "bf16"]


def precision_of(config: HfDeepSpeedConfig) -> Precision:
    """Return the half precision that the config switches on, ``"no"`` for none.

    Raises:
        ValueError: If it switches on both.
    """
    fp16, bf16 = config.is_true("fp16.enabled"), config.is_true("bf16.enabled")
    if fp16 and bf16:
        raise ValueError("The DeepSpeed config has both fp16.enabled and bf16.enabled. Set one of them to false.")
    return "fp16" if fp16 else "bf16" if bf16 else "no"


def fill_precision(config: HfDeepSpeedConfig, mixed_precision: str) -> None:
    """Switch on what computes in ``mixed_precision`` where the config leaves it open; ``"fp8"`` stands on bf16."""
    wanted = {"fp16": mixed_precision == "fp16", "bf16": mixed_precision in ("bf16", "fp8")}
    for name, on in wanted.items():
        # DeepSpeed does not cast the inputs of an fp16 model by itself. A section of the user's keeps what it says.
        fresh = {"enabled": on, "auto_cast": True} if on and name == "fp16" else {"enabled": on}
        config.config.setdefault(name, fresh)
        if config.is_auto(f"{name}.enabled") or config.get_value(f"{name}.enabled") is None:
            config.set_value(f"{name}.enabled", on)
