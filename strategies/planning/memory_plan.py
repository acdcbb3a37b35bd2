"""The result of a plan: the memory of one process, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_WHAT = {
    "parameters": "parameters (this process's shards, and unsharded ones)",
    "gathered": "gathered parameters, communication buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state, master weights",
    "activations": "activations (kept by forward for backward)",
    "temporary": "temporary (intermediate results)",
}

NOT_COUNTED = (
    "The plan counts tensors as a process on the CPU holds them. An accelerator also needs memory for its context, "
    "NCCL buffers and fragmentation, and its kernels may keep other values: leave 10 to 20 % free."
)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that training takes of the process that has the most: rank 0, whose shards are the largest.

    Source: torch 2.13 ``distributed._tools.mem_tracker``, for what is counted: the bytes of live storages.
    """

    peak_bytes: int
    """The most that is held while training, from the first step on."""
    phase: str
    """When: ``"forward"``, ``"backward"``, ``"optimizer step"`` or ``"between steps"``."""
    parts: Mapping[str, int]
    """What is held then, in bytes: ``parameters``, ``gathered``, ``gradients``, ``optimizer``, ``activations`` and
    ``temporary``. Their sum is `peak_bytes`."""
    init_peak_bytes: int
    """The most that is held while the model is built, sharded and given to its optimizer. Where it is built on the CPU
    and trained on an accelerator, this is host memory."""
    steady_state_bytes: int
    """The bytes held between steps."""
    num_parameters: int
    """Elements of all parameters of the whole model."""
    world_size: int
    """Number of processes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The planned settings, in words."""

    @property
    def highest_bytes(self) -> int:
        """The most that is held at any time, building included: what a CPU process needs."""
        return max(self.peak_bytes, self.init_peak_bytes)

    def fits(self, memory_bytes: int) -> bool:
        """Return whether training takes no more than ``memory_bytes``, with nothing left for what is not counted."""
        return self.peak_bytes <= memory_bytes

    def to_dict(self) -> dict[str, object]:
        """Return everything as JSON can have it."""
        return {**asdict(self), "parts": dict(self.parts), "settings": dict(self.settings), "not_counted": NOT_COUNTED}

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        width = max(map(len, _WHAT.values()))
        rows = [(_WHAT[part], num_bytes) for part, num_bytes in self.parts.items()]
        return "\n".join(
            [
                f"{self.num_parameters:,} parameters on {self.world_size} processes{': ' + said if said else ''}",
                "",
                f"{'peak of each process, in ' + self.phase:{width}}  {size(self.peak_bytes):>10}",
                *(f"  {what:{width - 2}}  {size(num_bytes):>10}" for what, num_bytes in rows),
                f"{'between steps':{width}}  {size(self.steady_state_bytes):>10}",
                f"{'while the model is built and sharded':{width}}  {size(self.init_peak_bytes):>10}",
                "",
                NOT_COUNTED,
            ]
        )


def size(num_bytes: int) -> str:
    """Return a size as people read it, in units of 1000 as the command takes them."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"
