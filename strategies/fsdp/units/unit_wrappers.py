"""What is put around the units before they are sharded: activation checkpointing, and around that `torch.compile`.

The outermost wrapper becomes the unit. With sharding outside, the parameters that backward has gathered serve the
recomputation too, and no compiled graph is broken by the hooks that gather. Wrapper names never reach a state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn


def checkpoint_units(model: nn.Module, units: list[nn.Module], *, offload: bool = False) -> list[nn.Module]:
    """Put a checkpoint wrapper around each unit inside ``model`` and return the wrappers, in the same order.

    Args:
        model: The root.
        units: Children before parents.
        offload: Keep what a wrapper saves, the unit's inputs, in host memory until backward.

    Raises:
        ValueError: If there is no unit.

    Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``fsdp2_apply_ac``), which offloads with FSDP2 alone.
    """
    from ...upstream.torch_core import CheckpointWrapper, checkpoint_wrapper, offload_wrapper

    def wrapper(unit: nn.Module) -> nn.Module:
        checkpointed = unit if isinstance(unit, CheckpointWrapper) else checkpoint_wrapper(unit)
        return offload_wrapper(checkpointed) if offload else checkpointed

    _require_units(units, "activation_checkpointing=True recomputes")
    return _wrap(model, units, wrapper)


def compile_units(
    model: nn.Module, units: list[nn.Module], options: Mapping[str, Any], *, in_place: bool
) -> list[nn.Module]:
    """Let each unit inside ``model`` be compiled at its first call, and return the units to shard, in the same order.

    Args:
        model: The root.
        units: Children before parents.
        options: Keyword arguments of `torch.compile`.
        in_place: Compile the units' own calls, hooks included, instead of putting wrappers around them.

    Raises:
        ValueError: If there is no unit.
    """
    _require_units(units, "compile compiles")
    if in_place:
        for unit in units:
            unit.compile(**options)
        return units
    return _wrap(model, units, lambda unit: cast("nn.Module", torch.compile(unit, **options)))


def _require_units(units: list[nn.Module], doing: str) -> None:
    if not units:
        raise ValueError(
            f"{doing} unit by unit, but the wrap policy makes no unit. "
            "Set auto_wrap_policy='transformer_based_wrap' (or 'size_based_wrap')."
        )


def _wrap(model: nn.Module, units: list[nn.Module], wrapper: Callable[[nn.Module], nn.Module]) -> list[nn.Module]:
    wrappers = {unit: wrapper(unit) for unit in units}
    made = set(wrappers.values())
    for parent in list(model.modules()):
        if parent in made:
            continue
        for name, child in list(parent._modules.items()):  # named_children() shows a child under two names once
            if child is not None and child in wrappers:
                parent._modules[name] = wrappers[child]
    return [wrappers[unit] for unit in units]
