"""The weights of a sharded checkpoint in memory, instead of in files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .formats.dtypes import conversion_target
from .locate import find_checkpoint
from .merge import plan_merge
from .names import checked_prefix, patterns

if TYPE_CHECKING:
    import torch


def load_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    strip_prefix: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the full weights of a sharded checkpoint on the CPU: what `merge_fsdp_weights` would write.

    One process calls it; nothing is written, and tied weights are one tensor under all of their names.

    Args:
        checkpoint_dir: As for `merge_fsdp_weights`.
        dtype: Convert floating-point tensors; None keeps each one's own, but for ZeRO 1 to 3: fp32.
        strip_prefix: Keep what lies under this attribute of the LightningModule; ``"auto"`` finds it.
        include: Patterns (``fnmatch``) over the resulting names; only names that match one are read.
        exclude: Patterns over the resulting names; names that match one are left out.

    Raises:
        CheckpointError: If the checkpoint is damaged, incomplete, or no model can be told in it.
        ValueError: If an argument is wrong.
    """
    from .writing.convert import load_tensors

    source, selection, plan = plan_merge(
        find_checkpoint(checkpoint_dir),
        strip_prefix=checked_prefix(strip_prefix),
        include=patterns(include, "include"),
        exclude=patterns(exclude, "exclude"),
        dtype=conversion_target(dtype),
        max_shard_bytes=None,
        safe=False,
    )
    source.check(set(selection.names.values()), lambda _: None)
    weights: dict[str, torch.Tensor] = {}
    for file in plan.files:
        weights.update(load_tensors(file))
        weights.update({alias: weights[name] for alias, name in file.ties.items()})
    return weights
