"""``optimizer.state`` as users' code sees it: by the parameters that a step has, too, which the optimizer has not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from .user_code import look_from_here


class OptimizerStates(defaultdict[Any, Any]):
    """States that are found by what stands for a parameter where users' code runs. Copies are plain.

    A step that uses them is looked at from there on: they may be sharded.

    Args:
        states: By the optimizer's parameters.
        key_of: Returns the parameter that a key stands for, as a rule the key; may raise an error.
    """

    def __init__(self, states: defaultdict[Any, Any], key_of: Callable[[Any], Any]) -> None:
        super().__init__(states.default_factory, states)
        self.key_of = key_of

    @staticmethod
    def follow(optimizers: Iterable[Optimizer], key_of: Callable[[Any], Any]) -> None:
        """Make optimizers have such states.

        Not where they have a container of their own, or one that another optimizer has, too, as wrappers do.
        """
        for optimizer in optimizers:
            own = optimizer.state
            if type(own) not in (defaultdict, OptimizerStates) or getattr(own, "key_of", None) == key_of:
                continue
            if not any(getattr(one, "state", None) is own for one in vars(optimizer).values() if one is not optimizer):
                optimizer.state = OptimizerStates(own, key_of)

    @staticmethod
    def leave(optimizers: Iterable[Optimizer]) -> None:
        """Make optimizers have plain states again."""
        for optimizer in optimizers:
            if isinstance(optimizer.state, OptimizerStates):
                optimizer.state = optimizer.state.copy()

    @override
    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(self.default_factory, self)

    @override
    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return self.copy()

    @override
    def __reduce__(self) -> Any:
        return defaultdict, (self.default_factory,), None, None, iter(super().items())

    @override
    def __getitem__(self, key: Any) -> Any:
        look_from_here()
        return super().__getitem__(key)

    @override
    def __missing__(self, key: Any) -> Any:
        own = self.key_of(key)
        return super().__missing__(key) if own is key else self[own]

    @override
    def __contains__(self, key: object) -> bool:
        look_from_here()
        return super().__contains__(self.key_of(key))

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        look_from_here()
        super().__setitem__(self.key_of(key), value)

    @override
    def __delitem__(self, key: Any) -> None:
        look_from_here()
        super().__delitem__(self.key_of(key))

    @override
    def __iter__(self) -> Iterator[Any]:
        look_from_here()
        return super().__iter__()

    @override
    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        look_from_here()
        return super().values()

    @override
    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        look_from_here()
        return super().items()

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        look_from_here()
        return super().get(self.key_of(key), default)

    @override
    def pop(self, key: Any, *default: Any) -> Any:
        look_from_here()
        return super().pop(self.key_of(key), *default)

    @override
    def setdefault(self, key: Any, default: Any = None) -> Any:
        look_from_here()
        return super().setdefault(self.key_of(key), default)
