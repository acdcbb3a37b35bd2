"""What the names in a pickle may stand for: classes, functions and values that the pickle cannot change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

Allowed = Mapping[tuple[str, str], object]
"""What each (module, name) becomes: a class, a callable, or a plain value. The pickle can make objects of the class and
set their state, and call the callable; it can set nothing on either, and reach nothing else."""


class Sealed(type):
    """Metaclass of the classes a pickle may instantiate: their attributes cannot be set through the class."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} is sealed")


class SafeCall(metaclass=Sealed):
    """A callable that a pickle may name: it runs ``fn``, and nothing can be set on it."""

    __slots__ = ("_fn",)
    _fn: Callable[..., object]

    def __init__(self, fn: Callable[..., object]):
        object.__setattr__(self, "_fn", fn)

    def __call__(self, *args: object) -> object:
        """Run ``fn``."""
        return self._fn(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("sealed")

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("sealed")


def _empty_dict() -> dict[object, object]:
    """Without arguments: ``dict(pairs)`` would escape the check of keys."""
    return {}


EMPTY_DICT = SafeCall(_empty_dict)
"""Stands for ``collections.OrderedDict``, which pickles make empty and then fill item by item."""
