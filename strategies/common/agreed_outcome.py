"""Agreeing on an outcome: what one process finds wrong is raised on all of them, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def num_ranks() -> int:
    """Return the number of processes; one without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def raise_together(
    what: str, problems: Sequence[str], cause: BaseException | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank if any rank has a problem; every rank must call it, on a group of all (default: the default).

    Raises:
        RuntimeError: With ``what`` failed and each problem, with the ranks that have it.
    """
    everyone: list[list[str] | None] = [list(problems)]
    if num_ranks() > 1:
        everyone = [None] * num_ranks()
        dist.all_gather_object(everyone, list(problems), group=group)
    if lines := told_by_rank([found or () for found in everyone]):
        raise RuntimeError("\n".join([f"{what} failed.", *lines])) from cause


def told_by_rank(problems: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each problem, with the ranks that have it.

    Args:
        problems: Of each rank.
    """
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, found in enumerate(problems):
        for problem in found:
            ranks_by_problem.setdefault(problem, []).append(rank)
    return [f"{_ranks(ranks, len(problems))}: {problem}" for problem, ranks in ranks_by_problem.items()]


@contextmanager
def failing_together(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a body that does not communicate, on every rank; an exception of one is raised on all.

    Raises:
        RuntimeError: As `raise_together`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 (raised again below, once the others know)
        error = caught
    raise_together(what, [] if error is None else [f"{type(error).__name__}: {error}"], error, group)


def run_on_rank_zero(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 while the others wait; its result, or its failure, is everyone's.

    ``group`` holds all ranks; the default group by default.

    Raises:
        RuntimeError: If it failed, naming ``what`` and the error.
    """
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[1] = action()
        except Exception as caught:  # noqa: BLE001 (raised again below, after the others have been told)
            error = caught
            outcome[0] = f"{type(caught).__name__}: {caught}"
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[0] is not None:
        raise RuntimeError(f"{what} failed on rank 0: {outcome[0]}") from error
    result: T = outcome[1]
    return result


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size > 1:
        return "every process"
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
