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


def check_index(name: str, index: int | None) -> int:
    """Return ``index``, or raise if no process can have it.

    Raises:
        ValueError: If it is missing or negative.
        TypeError: If it is no whole number.
    """
    if index is None:
        raise ValueError(f"{name} is missing. Write @state.on_{name.removesuffix('_index')}({name}=0).")
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must be an int, got {index!r}.")
    if index < 0:
        raise ValueError(f"{name}={index} is out of range: the first process is 0.")
    return index


def is_chosen(name: str, index: int, own_index: int, count: int, *, alone: bool) -> bool:
    """Return whether this process is the one with ``index``; one that is alone is every one, as in Accelerate.

    Args:
        name: What errors call the index.
        index: The chosen one.
        own_index: This process's.
        count: Processes among which it is chosen.
        alone: Whether there is no other process at all, as far as is known now.

    Raises:
        ValueError: If there are several processes, and none with ``index``.
    """
    if alone:
        return True
    if index >= count:
        raise ValueError(f"{name}={index} is out of range: there are {count} process(es), 0 to {count - 1}.")
    return own_index == index
