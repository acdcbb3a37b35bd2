"""Lightning's strategies, and which of ours takes the place of each."""

from __future__ import annotations

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

LIGHTNING: dict[str, tuple[type, type]] = {
    "## FSDPStrategy": (FSDPStrategy, AccelFSDPStrategy),
    "## ModelParallelStrategy": (ModelParallelStrategy, AccelFSDPStrategy),
    "## DeepSpeedStrategy": (DeepSpeedStrategy, AccelDeepSpeedStrategy),
}
"""By the heading of its table in ``docs/from-lightning.md``."""
