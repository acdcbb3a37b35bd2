"""What is sharded how: the units of a model, and the parts that manual optimization calls one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Plan:
    """What an engine is to shard."""

    units: list[nn.Module] = field(default_factory=list)
    """Gathered and freed on their own; children before parents."""
    ignored: set[nn.Module] = field(default_factory=set)
    """Modules whose own tensors stay unsharded."""
    scalars: frozenset[nn.Parameter] = frozenset()
    """Parameters without a dimension, which stay unsharded: nothing of them can be cut."""
    parts: list[nn.Module] = field(default_factory=list)
    """Empty where one root unit is gathered around the whole training step; else what stands in its place, see
    `parts_called_alone`."""
    to_be_filled: bool = False
    """Whether all of the model is on the meta device, and its values come afterwards."""


def scalars_of(model: nn.Module, ignored: set[nn.Module]) -> frozenset[nn.Parameter]:
    """Return the parameters without a dimension (a temperature, CLIP's ``logit_scale``) outside of ignored modules."""
    unmanaged = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    return frozenset(one for one in model.parameters() if not one.ndim and one not in unmanaged)


def parts_called_alone(model: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules of a LightningModule in manual optimization; nothing in automatic optimization.

    Automatic optimization runs one backward after ``training_step``, and a root unit stays gathered until then. In
    manual optimization backward runs inside ``training_step``, often several times with steps in between: a root unit
    would be gone after the first backward, and could not see ``toggle_optimizer``. So each child is gathered around
    its own calls instead. Containers without a ``forward`` are looked into.

    Args:
        model: What the strategy shards.
        ignored: Modules that are left alone.
    """
    if getattr(model, "automatic_optimization", True):
        return []
    return list(dict.fromkeys(_callable_children(model, ignored)))


def left_over(model: nn.Module, parts: list[nn.Module]) -> set[nn.Module]:
    """Return the modules outside of all ``parts``."""
    inside = {submodule for part in parts for submodule in part.modules()}
    return set(model.modules()) - inside


def _callable_children(module: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if child in ignored or next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _callable_children(child, ignored)
        else:
            found.append(child)
    return found
