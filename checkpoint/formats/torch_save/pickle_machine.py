"""The machine that reads a pickle: its stack and memo, and checks of everything that the pickle does to objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import CheckpointError, brief
from .allowed_names import Allowed, Sealed

_SMALL_MEMO = 256  # these indices are fetched by one byte, and always remembered
_BLOCK = 2**20
_MAX_ODD_KEYS = 10_000


class Machine:
    """The state of reading one pickle."""

    def __init__(self, data: bytes, allowed: Allowed, what: str, persistent: Callable[[object], object] | None):
        self.data = data
        self.what = what
        """Names the pickle in errors."""
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.wanted = _fetched_again(data)
        """Indices of the memo that the pickle may fetch."""
        self.memo: dict[int, Any] = {}
        self.num_memo = 0
        self._allowed = allowed
        self._num_odd_keys = 0

    def take(self, position: int, size: int) -> bytes:
        """Return bytes of the pickle, all of them."""
        taken = self.data[position : position + size]
        if len(taken) != size:
            raise IndexError
        return taken

    def line_end(self, position: int) -> int:
        """Return where the next line feed is."""
        newline = self.data.find(b"\n", position)
        if newline < 0:
            raise IndexError
        return newline

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


def _fetched_again(data: bytes) -> set[int]:
    """Return the memo's indices that a pickle may fetch: of every byte that could be LONG_BINGET, and some more."""
    found: set[bytes] = set()
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK + 4]  # the four bytes of the last one are in the next block
        parts = block.split(b"j")
        found.update([part[:4] for part in parts[1:]])
        short = [number for number, part in enumerate(parts) if len(part) < 4]  # an operand with that byte in it
        found.update([b"j".join(parts[number : number + 5])[:4] for number in short])
    return {int.from_bytes(one, "little") for one in found} | set(range(_SMALL_MEMO))
