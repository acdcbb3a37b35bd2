"""Strategies are copied and pickled as the arguments that they were made with.

Libraries keep what their users give the Trainer among the hyperparameters, and so in checkpoints: neuralforecast's
``save_hyperparameters()`` is one. What a strategy holds while it trains, processes, hooks and shards, is not for them.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

T = TypeVar("T")
_GIVEN = "_accelight_arguments"


def made_again(cls: type[T]) -> type[T]:
    """Decorate a class whose objects are to be copied that way; classes derived from it decide for themselves."""
    initialize: Any = cls.__init__

    @functools.wraps(initialize)
    def remember_and_initialize(self: T, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            vars(self)[_GIVEN] = args, kwargs
        initialize(self, *args, **kwargs)

    def reduce(self: T, protocol: Any) -> Any:
        given = vars(self).get(_GIVEN)
        return object.__reduce_ex__(self, protocol) if given is None else (_make, (cls, *given))

    changed: Any = cls
    changed.__init__, changed.__reduce_ex__ = remember_and_initialize, reduce
    return cls


def _make(cls: type[T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return cls(*args, **kwargs)
