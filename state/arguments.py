"""Keyword arguments that a class does not have are refused with those that it has, and the one that was meant."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

T = TypeVar("T")


def named_arguments(cls: type[T]) -> type[T]:
    """Decorate a class whose users write long lists of keyword arguments.

    Python's own ``TypeError`` says that one is unexpected, and nothing of the others.
    """
    initialize: Any = cls.__init__
    known = list(inspect.signature(initialize).parameters)[1:]

    @functools.wraps(initialize)
    def check_and_initialize(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{cls.__name__} has no argument {name!r}.{hint} It has: {', '.join(known)}.")
        initialize(self, *args, **kwargs)

    changed: Any = cls
    changed.__init__ = check_and_initialize
    return cls
