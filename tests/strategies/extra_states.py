"""A module's extra state in tests."""

from __future__ import annotations

from typing import Any


class Holds:
    """For modules: what they have in ``held`` is saved beside their tensors."""

    held: Any = None

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state
