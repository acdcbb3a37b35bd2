"""What a DeepSpeed config computes in: its ``fp16`` and ``bf16`` sections."""

from __future__ import annotations

import copy
from typing import Any, Literal

from .hf_config import HfDeepSpeedConfig

Precision = Literal["no", "fp16", "bf16"]
_SECTIONS = ("fp16", "bf16")


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


class PrecisionSections:
    """Fills the precision sections of one config again and again, each time from what the user wrote into them."""

    def __init__(self) -> None:
        self._written: dict[str, Any] = {}
        self._filled: dict[str, Any] | None = None

    def fill(self, config: HfDeepSpeedConfig, mixed_precision: str) -> None:
        """Switch on what computes in ``mixed_precision`` where the user has left it open.

        Raises:
            ValueError: If the config switches on the other half precision.
        """
        written = self._as_written(config)
        for name in _SECTIONS:
            config.del_config_sub_tree(name)
        config.config.update(written)
        self._written = copy.deepcopy(written)
        for name, other in (("fp16", "bf16"), ("bf16", "fp16")):
            on = mixed_precision == name or (mixed_precision == "fp8" and name == "bf16")
            if on and config.is_true(f"{other}.enabled"):
                raise ValueError(
                    f"mixed_precision={mixed_precision!r} and {other}.enabled=true in the DeepSpeed config contradict. "
                    f"Set {other}.enabled to 'auto' or false, or mixed_precision to {other!r}."
                )
        fill_precision(config, mixed_precision)
        self._filled = _sections_of(config)

    def own(self, config: HfDeepSpeedConfig) -> Precision:
        """Return the half precision that the config itself switches on, whatever has been filled in since."""
        return precision_of(HfDeepSpeedConfig(self._as_written(config)))

    def _as_written(self, config: HfDeepSpeedConfig) -> dict[str, Any]:
        present = _sections_of(config)
        return copy.deepcopy(self._written) if present == self._filled else present


def _sections_of(config: HfDeepSpeedConfig) -> dict[str, Any]:
    """Return a copy of what the config says about precision."""
    return {name: copy.deepcopy(config.config[name]) for name in _SECTIONS if name in config.config}
