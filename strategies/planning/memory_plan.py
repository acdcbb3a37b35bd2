"""The result of a plan: the memory of one process, in bytes, and the units of the model; as text and as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..common.launch import Unit
from .svg import FAINT, Drawing, check_svg_path

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
    """The bytes that are held then: ``parameters``, ``gathered``, ``gradients``, ``optimizer``, ``activations`` and
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
    units: Sequence[Unit] = ()
    """The units of the model, parents before children; none if parameters are not sharded (ZeRO 0 to 2)."""

    @property
    def highest_bytes(self) -> int:
        """The most that is held at any time, building included: what a CPU process needs."""
        return max(self.peak_bytes, self.init_peak_bytes)

    def fits(self, memory_bytes: int) -> bool:
        """Return whether training takes no more than ``memory_bytes``, with nothing left for what is not counted."""
        return self.peak_bytes <= memory_bytes

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the units and of the peak, as ``accelight plan --plot`` does.

        Args:
            path: File to write, with a name that ends in ``.svg``.

        Raises:
            ValueError: If the name ends otherwise, or the file cannot be written.
        """
        check_svg_path(path).write_text(draw([("", self)]), encoding="utf-8")

    def to_dict(self) -> dict[str, object]:
        """Return everything as JSON can have it."""
        return {**asdict(self), "parts": dict(self.parts), "settings": dict(self.settings), "not_counted": NOT_COUNTED}

    def __str__(self) -> str:
        width = max(map(len, _WHAT.values()))
        rows = [(_WHAT[part], num_bytes) for part, num_bytes in self.parts.items()]
        return "\n".join(
            [
                _headline(self),
                "",
                f"{'peak of each process, in ' + self.phase:{width}}  {size(self.peak_bytes):>10}",
                *(f"  {what:{width - 2}}  {size(num_bytes):>10}" for what, num_bytes in rows),
                f"{'between steps':{width}}  {size(self.steady_state_bytes):>10}",
                f"{'while the model is built and sharded':{width}}  {size(self.init_peak_bytes):>10}",
                "",
                *_unit_table(self),
                "",
                NOT_COUNTED,
            ]
        )


def _headline(plan: MemoryPlan) -> str:
    said = ", ".join(f"{name}={value}" for name, value in plan.settings.items())
    return f"{plan.num_parameters:,} parameters on {plan.world_size} processes{': ' + said if said else ''}"


def size(num_bytes: int) -> str:
    """Return a size as people read it, in units of 1000 as the command takes them."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"


# ------------------------------------------------------------------------------------------------
# The units: equal ones in one line.


@dataclass(frozen=True)
class _Row:
    """Units that are alike."""

    kind: str
    """Their number and class."""
    names: str
    """The name of the first and of the last."""
    unit: Unit
    """One of them."""


def _rows(plan: MemoryPlan) -> list[_Row]:
    alike: dict[tuple[object, ...], list[Unit]] = {}
    for unit in plan.units:
        alike.setdefault((unit.class_name, unit.numel, unit.shard_bytes, unit.gathered_bytes), []).append(unit)
    return [
        _Row(
            found[0].class_name if len(found) == 1 else f"{len(found):,} x {found[0].class_name}",
            " to ".join(dict.fromkeys(one.name or "the root" for one in (found[0], found[-1]))),
            found[0],
        )
        for found in alike.values()
    ]


def _outside(plan: MemoryPlan) -> str:
    """Return a line about parameters that are in no unit; empty without such."""
    outside = plan.num_parameters - sum(unit.numel for unit in plan.units)
    return f"{outside:,} parameters are in no unit: each process holds them whole" if outside else ""


def _unit_table(plan: MemoryPlan) -> list[str]:
    """Return the units as text."""
    rows = [(f"{row.kind} ({row.names})", row.unit) for row in _rows(plan)]
    if not rows:
        return [_outside(plan)]
    width = max(*(len(name) for name, _ in rows), len("units, each"))
    lines = [f"{'units, each':{width}}  {'parameters':>14}  {'shard':>10}  {'gathered':>10}"]
    for name, unit in rows:
        numbers = f"{unit.numel:>14,}  {size(unit.shard_bytes):>10}  {size(unit.gathered_bytes):>10}"
        lines.append(f"{name:{width}}  {numbers}")
    return [*lines, *filter(None, [_outside(plan)])]


# ------------------------------------------------------------------------------------------------
# The picture: the units, and the memory at the peak of each plan by part.


_COLORS = {  # that readers with colour blindness distinguish, too (Okabe and Ito)
    "parameters": "#0072b2",
    "gathered": "#56b4e9",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#cc79a7",
    "temporary": "#b0b7bf",
}
_LIMIT_COLOR = "#c62828"
_WIDTH, _LEFT, _RIGHT = 880, 16, 864
_BARS_END = 780
"""The end of the longest bar; its number stands behind it."""


