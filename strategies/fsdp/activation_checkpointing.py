"""Activation checkpointing of the units that are sharded."""

from __future__ import annotations

from torch import nn


def checkpoint_units(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Put a checkpoint wrapper around each unit inside ``model`` and return the wrappers, in the same order.

    The wrappers become the units: with sharding outside and recomputation inside, the parameters that backward has
    gathered serve the recomputation too. Wrapper names never reach a state dict.

    Raises:
        ValueError: If there is no unit.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

    if not units:
        raise ValueError(
            "activation_checkpointing=True recomputes unit by unit, but the wrap policy makes no unit. "
            "Set auto_wrap_policy='transformer_based_wrap' (or 'size_based_wrap')."
        )
    wrappers = {unit: unit if isinstance(unit, CheckpointWrapper) else checkpoint_wrapper(unit) for unit in units}
    for parent in list(model.modules()):
        if isinstance(parent, CheckpointWrapper):
            continue
        for name, child in list(parent._modules.items()):  # named_children() shows a child under two names once
            if child is not None and child in wrappers:
                parent._modules[name] = wrappers[child]
    return [wrappers[unit] for unit in units]
