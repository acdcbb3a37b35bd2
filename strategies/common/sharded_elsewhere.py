"""Modules that a strategy of the other kind has sharded: refused, by name."""

from __future__ import annotations

from torch import nn

SHARDED_FORM = "_accelight_sharded_form"
"""Attribute of a module that FSDP has sharded."""
_INSTEAD = (
    "Build a new module; from what was trained, it goes on with fit(ckpt_path=...) and a full checkpoint, or with "
    "merged weights (merge_fsdp_weights)."
)


def refuse_module_of_fsdp(module: nn.Module) -> None:
    """Refuse a module that FSDP has sharded.

    Raises:
        RuntimeError: If it is one.
    """
    if SHARDED_FORM in module.__dict__:
        raise RuntimeError(
            f"{type(module).__name__} is already sharded with FSDP, and DeepSpeed cannot take it over. {_INSTEAD}"
        )


def refuse_module_of_stage_3(module: nn.Module) -> None:
    """Refuse a module whose parameters DeepSpeed has partitioned.

    Raises:
        RuntimeError: If it is one.
    """
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} is already partitioned with DeepSpeed's stage 3, and FSDP cannot take it over. "
            f"{_INSTEAD}"
        )
