"""Placeholders for objects that a pickle names and that are not needed here: nothing is imported, nothing is run."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from ...errors import CheckpointError, brief
from ..source import MAX_BYTES, MAX_DIMS
from .allowed_names import Sealed

_ATTACK_MODULES = frozenset(("os", "posix", "nt", "subprocess", "sys", "pty", "runpy", "importlib", "shutil", "socket"))
_ATTACK_BUILTINS = frozenset(("eval", "exec", "execfile", "compile", "__import__", "open", "input", "breakpoint"))


class Inert(metaclass=Sealed):
    """Placeholder for every object that is not needed: accepts whatever the pickle gives it, and keeps nothing."""

    __slots__ = ()

    def __new__(cls, *_: object) -> Inert:  # noqa: PYI034 - Self is newer than Python 3.10
        """Take any arguments."""
        return super().__new__(cls)

    def __call__(self, *_: object) -> Inert:
        """Be the result of a call, too."""
        return self

    def __setstate__(self, _: object) -> None: ...

    def __setitem__(self, _: object, __: object) -> None: ...

    def append(self, _: object) -> None:
        """Drop what a list would keep."""

    def extend(self, _: object) -> None:
        """Drop what a list would keep."""


class InertByDefault(dict[tuple[str, str], object]):
    """Allowed names of a pickle; `Inert` for all others, however they are called: `Inert` keeps and runs nothing."""

    def __missing__(self, _: tuple[str, str]) -> type[Inert]:
        return Inert


class InertUnlessAttack(InertByDefault):
    """The same, but names that only an attack has a use for are an error.

    This protects nothing, it informs the user: with `Inert` the pickle would be just as harmless.
    """

    def __missing__(self, key: tuple[str, str]) -> type[Inert]:
        module, name = key
        if module.partition(".")[0] in _ATTACK_MODULES or (
            module in ("builtins", "__builtin__") and name in _ATTACK_BUILTINS
        ):
            raise CheckpointError(
                f"The pickle asks for {module}.{name}, which no training writes: it may be an attack. "
                f"Nothing of it was run."
            )
        return Inert


class DictWithState(dict[object, object], metaclass=Sealed):
    """``collections.OrderedDict``, as ``Module.state_dict()`` makes it: its attribute ``_metadata`` is dropped."""

    __slots__ = ()

    def __init__(self) -> None:
        """Begin empty: pickles fill it item by item, and pairs given here would escape the check of keys."""
        super().__init__()

    def __setstate__(self, _: object) -> None: ...


class Size(tuple[int, ...], metaclass=Sealed):
    """``torch.Size``: small non-negative integers, checked as they come in; equal ones are one object."""

    __slots__ = ()

    def __new__(cls, values: Iterable[Any] = ()) -> Size:  # noqa: PYI034 - Self is newer than Python 3.10
        """Check the sizes."""
        sizes = tuple(values)
        for size in sizes:
            if type(size) is not int or not 0 <= size < MAX_BYTES or len(sizes) > MAX_DIMS:
                raise pickle.UnpicklingError(f"a torch.Size of {brief(sizes)}")
        known = _known_sizes.get(sizes)
        if known is None:
            if len(_known_sizes) > 10_000:
                _known_sizes.clear()
            known = _known_sizes[sizes] = super().__new__(cls, sizes)
        return known


_known_sizes: dict[tuple[int, ...], Size] = {}
