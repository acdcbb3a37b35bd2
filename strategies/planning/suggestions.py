"""Which settings fit into the memory that there is: the asked ones, and those that are tried beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .hollow import CannotPlanError
from .memory_plan import MemoryPlan, size
from .wishes import Wishes


@dataclass(frozen=True)
class Variant:
    """Settings, and what they take."""

    change: str
    """What differs from what was asked for; empty for that itself."""
    wishes: Wishes
    plan: MemoryPlan | None
    refused: str = ""
    """Why there is no plan."""

    def fits(self, memory_bytes: int) -> bool:
        """Return whether there is a plan, and it fits."""
        return self.plan is not None and self.plan.fits(memory_bytes)


def try_variants(wishes: Wishes, memory_bytes: int, plan: Callable[[Wishes], MemoryPlan]) -> list[Variant]:
    """Plan what is asked for, and what could be set otherwise while it does not fit, the least intrusive first.

    Args:
        wishes: What is asked for.
        memory_bytes: What each process has.
        plan: Makes a plan.

    Returns:
        All that were planned; where what is asked for fits, that alone.

    Raises:
        CannotPlanError: If what is asked for cannot be planned.
    """
    found = [Variant("", wishes, plan(wishes))]
    if found[0].fits(memory_bytes):
        return found
    for change, changed in _changes(wishes):
        try:
            found.append(Variant(change, changed, plan(changed)))
        except (CannotPlanError, ValueError) as error:
            found.append(Variant(change, changed, None, str(error)))
    return found


def _changes(wishes: Wishes) -> Iterator[tuple[str, Wishes]]:
    """Yield what could be otherwise: what changes neither results nor the number of processes comes first."""
    sharded = None
    if (other := wishes.fully_sharded()) is not None:
        sharded = other
        yield f"{other.sharding_words}", other
    base = sharded or wishes
    recomputed = base.recomputed()
    if recomputed is not None:
        yield _joined(sharded and base.sharding_words, "activation checkpointing"), recomputed
    for factor in (2, 4):
        smaller = (recomputed or base).in_micro_batches(factor)
        if smaller is not None:
            words = _joined(
                sharded and base.sharding_words,
                recomputed and "activation checkpointing",
                f"{factor} times smaller micro-batches, {factor} times as many",
            )
            yield words, smaller
    for factor in (2, 4):
        more = replace(recomputed or base, world_size=wishes.world_size * factor)
        words = _joined(
            sharded and base.sharding_words, recomputed and "activation checkpointing", f"{more.world_size} processes"
        )
        yield words, more


def _joined(*words: object) -> str:
    return " and ".join(str(word) for word in words if word)


def table(variants: list[Variant], memory_bytes: int) -> str:
    """Return what was tried, a line each."""
    names = [variant.change or "as asked for" for variant in variants]
    width = max(map(len, names))
    lines = [f"{'':{width}}  {'peak':>10}  fits {size(memory_bytes)}"]
    for name, variant in zip(names, variants, strict=True):
        if variant.plan is None:
            lines.append(f"{name:{width}}  {'-':>10}  cannot be planned: {variant.refused}")
        else:
            fits = "yes" if variant.fits(memory_bytes) else "no"
            lines.append(f"{name:{width}}  {size(variant.plan.peak_bytes):>10}  {fits}")
    return "\n".join(lines)


def advice(variants: list[Variant], memory_bytes: int) -> str:
    """Return one sentence: what fits with the least change."""
    there = size(memory_bytes)
    for variant in variants:
        if variant.fits(memory_bytes):
            peak = "" if variant.plan is None else f" ({size(variant.plan.peak_bytes)})"
            return f"Fits {there} with {variant.change}{peak}." if variant.change else f"Fits {there} as it is{peak}."
    planned = [variant.plan.peak_bytes for variant in variants if variant.plan is not None]
    return (
        f"Nothing that was tried fits {there}: the least is {size(min(planned))}. Use more processes, a shorter "
        "sequence, or a smaller model."
    )
