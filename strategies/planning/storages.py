"""The memory of tensors while a plan runs: what is held, of which kind, and when it is the most."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

Part = Literal["parameters", "gathered", "gradients", "optimizer", "activations", "temporary"]
PARTS: tuple[Part, ...] = ("parameters", "gathered", "gradients", "optimizer", "activations", "temporary")
"""What memory is for; see `MemoryPlan`."""

Phase = Literal["building", "forward", "backward", "optimizer step", "between steps"]
_BY_PHASE: dict[Phase, Part] = {
    "building": "gathered",  # parameters are told apart by who has them; what is left are buffers
    "forward": "activations",
    "backward": "temporary",
    "optimizer step": "temporary",
    "between steps": "temporary",
}


@dataclass
class _Held:
    """One storage."""

    reference: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    part: Part
    is_hollow: bool


@dataclass
class Peak:
    """The most that was held at one time since the last look."""

    num_bytes: int = 0
    phase: Phase = "building"
    parts: Counter[Part] = field(default_factory=Counter)


class Storages:
    """Follows every storage from the first operation that returns it until it is freed.

    Args:
        classify: Called when so much is held as was told to `expect`; returns of which part some storages are, by their
            addresses in C++.
    """

    def __init__(self, classify: Callable[[], dict[int, Part]]) -> None:
        self._held: dict[int, _Held] = {}
        self._classify = classify
        self._expected: int | None = None
        self.num_bytes = 0
        self.phase: Phase = "building"
        self.peak = Peak()

    # ------------------------------------------------------------------ following
    def follow(self, tensor: torch.Tensor, *, is_hollow: bool) -> None:
        """Begin to follow a tensor's storage; one that is known stays what it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        reference = weakref.ref(storage, partial(self._forget, key))
        self._held[key] = _Held(reference, storage.nbytes(), _BY_PHASE[self.phase], is_hollow)
        self._add(storage.nbytes())

    def _forget(self, key: int, reference: Any) -> None:
        held = self._held.get(key)
        if held is not None and held.reference is reference:
            del self._held[key]
            self.num_bytes -= held.num_bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage's new size."""
        held = self._held.get(storage._cdata)
        if held is not None:
            before, held.num_bytes = held.num_bytes, storage.nbytes()
            if before == 0:
                held.part = _BY_PHASE[self.phase] if held.part == "temporary" else held.part
            self._add(held.num_bytes - before)

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.peak.num_bytes:
            self.peak.num_bytes, self.peak.phase = self.num_bytes, self.phase
        if self._expected is not None and self.num_bytes >= self._expected:
            self._expected = None
            self.peak.parts = self._by_part()

    # ------------------------------------------------------------------ what is in them
    def is_hollow(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory was never written."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        return held is not None and held.is_hollow

    def mark_hollow(self, tensor: torch.Tensor, is_hollow: bool = True) -> None:
        """Take note that a tensor's values are not what they would be, or that they are again."""
        self._held[tensor.untyped_storage()._cdata].is_hollow = is_hollow

    def is_communicated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note that tensors are sent or received: buffers, unless they are known as something else."""
        for tensor in tensors:
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None and held.part in ("activations", "temporary"):
                held.part = "gathered"

    # ------------------------------------------------------------------ peaks
    def look(self) -> Peak:
        """Return the highest since the last look, and begin again."""
        peak, self.peak = self.peak, Peak(self.num_bytes, self.phase)
        return peak

    def expect(self, num_bytes: int) -> None:
        """Sort what is held into parts as soon as it is so much."""
        self._expected = num_bytes

    def _by_part(self) -> Counter[Part]:
        told = self._classify()
        parts: Counter[Part] = Counter()
        for key, held in self._held.items():
            parts[told.get(key, held.part)] += held.num_bytes
        return parts
