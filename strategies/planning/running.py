"""One plan: the Trainer runs some steps with the strategy itself, over tensors without contents."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..upstream.lightning import LightningModule, Trainer
from .batches import batch_size_of
from .hollow import CannotPlanError, HollowTensors
from .memory_plan import MemoryPlan
from .pretended import PretendedEnvironment, pretended_group
from .storages import PARTS, Part, Peak, Phase, Storages
from .tensors_by_part import parts_of

_MOST_MICRO_BATCHES = 3
"""Of a window: the first, the last and those between, which are alike."""
_STEPS = 3
"""The first makes the optimizer's state, the second is like all others, in the third what is held is sorted."""


@dataclass(frozen=True)
class Order:
    """What to plan."""

    module: Callable[[], LightningModule]
    batch: Callable[[LightningModule], Any]
    strategy: Callable[[], Any]
    world_size: int
    precision: Any = "32-true"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None


class _Steps:
    """Follows a strategy through its steps, and looks where the most is held.

    Args:
        strategy: Whose methods are followed.
        storages: What is held.
        num_sorted_after: Number of training steps after which what is held at the highest is sorted; None at once.
        expected: The highest, where it is known already.
    """

    def __init__(self, strategy: Any, storages: Storages, num_sorted_after: int, expected: int | None) -> None:
        self._strategy, self._storages = strategy, storages
        self._num_sorted_after, self._expected = num_sorted_after, expected
        self.building: Peak | None = None
        self.resting_bytes = 0
        self.peaks: list[Peak] = []
        self.num_steps = 0
        self.num_parameters = 0
        self._follow("setup", before=self._count, after="building")
        self._follow("training_step", before=self._begin_step, after="backward")
        self._follow("backward", before=None, after="optimizer step")
        self._follow("optimizer_step", before=None, after="between steps")

    def _follow(self, name: str, before: Callable[[], None] | None, after: Phase) -> None:
        method = getattr(self._strategy, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = method(*args, **kwargs)
            self._storages.phase = after
            return result

        setattr(self._strategy, name, run)

    def _count(self) -> None:
        """The module is complete, and not sharded yet, except by ZeRO-3."""
        parameters = self._strategy.lightning_module.parameters()
        self.num_parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)

    def _begin_step(self) -> None:
        _check_optimizers(self._strategy)
        self.resting_bytes = max(self._storages.num_bytes, self.resting_bytes) if self.peaks else 0
        peak = self._storages.look()
        if self.building is None:
            self.building = peak
            if self._expected is not None:
                self._storages.expect(self._expected)
        else:
            self.peaks.append(peak)
        if self._expected is None and self.num_steps == self._num_sorted_after:
            self._storages.expect(max(each.num_bytes for each in self.peaks))
        self.num_steps += 1
        self._storages.phase = "forward"

    def end(self) -> Peak:
        """Return the highest of all steps."""
        self.peaks.append(self._storages.look())
        return max(self.peaks, key=lambda peak: (peak.num_bytes, bool(peak.parts)))


def run_plan(order: Order, expected: int | None = None) -> tuple[MemoryPlan, bool]:
    """Make a plan in this process, which is not to be used for anything else afterwards.

    Args:
        order: What to plan.
        expected: The highest of all, where an earlier plan of the same order has found it.

    Returns:
        The plan, and whether what is held at its highest could be sorted into parts.

    Raises:
        CannotPlanError: If what is to be planned cannot be.
    """
    _be_quiet()
    strategy = order.strategy()
    _prepare(strategy)
    classify: list[Callable[[], dict[int, Part]]] = []
    storages = Storages(lambda: classify[0]() if classify else {})
    window = min(order.accumulate_grad_batches, _MOST_MICRO_BATCHES)
    with pretended_group(order.world_size), HollowTensors(storages).running():
        module = order.module()
        if not isinstance(module, LightningModule):
            raise CannotPlanError(f"A plan trains a LightningModule, and got {type(module).__name__}.")
        batch = order.batch(module)
        steps = _Steps(strategy, storages, window * (_STEPS - 1), expected)
        classify.append(lambda: parts_of(strategy.model, strategy.optimizers))
        trainer = Trainer(
            strategy=strategy,
            plugins=[PretendedEnvironment(order.world_size)],
            accelerator="cpu",
            devices=order.world_size,
            precision=order.precision,
            accumulate_grad_batches=window,
            gradient_clip_val=order.gradient_clip_val,
            max_steps=_STEPS,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer._data_connector.prepare_data = lambda: None  # type: ignore[method-assign] # it may download
        trainer.fit(module, _loader(batch, window * (_STEPS + 1)))
        highest = steps.end()
    if steps.building is None or steps.num_steps < window * _STEPS:
        raise CannotPlanError(
            f"Training ended after {steps.num_steps} micro-batches of {window * _STEPS}: something in the module or "
            "its callbacks ends it early, or training_step() returns None."
        )
    parts: dict[str, int] = {part: highest.parts.get(part, 0) for part in PARTS}
    plan = MemoryPlan(
        peak_bytes=highest.num_bytes,
        phase=highest.phase,
        parts=parts,
        building_bytes=steps.building.num_bytes,
        resting_bytes=steps.resting_bytes,
        num_parameters=steps.num_parameters,
        world_size=order.world_size,
    )
    return plan, sum(parts.values()) == highest.num_bytes


def _loader(batch: Any, num_batches: int) -> DataLoader[Any]:
    """Return a loader of one batch, again and again, that knows its size: ZeRO's config asks for it."""
    size = batch_size_of(batch)
    return DataLoader(range(size * num_batches), size, collate_fn=lambda _: batch)  # type: ignore[arg-type]


def _check_optimizers(strategy: Any) -> None:
    module = strategy.lightning_module
    if module is not None and not module.automatic_optimization and len(strategy.optimizers) > 1:
        raise CannotPlanError(
            f"{type(module).__name__} optimizes manually with {len(strategy.optimizers)} optimizers: which of them "
            "steps when, and so what is held, is up to its code. Plan a module with one of them at a time."
        )


def _prepare(strategy: Any) -> None:
    """Refuse what a plan would be wrong about; let DeepSpeed run without kernels of its own.

    Raises:
        CannotPlanError: If the strategy compiles, or is none of ours.
    """
    from ..deepspeed.strategy import AccelDeepSpeedStrategy
    from ..fsdp.strategy import AccelFSDPStrategy

    if isinstance(strategy, AccelDeepSpeedStrategy):
        from .deepspeed_kernels import without_compiled_kernels

        if "nvme" in str(strategy.deepspeed_config):
            raise CannotPlanError("What is offloaded to NVMe cannot be planned. Plan with offloading to the CPU.")
        without_compiled_kernels()
    elif not isinstance(strategy, AccelFSDPStrategy):
        raise CannotPlanError(
            f"Plans are for AccelFSDPStrategy and AccelDeepSpeedStrategy, not for {type(strategy).__name__}."
        )
    elif strategy._compile_options is not None:
        raise CannotPlanError(
            "compile decides by itself what is kept for backward, and a plan runs nothing compiled. Plan without it: "
            "as a rule it takes less."
        )


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
