"""Refuses, by name, to gather or reduce another unit than the other ranks do at that moment.

Units are gathered and reduced by all ranks together, in the order in which the model uses them. A rank that goes
another way would mix its values with those of other units, or end the process.

What all ranks have done once, from the beginning of a step on, is a known path: as long as a rank follows one nothing
is compared. Where paths part, and where nothing is known yet, the ranks compare what each is about to do. A rank that
leaves the only known path waits for the others to say the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

from ...common.agreed_outcome import num_ranks
from ...common.compared_actions import ComparedActions

WAY_OUT = (
    "FSDP gathers and reduces a unit on all processes together. Let each process call the same units (add 0 * "
    "unit(x).sum() to its loss), or set find_unused_parameters=True, which makes one unit of the whole model."
)
_END = 0


class SamePath:
    """Follows one rank through the units of a model.

    Args:
        names: Of the units, in the same order on every rank.
        timeout: How long ranks wait for each other where they compare.
    """

    def __init__(self, names: Sequence[str], timeout: timedelta) -> None:
        self._names, self._compared = names, ComparedActions(WAY_OUT, timeout)
        self._known: dict[Hashable, dict[int, Any]] = {}
        self.at: dict[int, Any] | None = None
        """Where this rank is; None while it follows nothing, as when it is the only one."""
        self._around: list[dict[int, Any] | None] = []
        self._alone = num_ranks() == 1

    def begin(self, kind: Hashable) -> None:
        """Begin a step, or a call within one; ``kind`` is alike on every rank, and tells what has paths of its own."""
        self._around.append(self.at)
        self.at = None if self._alone else self._known.setdefault(kind, {})

    def gather(self, unit: int) -> None:
        """Say that this rank is about to gather a unit.

        Raises:
            RuntimeError: If the others are not.
        """
        self._take(2 * unit + 1)

    def reduce(self, unit: int) -> None:
        """Say that this rank is about to reduce a unit's gradients.

        Raises:
            RuntimeError: If the others are not.
        """
        self._take(2 * unit + 2)

    def end(self) -> None:
        """End what `begin` began last.

        Raises:
            RuntimeError: If the others go on.
        """
        self._take(_END)
        self.at = self._around.pop() if self._around else None

    def forget(self) -> None:
        """Follow nothing any more, until the next `begin`."""
        self.at, self._around = None, []

    def _take(self, step: int) -> None:
        at = self.at
        if at is None:
            return
        if step not in at or len(at) > 1:
            self._compared.compare(self._describe(step))
        self.at = at.setdefault(step, {})

    def _describe(self, step: int) -> str:
        if step == _END:
            return "is through with its step"
        unit, reduces = divmod(step - 1, 2)
        return f"{'reduces' if reduces else 'gathers'} {self._names[unit] or 'the unit of the root'!r}"
