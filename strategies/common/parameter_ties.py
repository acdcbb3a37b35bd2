"""Parameters that stand under several names."""

from __future__ import annotations

from torch import nn


def find_ties(model: nn.Module) -> dict[str, str]:
    """Return alias to kept name for parameters that stand under several names; the first name is kept.

    Ask before FSDP1 shards: its flat parameters hide which name is which.
    """
    kept: dict[nn.Parameter, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in kept:
            ties[name] = kept[parameter]
        else:
            kept[parameter] = name
    return ties
