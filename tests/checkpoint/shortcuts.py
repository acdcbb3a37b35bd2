"""Counts how often descriptions were read by what takes items that are alike at once."""

from __future__ import annotations

from typing import Any

import pytest

from accelight.checkpoint.formats.dcp_metadata import StorageItems
from accelight.checkpoint.formats.safe_unpickler import Machine, Repeats


def count_shortcuts(monkeypatch: pytest.MonkeyPatch) -> dict[type, int]:
    """Return how many items each kind of shortcut takes from now on."""
    taken: dict[type, int] = {}
    for kind in (Repeats, StorageItems):
        _count(kind, taken, monkeypatch)
    return taken


def _count(kind: Any, taken: dict[type, int], monkeypatch: pytest.MonkeyPatch) -> None:
    take, taken[kind] = kind.take, 0

    def counted(self: Any, machine: Machine, position: int) -> int | None:
        end: int | None = take(self, machine, position)
        taken[kind] += end is not None
        return end

    monkeypatch.setattr(kind, "take", counted)
