"""Objects of a pickle that are written as one before them was: taken as that one, without being read again.

Most tensors of a model share their dtype, shape and cut with others, and what describes them is the same bytes but for
the name: an object's bytes fetch earlier entries of the memo by their numbers, and number none themselves.
"""

from __future__ import annotations

from .pickle_machine import Machine

_MAX_BYTES = 16 * 2**20  # kept
_MAX_SIZES = 8


class Repeats:
    """A `Shortcut` for objects that nobody changes, so that one can stand for many."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[object, int]] = {}
        """What stands between the class and the next opcode, to the object and its number of entries in the memo."""
        self._sizes: list[int] = []
        self._num_bytes = 0
        self._begun = (0, 0, 0)

    def take(self, machine: Machine, position: int) -> int | None:
        """Put an object that is known by its bytes on the stack."""
        data, number = machine.data, machine.num_memo
        for size in self._sizes:
            found = self._known.get(data[position : position + size])
            if found is not None and not machine.may_fetch(number, found[1]):
                machine.stack.append(found[0])
                machine.num_memo = number + found[1]
                return position + size
        self._begun = (machine.base + position, number, len(machine.stack))
        return None

    def made(self, machine: Machine, position: int) -> None:
        """Remember an object, if its bytes say all of it."""
        start, number, depth = self._begun
        self._begun = (-1, 0, 0)
        count = machine.num_memo - number
        if (
            not machine.base <= start
            or machine.last_frame >= start
            or len(machine.stack) != depth + 1
            or machine.may_fetch(number, count)
        ):
            return
        content = machine.data[start - machine.base : position]
        size = len(content)
        if self._num_bytes + size > _MAX_BYTES:
            self._known.clear()
            self._sizes.clear()
            self._num_bytes = 0
        if size not in self._sizes:
            self._sizes = [size, *self._sizes][:_MAX_SIZES]
        self._known[content] = (machine.stack[-1], count)
        self._num_bytes += size
