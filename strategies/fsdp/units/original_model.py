"""What a checkpoint's reader wants to know of the model as it was before sharding: order, and where it lies."""

from __future__ import annotations

from torch import nn

from ....checkpoint.names import clean_name


def parameter_order(model: nn.Module) -> dict[str, int]:
    """Return the place in ``model.parameters()`` of each parameter, under all its names without traces of wrappers.

    Ask before sharding: FSDP1's flat parameters come in another order than the parameters in them.
    """
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    named = model.named_parameters(remove_duplicate=False)
    return {clean_name(name): places[parameter] for name, parameter in named}


def module_attribute_of(model: nn.Module) -> str | None:
    """Return the attribute under which ``model`` holds all its parameters.

    Returns:
        The name; ``""`` if ``model`` holds parameters itself or in several children; None without parameters.
    """
    if next(model.parameters(recurse=False), None) is not None:
        return ""
    holders = [name for name, child in model.named_children() if next(child.parameters(), None) is not None]
    return None if not holders else holders[0] if len(holders) == 1 else ""
