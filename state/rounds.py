"""Rounds in a store: what some processes tell in one is known to all once everybody has come to it.

[Note: one call] All rounds share one counter, so that coming to a round tells how many have come to the one before. A
process comes to a round only when everybody has come to the last but one: whoever is ahead is so by less than two
rounds. Rounds of even and of odd numbers are therefore counted apart: then a count is full exactly when all have come.
Messages are counted above both; as long as that number is the known one, nobody has to look for any.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .ordering import poll

if TYPE_CHECKING:
    from collections.abc import Callable

    from .upstream import Store

_COUNT_BITS = 20
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_ONE_MESSAGE = 1 << (2 * _COUNT_BITS)


class Rounds:
    """Rounds of the processes of one group, counted in its store.

    Args:
        store: Of the group; its keys are for these rounds alone.
        what: What comes to a round, for errors.
        num_processes: All of them come to every round.
        timeout_s: Tells how long to wait for one that does not come.
        rounds_in_key: After how many rounds the next counter begins; by default before one could overflow.
    """

    def __init__(
        self,
        store: Store,
        what: str,
        num_processes: int,
        timeout_s: Callable[[], float],
        rounds_in_key: int | None = None,
    ) -> None:
        self._store, self._what, self._num_processes, self._timeout_s = store, what, num_processes, timeout_s
        self._rounds_in_key = rounds_in_key or max(2, (1 << _COUNT_BITS) // num_processes // 2 * 2)
        self.number = 0
        """Of the last round that this process has come to, from 1."""
        self._seen = 0
        """The counter, as it was when it came there."""
        self._complete = 0
        """The last round of which it knows that all have come."""
        self._counted_to, self._num_counted = 0, 0
        """The last round whose messages were counted, and how many there were since the counter began."""

    def come(self, message: Any = None) -> None:
        """Come to the next round.

        Args:
            message: What to tell the others; None is nothing.

        Raises:
            TimeoutError: If somebody does not come to the last but one.
        """
        if self.number - 1 > self._complete:
            self._wait_for(self.number - 1)
        self.number += 1
        count = 1 << (self.number % 2 * _COUNT_BITS)
        if message is not None:
            place = self._store.add(self._messages(self.number), 1)
            self._store.set(f"{self._messages(self.number)}/{place}", json.dumps(message))
            count += _ONE_MESSAGE
        self._seen = self._store.add(self._key(self.number), count)

    def messages(self, number: int) -> list[Any]:
        """Return what was told in a round that this process has come to, once all have.

        Args:
            number: Of the last round, or of the one before.

        Raises:
            TimeoutError: If somebody does not come.
        """
        key = self._key(number)
        seen = self._seen if self._key(self.number) == key else self._store.add(key, 0)
        if not self._is_full(number, seen):
            seen = self._wait_for(number)
        self._complete = max(self._complete, number)
        if number > 2 and self._key(number - 1) != self._key(number - 2):
            self._store.delete_key(self._key(number - 2))  # who has come to this round has read that one
        if self._key(self._counted_to) != key:
            self._counted_to, self._num_counted = number - (number - 1) % self._rounds_in_key - 1, 0
        found = 0
        if seen // _ONE_MESSAGE != self._num_counted:  # in this round, in one that was not asked for, or in the next
            for each in range(self._counted_to + 1, number + 1):
                found = self._store.add(self._messages(each), 0)
                self._num_counted += found
            self._counted_to = number
        return [json.loads(self._store.get(f"{self._messages(number)}/{place}")) for place in range(1, found + 1)]

    def num_missing(self) -> int:
        """Return how many processes have yet to come to the last round."""
        return 0 if self.number == 0 else self._missing(self.number, self._store.add(self._key(self.number), 0))

    def _wait_for(self, number: int) -> int:
        key = self._key(number)

        def full() -> int | None:
            seen = self._store.add(key, 0)
            return seen if self._is_full(number, seen) else None

        timeout_s = self._timeout_s()
        seen = poll(full, timeout_s)
        if seen is None:
            come = self._num_processes - self._missing(number, self._store.add(key, 0))
            raise TimeoutError(
                f"{come} of {self._num_processes} processes have come to the previous {self._what} after "
                f"{timeout_s:g} s. Every process must check equally often."
            )
        self._complete = max(self._complete, number)
        return seen

    def _is_full(self, number: int, seen: int) -> bool:
        return self._missing(number, seen) == 0

    def _missing(self, number: int, seen: int) -> int:
        """Return how many have not come to a round, of those that nobody has come to the next but one of."""
        rounds = ((number - 1) % self._rounds_in_key) // 2 + 1  # of this parity, under this key, up to this one
        come = seen >> (number % 2 * _COUNT_BITS) & _COUNT_MASK
        return max(0, self._num_processes * rounds - come)

    def _key(self, number: int) -> str:
        return f"rounds/{(number - 1) // self._rounds_in_key}"

    @staticmethod
    def _messages(number: int) -> str:
        return f"round/{number}"
