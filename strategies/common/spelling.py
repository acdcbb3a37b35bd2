"""The spellings of values that arguments and environment variables share, and errors that name both."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ...state.truth_values import TRUTH_VALUES

_HERE = Path(__file__).parents[1]
_warned: set[str] = set()
EnumT = TypeVar("EnumT", bound=Enum)


class Speller:
    """Reads the values of a plugin's fields.

    Args:
        variables: The environment variable that can fill a field, for the fields that have one.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def source(self, field: str) -> str:
        """Return how an error names ``field``: with the variable that may have filled it."""
        variable = self._variables.get(field)
        return f"{field} (argument or environment variable {variable})" if variable else field

    def wrong_value(self, field: str, value: object, allowed: Iterable[object]) -> ValueError:
        """Return the error for a value outside ``allowed``."""
        return ValueError(f"{self.source(field)} must be one of {', '.join(map(str, allowed))}; got {value!r}.")

    def wrong_type(self, field: str, value: object, allowed: str) -> TypeError:
        """Return the error for a value that is not even of an allowed type."""
        return TypeError(f"{self.source(field)} must be {allowed}; got {value!r} of type {type(value).__name__}.")

    def as_bool(self, field: str, value: object) -> bool:
        """Return the boolean that ``value`` is or spells.

        Raises:
            ValueError: If a string spells none.
            TypeError: If it is neither boolean nor string.
        """
        if isinstance(value, bool):
            return value
        if not isinstance(value, str):
            raise self.wrong_type(field, value, "a bool")
        if value.lower() not in TRUTH_VALUES:
            raise self.wrong_value(field, value, TRUTH_VALUES)
        return TRUTH_VALUES[value.lower()]

    def as_int(self, field: str, value: object) -> int:
        """Return the integer that ``value`` is or spells.

        Raises:
            ValueError: If a string spells none.
            TypeError: If it is neither integer nor string.
        """
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.wrong_type(field, value, "an int")
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{self.source(field)} must be a whole number; got {value!r}.") from None

    def as_member(self, field: str, value: object, members: type[EnumT]) -> EnumT:
        """Return the member of an enumeration of torch that ``value`` is, names (in any case) or numbers.

        Raises:
            ValueError: If no member has that name or number.
            TypeError: If it is none of the three.
        """
        if isinstance(value, members):
            return value
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.wrong_type(field, value, f"a str, an int or a {members.__name__}")
        # torch spells HYBRID_SHARD_ZERO2 with a leading underscore, Accelerate without.
        spellings = {member.name.lstrip("_"): member for member in members}
        spellings |= {str(member.value): member for member in members}
        member = spellings.get(str(value).upper().lstrip("_"))
        if member is None:
            raise self.wrong_value(field, value, spellings)
        return member

    def as_names(self, field: str, value: object) -> list[str]:
        """Return the class names in a comma-separated string or in an iterable of strings, as a new list.

        Raises:
            TypeError: If it is neither.
        """
        if isinstance(value, str):
            return [name.strip() for name in value.split(",") if name.strip()]
        names: list[Any] = list(value) if isinstance(value, Iterable) else [value]
        if not all(isinstance(name, str) for name in names) or not isinstance(value, Iterable):
            raise self.wrong_type(field, value, "a list of class names")
        return names


def warn_once(field: str, message: str) -> None:
    """Warn who made the plugin, unless this process has been warned about ``field`` before."""
    if field in _warned:
        return
    _warned.add(field)
    depth, frame = 1, sys._getframe()
    while frame.f_back and (frame.f_code.co_filename == "<string>" or _HERE in Path(frame.f_code.co_filename).parents):
        depth, frame = depth + 1, frame.f_back  # a dataclass's __init__ lies in the file "<string>"
    warnings.warn(message, stacklevel=depth)
