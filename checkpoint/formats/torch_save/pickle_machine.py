"""The machine that reads a pickle: its stack and memo, and checks of everything that the pickle does to objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Protocol

from ...errors import CheckpointError, brief
from .allowed_names import Allowed, Sealed
from .fetched_again import fetched_again

_BLOCK = 2**18
_SLACK = 2**14
_MAX_LINE = 2**16
_MAX_ODD_KEYS = 10_000


class Filled(metaclass=Sealed):
    """What stands for a large dict: it takes the items as they come in, and need not keep them."""

    __slots__ = ()

    def fill(self, keys: list[Any], values: list[Any]) -> None:
        """Take items."""
        raise NotImplementedError


class Shortcut(Protocol):
    """Takes an object of one class at once where its bytes are as they are known to be."""

    def take(self, machine: Machine, position: int) -> int | None:
        """Put the object whose class was just fetched on the stack, and return where it ends; None to go on plainly."""

    def made(self, machine: Machine, position: int) -> None:
        """See an object that ends here, and was made plainly."""


class Machine:
    """The state of reading one pickle.

    Args:
        stream: The pickle, from its beginning to its end. A window of it is in memory.
        allowed: See `load_restricted`.
        what: Names the pickle in errors.
        persistent: See `load_restricted`.
        dicts: What stands for the dicts in the state of the pickle's outermost object, by their keys there.
        shortcuts: By the class that stands for the objects'.
    """

    def __init__(
        self,
        stream: BinaryIO,
        allowed: Allowed,
        what: str,
        persistent: Callable[[object], object] | None = None,
        dicts: Mapping[str, Filled] | None = None,
        shortcuts: Mapping[type, Shortcut] | None = None,
    ):
        self.what = what
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.wanted, self.num_bytes = fetched_again(stream, what)
        """For each index of the memo whether the pickle may fetch it, and the pickle's size."""
        self.memo: dict[int, Any] = {}
        self.num_memo = 0
        self.dicts = dict(dicts or {})
        self.shortcuts = dict(shortcuts or {})
        self.data = b""
        """The window."""
        self.base = 0
        """Where in the pickle the window begins."""
        self.last_frame = 0
        """Where in the pickle the last frame began."""
        self._stream = stream
        self._allowed = allowed
        self._num_odd_keys = 0

    def move(self, position: int) -> int:
        """Move the window on to a position in it, and return up to where opcodes may be begun without moving it."""
        self.base += position
        self.data = self.data[position:]
        if not self._extend(_BLOCK) and not self.data:
            raise IndexError
        return len(self.data) if self._is_complete else max(len(self.data) - _SLACK, 1)

    def take(self, position: int, size: int) -> bytes:
        """Return bytes of the pickle, all of them."""
        stop = position + size
        if stop > len(self.data) and self.base + stop <= self.num_bytes:
            self._extend(stop - len(self.data))
        taken = self.data[position:stop]
        if len(taken) != size:
            raise IndexError
        return taken

    def line_end(self, position: int) -> int:
        """Return where the next line feed is."""
        newline = self.data.find(b"\n", position)
        if newline < 0:
            self._extend(_MAX_LINE)
            newline = self.data.find(b"\n", position)
            if newline < 0:
                raise IndexError
        return newline

    @property
    def _is_complete(self) -> bool:
        return self.base + len(self.data) >= self.num_bytes

    def _extend(self, size: int) -> int:
        """Read some more of the pickle into the window, and return how much it was."""
        added = self._stream.read(size) or b""
        self.data += added
        return len(added)

    def may_fetch(self, number: int, count: int) -> bool:
        """Whether the pickle may fetch one of so many entries of its memo, from a number on."""
        return self.wanted.find(1, number, number + count) >= 0

    def marked(self) -> list[Any]:
        """Take what was put on the stack since the last mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def set_state(self, target: Any, state: Any) -> None:
        """Give an object that the pickle made its state."""
        if hasattr(type(target), "__setstate__"):
            target.__setstate__(state)
        elif isinstance(target, type) or callable(target) or not hasattr(target, "__dict__") or type(state) is not dict:
            raise self.error(f"sets the state of {brief(target)}")
        else:
            vars(target).update(state)

    def set_items(self, target: Any, keys: list[Any], values: list[Any]) -> None:
        """Put items into a dict, or into an object that stands for one."""
        if len(keys) != len(values):
            raise self.error("has a key without a value")
        if isinstance(target, dict):
            for key in keys:
                if type(key) is not str:
                    self._check_key(key)
            target.update(zip(keys, values, strict=True))
        elif isinstance(target, Filled):
            target.fill(keys, values)
        elif isinstance(type(target), Sealed):
            for key, value in zip(keys, values, strict=True):
                target[key] = value
        else:
            raise self.error(f"sets items of {brief(target)}")

    def _check_key(self, key: object) -> None:
        """Refuse what takes long to hash, and more than a few keys whose hashes could all be made equal."""
        parts = vars(key).values() if hasattr(key, "__dict__") else (key,)  # a frozen dataclass hashes its fields
        if any(isinstance(one, tuple) and any(isinstance(inner, tuple) for inner in one) for one in parts):
            raise self.error("has a nested tuple as a key")
        if isinstance(key, tuple | float) or (isinstance(key, int) and abs(key) >= 2**31):
            self._num_odd_keys += 1
            if self._num_odd_keys > _MAX_ODD_KEYS:
                raise self.error(f"has more than {_MAX_ODD_KEYS} keys that are no names")

    def extend(self, target: Any, items: list[Any]) -> None:
        """Put items at the end of a list, or of an object that stands for one."""
        if type(target) is not list and not isinstance(type(target), Sealed):
            raise self.error(f"appends to {brief(target)}")
        target.extend(items)

    def find(self, module: object, name: object) -> object:
        """Return what a name stands for."""
        if type(module) is not str or type(name) is not str:
            raise self.error("asks for something without a name")
        try:
            return self._allowed[module, name]
        except KeyError:
            shown = f"{module}.{name}"[:200]
            raise CheckpointError(
                f"{self.what}: the pickle asks for {shown}, which is not on the list of what a checkpoint "
                f"may hold. Nothing of it was run."
            ) from None

    def error(self, reason: str) -> CheckpointError:
        """Return the error of a pickle that does what it may not."""
        return CheckpointError(f"{self.what}: the pickle {reason}, which it may not.")
