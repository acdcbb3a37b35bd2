"""References to original parameters, which FSDP2 replaces by sharded ones: attributes, containers, and whoever is left.

Code marks parameters (``p._no_weight_decay = True``) and keeps them, or their ids, in attributes of modules before they
are sharded. Where it reads those later, they must be the parameters that train.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from .optimizer_parameters import parameters_by_name

_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MOST_LEVELS = 8


class References:
    """What code may keep of the parameters of a model that is about to be sharded.

    It keeps none of them alive: each is freed when its unit is sharded.

    Args:
        model: Not sharded yet.
        kept: Parameters that sharding leaves alone.
    """

    def __init__(self, model: nn.Module, kept: Iterable[nn.Parameter]) -> None:
        left_alone = {id(parameter) for parameter in kept}
        named = parameters_by_name(model)
        self._names: dict[int, str] = {}
        for name, parameter in named.items():
            if id(parameter) not in left_alone:
                self._names.setdefault(id(parameter), name)
        self._alive = {key: TensorWeakRef(named[name]) for key, name in self._names.items()}
        self._attributes = {name: dict(vars(named[name])) for name in self._names.values() if vars(named[name])}
        self._hooks = {
            name: hooks for name in self._names.values() if (hooks := named[name]._backward_hooks) is not None
        }
        self._new: dict[int, nn.Parameter] = {}

    def switch(self, model: nn.Module) -> None:
        """Let attributes and containers of modules refer to the parameters of ``model``, sharded by now."""
        after = parameters_by_name(model)
        self._new = {key: after[name] for key, name in self._names.items() if name in after}
        for name, attributes in self._attributes.items():
            if name in after:
                for attribute, value in attributes.items():
                    vars(after[name]).setdefault(attribute, value)
        for name, hooks in self._hooks.items():
            if name in after:  # the same dict: what register_hook() has returned removes them from it
                after[name]._backward_hooks = hooks
        visited: set[int] = set()
        for module in model.modules():
            attributes = vars(module)
            for name in [name for name in attributes if name not in _MODULES_OWN]:
                value = attributes[name]
                switched = self._switched(value, visited)
                if switched is not value:
                    attributes[name] = switched

    def _original(self, value: object) -> nn.Parameter | None:
        """Return the parameter that has taken the place of ``value``, if it is an original one."""
        if not isinstance(value, nn.Parameter) or id(value) not in self._new:
            return None
        return self._new[id(value)] if self._alive[id(value)]() is value else None

    def _switched(self, value: Any, visited: set[int]) -> Any:
        """Return ``value``, a mutable container changed in place, or what takes its place."""
        if isinstance(value, nn.Parameter):
            new = self._original(value)
            return value if new is None else new
        if type(value) is dict or (isinstance(value, dict) and type(value).__module__ == "collections"):
            return self._switched_dict(value, visited)
        if not isinstance(value, list | tuple | set | frozenset) or id(value) in visited:
            return value
        visited.add(id(value))
        items = list(value)
        new_items = self._switched_items(items, visited)
        if all(new is item for new, item in zip(new_items, items, strict=True)):
            return value
        if isinstance(value, list):
            value[:] = new_items
        elif isinstance(value, set):
            value.clear()
            value.update(new_items)
        else:
            return type(value)(*new_items) if hasattr(value, "_fields") else type(value)(new_items)
        return value

    def _switched_items(self, items: list[Any], visited: set[int]) -> list[Any]:
        if items and all(type(item) is int and item in self._new for item in items):  # ids
            return [id(self._new[item]) for item in items]
        return [self._switched(item, visited) for item in items]

    def _switched_dict(self, value: dict[Any, Any], visited: set[int]) -> dict[Any, Any]:
        if id(value) in visited:
            return value
        visited.add(id(value))
        keys, values = list(value), list(value.values())
        new_keys = self._switched_items(keys, visited)
        new_values = [self._switched(item, visited) for item in values]
        if any(new is not old for new, old in zip((*new_keys, *new_values), (*keys, *values), strict=True)):
            value.clear()
            value.update(zip(new_keys, new_values, strict=True))
        return value

    # ------------------------------------------------------------------ who is left
    def check_holders(self) -> None:
        """Check, after `switch`, that nobody keeps original parameters.

        Raises:
            RuntimeError: If an object does, optimizers left out; it names both.
        """
        if all(weak() is None for weak in self._alive.values()):
            return
        gc.collect()
        held = [parameter for weak in self._alive.values() if (parameter := weak()) is not None]
        if not held:
            return
        holders = _holders_of(held, {id(held): held, id(self.__dict__): self.__dict__})
        if holders:
            names = ", ".join(repr(self._names[id(parameter)]) for parameter in held[:3])
            raise RuntimeError(
                f"{', '.join(holders)} holds original parameters ({names}{', ...' if len(held) > 3 else ''}), which "
                "FSDP2 has replaced by sharded ones: what is read from them or done to them there does not reach the "
                "parameters that train. Let it hold the module, and read the parameter where it is used; or keep the "
                "parameters in an attribute, list or dict of a module, which is switched to the sharded ones."
            )


def _holders_of(held: list[nn.Parameter], ours: Mapping[int, object]) -> list[str]:
    """Return the objects that keep tensors, as a type and an attribute; optimizers, which are switched, left out."""
    found: dict[str, None] = {}
    level: list[Any] = list(held)
    below = {id(each) for each in held}
    seen: set[int] = {*ours, id(level)}
    for _ in range(_MOST_LEVELS):
        upper: list[Any] = []
        seen |= {id(upper), id(level)}
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen or isinstance(referrer, types.FrameType | types.GeneratorType | types.CellType):
                continue
            seen.add(id(referrer))
            if isinstance(referrer, _CONTAINERS) and not isinstance(referrer, Optimizer):
                upper.append(referrer)
                below.add(id(referrer))
            elif not isinstance(referrer, Optimizer | Tensor | types.FunctionType | types.ModuleType):
                own = list(getattr(referrer, "__dict__", {}).items())
                name = next((name for name, value in own if id(value) in below), None)
                if name is not None:
                    found[f"{type(referrer).__name__}.{name}"] = None
        if not upper:
            break
        level = upper
    return list(found)
