"""Top-level keys of a DeepSpeed config that were not meant: DeepSpeed takes any, and ignores those it lacks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_DECIDE = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "amp", "activation_checkpointing"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type", "steps_per_print"),
    *("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "wall_clock_breakdown"),
)
"""What most configs have, and what changes numbers."""
_CLOSE = 0.8


def check_top_level(config: Mapping[str, Any]) -> None:
    """Check that no key is nearly one that counts.

    Raises:
        ValueError: If one is; the message names both.
    """
    near = {key: difflib.get_close_matches(key, _DECIDE, n=1, cutoff=_CLOSE) for key in config if key not in _DECIDE}
    lines = [f"- {key}: there is no such key. Did you mean {found[0]!r}?" for key, found in near.items() if found]
    if lines:
        raise ValueError("\n".join(["DeepSpeed would ignore a part of this config:", *lines]))
