"""Reading of settings: spellings shared by arguments and environment variables, classes by name, lazy names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import Version
from torch import nn
from typing_extensions import Self

from ...state.utils import TRUTH_VALUES

_OURS = (Path(__file__).parents[1], Path(__file__).parents[2] / "state")  # strategies, and what they are made with
_warned: set[str] = set()
EnumT = TypeVar("EnumT", bound=Enum)


class FromVariable(str):
    """The text of an environment variable, which errors name; otherwise a plain string.

    Args:
        text: What the variable holds.
        variable: Its name.
    """

    __slots__ = ("variable",)
    variable: str

    def __new__(cls, text: str, variable: str) -> Self:
        """Strings get their text here."""
        made = super().__new__(cls, text)
        made.variable = variable
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # what `__new__` takes, to be copied
        return str(self), self.variable


def source(field: str, value: object) -> str:
    """Return how an error names ``field``: with the variable, if that is where ``value`` is from."""
    return f"{field} (environment variable {value.variable})" if isinstance(value, FromVariable) else field


def wrong_value(field: str, value: object, allowed: Iterable[object]) -> ValueError:
    """Return the error for a value outside ``allowed``."""
    return ValueError(f"{source(field, value)} must be one of {', '.join(map(str, allowed))}; got {value!r}.")


def wrong_type(field: str, value: object, allowed: str) -> TypeError:
    """Return the error for a value that is not even of an allowed type."""
    return TypeError(f"{source(field, value)} must be {allowed}; got {value!r} of type {type(value).__name__}.")


def as_bool(field: str, value: object) -> bool:
    """Return the boolean that ``value`` is or spells.

    Raises:
        ValueError: If a string spells none.
        TypeError: If it is neither boolean nor string.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise wrong_type(field, value, "a bool")
    if value.lower() not in TRUTH_VALUES:
        raise wrong_value(field, value, TRUTH_VALUES)
    return TRUTH_VALUES[value.lower()]


def as_int(field: str, value: object) -> int:
    """Return the integer that ``value`` is or spells.

    Raises:
        ValueError: If a string spells none.
        TypeError: If it is neither integer nor string.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong_type(field, value, "an int")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{source(field, value)} must be an integer; got {value!r}.") from None


def as_member(field: str, value: object, members: type[EnumT], allowed: Iterable[str] | None = None) -> EnumT:
    """Return the member of an enumeration of torch that ``value`` is, names (in any case) or numbers.

    Args:
        field: What errors call it.
        value: The member, its name or its number.
        members: The enumeration.
        allowed: The spellings that errors list; the members' names by default.

    Raises:
        ValueError: If no member has that name or number.
        TypeError: If it is none of the three.
    """
    if isinstance(value, members):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong_type(field, value, f"a str, an int or a {members.__name__}")
    # torch spells HYBRID_SHARD_ZERO2 with a leading underscore, Accelerate without.
    spellings = {member.name.lstrip("_"): member for member in members}
    names = list(spellings)
    spellings |= {str(member.value): member for member in members}
    member = spellings.get(str(value).upper().lstrip("_"))
    if member is None:
        raise wrong_value(field, value, names if allowed is None else allowed)
    return member


def as_names(field: str, value: object) -> list[str]:
    """Return the class names in a comma-separated string or in an iterable of strings, as a new list.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    names: list[Any] = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(name, str) for name in names) or not isinstance(value, Iterable):
        raise wrong_type(field, value, "a list of class names")
    return names


def warn_once(field: str, message: str) -> None:
    """Warn who made the plugin, unless this process has been warned about ``field`` before."""
    if field in _warned:
        return
    _warned.add(field)
    depth, frame = 1, sys._getframe()
    while frame.f_back and _is_ours(frame.f_code.co_filename):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)


def _is_ours(file: str) -> bool:
    """Whether code lies here; a dataclass's ``__init__`` lies in the file "<string>"."""
    return file == "<string>" or any(folder in Path(file).parents for folder in _OURS)


# ------------------------------------------------------------------------------------------------
# Finding the classes of layers that users name, as in ``transformer_cls_names_to_wrap`` or for experts.


def classes_by_name(modules: Iterable[nn.Module]) -> dict[str, list[type[nn.Module]]]:
    """Return the classes of these modules by name, in the order of the modules.

    Two classes of different files may have one name, such as ``Experts``: a user who gives the name means both.
    """
    found: dict[str, list[type[nn.Module]]] = {}
    for cls in dict.fromkeys(type(module) for module in modules):
        found.setdefault(cls.__name__, []).append(cls)
    return found


# ------------------------------------------------------------------------------------------------
# Public names of a package that import their module on first use (PEP 562).


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``.

    Args:
        package: Its ``__name__``.
        homes: For each public name the module that has it, relative to the package (``".config.plugin"``).
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return get, lambda: sorted(sys.modules[package].__all__)


# ------------------------------------------------------------------------------------------------
# Packages of extras: a check for an installed, working version that does not import it.


def require_installed(who: str, name: str, package: str, oldest: str) -> None:
    """Check that a package is installed, and not too old.

    Args:
        who: Needs it.
        name: What people call it.
        package: To be imported, installed, and of accelight's extra.
        oldest: Version that works.

    Raises:
        ModuleNotFoundError: If not.
    """
    found = importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    if found is None or Version(found) < Version(oldest):
        raise ModuleNotFoundError(
            f"{who} needs {name} {oldest} or newer, but {found or 'none'} is installed: "
            f"pip install 'accelight[{package}]'."
        )
