"""Checks of arguments, with the argument that was meant, mappings, and the spellings of true and false."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, MutableMapping
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


def check_count(name: str, value: object, least: int = 1) -> None:
    """Check that an argument is a whole number of at least ``least``.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}.")


def like_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return other ``values`` of the same keys in a copy of the original's kind, or a dict if that cannot change."""
    if type(original) is dict or not isinstance(original, MutableMapping):
        return values
    clone = copy.copy(original)
    for key, value in values.items():
        clone[key] = value
    return clone


# ------------------------------------------------------------------------------------------------
# Spellings of yes and no in environment variables and arguments.


TRUTH_VALUES: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}
"""In lower case. Source: accelerate 1.15 ``utils/environment.py`` (``str_to_bool``)."""


def flag_from_env(env: Mapping[str, str], name: str) -> bool:
    """Return whether a variable says yes; unset or empty says no.

    Raises:
        ValueError: If it says neither.
    """
    text = env.get(name, "").lower()
    if text and text not in TRUTH_VALUES:
        raise ValueError(f"{name}={env[name]!r} is neither true nor false. Use 1 or 0.")
    return bool(text) and TRUTH_VALUES[text]
