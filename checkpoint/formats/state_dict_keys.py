"""Under which keys of a saved state dict, and in which folders, weights and optimizer state are kept."""

from __future__ import annotations

MODEL_KEYS = ("model", "state_dict")
"""Where weights are kept: Accelerate, Lightning's FSDPStrategy and FSDP1 folders of ours; its ModelParallelStrategy and
FSDP2 folders of ours."""


def is_optimizer_key(key: str) -> bool:
    """Whether ``key`` is where optimizer state is kept: ``optimizer``, ``optimizer_0``, ``optim``, ``optimizers``."""
    return key in ("optim", "optims", "optimizers") or key.rstrip("0123456789").rstrip("_") == "optimizer"
