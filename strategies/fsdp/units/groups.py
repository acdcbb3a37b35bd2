"""Which parameters are gathered and reduced together beyond what the wrap policy says: ties and the output head."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from torch import nn

from ...upstream.lightning import rank_zero_warn

_WORTH_A_COLLECTIVE = 2**20
"""Below about a million parameters, starting a collective takes longer than sending them."""


def without_split_ties(
    model: nn.Module, units: list[nn.Module], unsharded: Collection[nn.Module] = ()
) -> list[nn.Module]:
    """Return ``units`` without those that hold one use of a tied parameter while another use is outside of them.

    A module that several others hold is such a use for each of them, unless it is in a unit of its own.

    Their parameters then belong to the unit around all uses, at last to the root's. Two groups must not manage one
    parameter: FSDP1 would train two copies, and FSDP2 fails at the first forward since torch 2.13
    (huggingface/accelerate#4171).

    Args:
        model: The root.
        units: Candidates, children before parents.
        unsharded: Modules that nobody shards.
    """
    ties = [users for users in _users(model, unsharded).values() if len(users) > 1]
    kept = [unit for unit in units if not any(_splits(unit, users) for users in ties)]
    kept = _without_shared_modules(model, kept, unsharded)
    if len(kept) < len(units):
        names = {module: name for name, module in model.named_modules()}
        rank_zero_warn(
            "These share parameters with modules outside of them, and are gathered with what is around them instead of "
            f"on their own: {', '.join(names[unit] for unit in units if unit not in kept)}."
        )
    return kept


def without_attention_of_encoders(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return ``units`` without the attention of ``nn.TransformerEncoderLayer``, which reads its weights itself.

    In evaluation the layer hands them to one fused operation, past the attention's own forward.

    Args:
        model: Not sharded yet.
        units: What is to be gathered on its own.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    read = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    return [unit for unit in units if unit not in read]


def late_heads(model: nn.Module, units: list[nn.Module], unsharded: Collection[nn.Module]) -> list[nn.Module]:
    """Return the large linear layers registered after the last unit, output heads as a rule.

    In the root's unit they would be gathered before the first layer runs, and reduced after the last one has, with
    nothing to hide behind. In a group of their own they are gathered while layers compute, their gradients are reduced
    first, and a step that does not use them does not gather them. The embeddings and the final norm stay with the
    root: what is needed first is gathered first either way, and a group more would be a collective more.

    Args:
        model: The root.
        units: What is sharded on its own already.
        unsharded: Modules that nobody shards.
    """
    taken = {submodule for unit in units for submodule in unit.modules()}
    users = _users(model, unsharded)
    modules = list(model.modules())
    last = max((index for index, module in enumerate(modules) if module in taken), default=len(modules))
    return [
        module
        for module in modules[last + 1 :]
        if type(module) is nn.Linear
        and module not in unsharded
        and module.weight.numel() >= _WORTH_A_COLLECTIVE
        and all(len(users[parameter]) == 1 for parameter in module.parameters())
    ]


def _users(model: nn.Module, unsharded: Collection[nn.Module]) -> dict[nn.Parameter, list[nn.Module]]:
    """Return the modules that hold each parameter themselves; without parameters of ``unsharded``."""
    unmanaged = {parameter for module in unsharded for parameter in module.parameters(recurse=False)}
    users: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in unmanaged:
                users[parameter].append(module)
    return users


def _without_shared_modules(
    model: nn.Module, units: list[nn.Module], unsharded: Collection[nn.Module]
) -> list[nn.Module]:
    """Leave out units that would gather a module which is called from outside of them, too."""
    holders = Counter(child for module in model.modules() for child in module.children())
    if max(holders.values(), default=0) < 2:
        return units
    kept: list[nn.Module] = []
    for unit in units:
        inside = set(unit.modules())
        on_their_own = {module for other in kept if other in inside for module in other.modules()}
        gathered = {
            module
            for module in inside - on_their_own - set(unsharded)
            if next(module.parameters(recurse=False), None) is not None
        }
        if gathered.isdisjoint(_reachable_without(model, unit)):
            kept.append(unit)
    return kept


def _reachable_without(model: nn.Module, unit: nn.Module) -> set[nn.Module]:
    found, waiting = {model}, [model]
    while waiting:
        new = {child for child in waiting.pop().children() if child is not unit} - found
        found |= new
        waiting += new
    return found


def _splits(unit: nn.Module, users: list[nn.Module]) -> bool:
    inside = set(unit.modules())
    return 0 < sum(module in inside for module in users) < len(users)