def draw(plans: Sequence[tuple[str, MemoryPlan | str]], memory_bytes: int | None = None) -> str:
    """Return a picture as SVG text.

    Args:
        plans: The requested plan, whose units are drawn, and others to compare it with: what is different, and the
            plan, or why there is none.
        memory_bytes: The memory of each process, drawn as a line.
    """
    [requested, *_] = [plan for _, plan in plans if isinstance(plan, MemoryPlan)]
    title = f"Memory of each process: {size(requested.peak_bytes)} at the peak, in {requested.phase}"
    drawing = Drawing(title, _WIDTH)
    drawing.text(_LEFT, 28, title, bold=True)
    drawing.text(_LEFT, 48, _headline(requested), color=FAINT, most=130)
    bottom = _draw_units(drawing, requested, 80)
    bottom = _draw_peaks(drawing, plans, memory_bytes, bottom + 34)
    return drawing.svg(bottom + 12)


def _draw_units(drawing: Drawing, plan: MemoryPlan, y: float) -> float:
    """Draw a line for units that are alike, and return where the next begins."""
    rows = _rows(plan)
    title = "Units, each gathered as a whole" if rows else "No units: no parameters are gathered"
    drawing.text(_LEFT, y, title, bold=True)
    largest = max((row.unit.gathered_bytes for row in rows), default=0) or 1
    for x, words in ((510, "parameters"), (600, "shard"), (690, "gathered")) if rows else ():
        drawing.text(x, y, words, end=True, color=FAINT)
    for row in rows:
        y += 22
        unit = row.unit
        drawing.text(_LEFT, y, row.kind, most=26)
        drawing.text(200, y, row.names, color=FAINT, most=32)
        numbers = (f"{unit.numel:,}", size(unit.shard_bytes), size(unit.gathered_bytes))
        for x, number in zip((510, 600, 690), numbers, strict=True):
            drawing.text(x, y, number, end=True)
        for part, num_bytes in (("gathered", unit.gathered_bytes), ("parameters", unit.shard_bytes)):
            words = "gathered" if part == "gathered" else "shard of a process"
            hint = f"{row.kind}, {words}: {num_bytes:,} bytes"
            drawing.box(705, y - 11, (_RIGHT - 705) * min(num_bytes / largest, 1), 13, _COLORS[part], hint)
    if outside := _outside(plan):
        y += 22
        drawing.text(_LEFT, y, outside, color=FAINT)
    return y


def _draw_peaks(
    drawing: Drawing, plans: Sequence[tuple[str, MemoryPlan | str]], memory_bytes: int | None, y: float
) -> float:
    """Draw a bar for each plan and what its colours mean, and return where the next begins."""
    drawing.text(_LEFT, y, "Memory at the peak", bold=True)
    most = max(plan.peak_bytes for _, plan in plans if isinstance(plan, MemoryPlan))
    scale = (_BARS_END - _LEFT) / (max(most, memory_bytes or 0) or 1)
    top = y = y + 8
    for change, plan in plans:
        if change or len(plans) > 1:
            y += 18
            drawing.text(_LEFT, y, change or "as requested", most=120)
        if isinstance(plan, str):
            y += 18
            drawing.text(_LEFT, y, f"cannot be planned: {plan}", color=FAINT, most=120)
            continue
        y += 6
        x: float = _LEFT
        for part, num_bytes in plan.parts.items():
            hint = f"{change or 'as requested'}, {part}: {num_bytes:,} bytes"
            drawing.box(x, y, num_bytes * scale, 22, _COLORS[part], hint)
            x += num_bytes * scale
        drawing.text(_RIGHT, y + 15, size(plan.peak_bytes), end=True)
        y += 26
    if memory_bytes is not None:
        drawing.line(_LEFT + memory_bytes * scale, top, y + 4, _LIMIT_COLOR)
        y += 18
        drawing.text(
            max(_LEFT + memory_bytes * scale, 140), y, f"{size(memory_bytes)} available", end=True, color=_LIMIT_COLOR
        )
    requested = next(plan for _, plan in plans if isinstance(plan, MemoryPlan))
    if len(plans) > 1:
        y += 22
        drawing.text(510, y, "as requested", end=True, color=FAINT)
    for part, num_bytes in requested.parts.items():
        y += 20
        drawing.box(_LEFT, y - 10, 12, 12, _COLORS[part], part)
        drawing.text(_LEFT + 20, y, _WHAT[part])
        drawing.text(510, y, size(num_bytes), end=True)
    return y
