"""`plan_memory`: the memory of training, before it is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..upstream.lightning import LightningModule
from .isolated import in_a_fork
from .memory_plan import MemoryPlan
from .running import Order, run_plan


def plan_memory(
    module: Callable[[], LightningModule],
    batch: Any,
    strategy: Any,
    *,
    world_size: int,
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
) -> MemoryPlan:
    """Find out how much memory training takes of each process, in one process and without that memory.

    The Trainer runs three optimizer steps with the strategy itself, as rank 0 of so many processes that nobody else is
    in. Tensors have storages of their real sizes, which nobody writes, so that they take no memory; no kernel runs. It
    happens in a fork of this process.

    Args:
        module: Makes the module: a class or a function without arguments. What it builds takes no memory.
        batch: What ``training_step`` gets of one process, the micro-batch; or a function of the module that makes it.
        strategy: An `AccelFSDPStrategy` or `AccelDeepSpeedStrategy` that no Trainer has had, or a function that
            makes one.
        world_size: Number of processes.
        precision: As for the Trainer.
        accumulate_grad_batches: As for the Trainer.
        gradient_clip_val: As for the Trainer.

    Returns:
        The peak, where in a step it is, and what it is made of.

    Raises:
        CannotPlanError: If the training cannot be planned: it depends on values that are computed from weights, has
            operations that do not say what they return, compiles, or optimizes manually with several optimizers.
        RuntimeError: If this process is in a process group.
        ValueError: If ``world_size`` or ``accumulate_grad_batches`` is less than 1.
    """
    for name, number in (("world_size", world_size), ("accumulate_grad_batches", accumulate_grad_batches)):
        if number < 1:
            raise ValueError(f"{name} must be >= 1, got {number}.")
    order = Order(
        module=module,
        batch=batch if callable(batch) else lambda _: batch,
        strategy=strategy if callable(strategy) else lambda: strategy,
        world_size=world_size,
        precision=precision,
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=gradient_clip_val,
    )
    plan, is_sorted = in_a_fork(partial(run_plan, order), "The plan")
    if not is_sorted:  # the most is held before the last step: sort what is held when it comes to that again
        plan, is_sorted = in_a_fork(partial(run_plan, order, plan.peak_bytes), "The plan")
    if not is_sorted:
        raise RuntimeError(f"What is held at the highest, {plan.peak_bytes} bytes, came out otherwise the second time.")
    said = {"precision": precision, "accumulate": accumulate_grad_batches}
    return replace(plan, settings=said)
