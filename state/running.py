"""Decorators that run a function on some processes only, decided at each call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def run_where(condition: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    """Return ``function`` that runs where ``condition()`` holds at the call, and returns None elsewhere.

    At the call and not at decoration: a function is often decorated before the process group exists.
    """
    if not callable(function):
        raise TypeError(f"This decorator takes a function, got {function!r}.")

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if condition() else None

    return run


def check_index(name: str, index: int | None, count: int) -> int:
    """Return ``index``, or raise if there is no such process.

    Raises:
        ValueError: If it is missing or out of range.
    """
    if index is None:
        raise ValueError(f"{name} is missing. Write @state.on_process({name}=0), with an index below {count}.")
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must be an int, got {index!r}.")
    if not 0 <= index < count:
        hint = (
            " Before a process group exists there is one process: decorate after it has started." if count == 1 else ""
        )
        raise ValueError(f"{name}={index} is out of range: there are {count} process(es), 0 to {count - 1}.{hint}")
    return index
