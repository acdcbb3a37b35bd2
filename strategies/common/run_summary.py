"""What a run tells of itself at its start: one block of three lines, on rank 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ... import __version__
from ..upstream.lightning import Trainer, rank_zero_info


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a strategy made of a module for a fit."""

    strategy: str
    """Name of the strategy's class."""
    engine: str
    """What shards, such as ``"FSDP2"``."""
    device: torch.device
    """Of this process."""
    world_size: int
    """How many processes there are."""
    details: Sequence[str] = ()
    """How it shards, in short words."""
    parts: Sequence[str] = ()
    """What is sharded, and how much of it is on rank 0."""
    precision: str
    """The Trainer's, and what it means here."""
    checkpoints: str
    """Form of saved checkpoints."""

    def tell(self, trainer: Trainer) -> None:
        """Log it on rank 0, as Lightning logs what it says of a run.

        Args:
            trainer: About to fit.
        """
        rank_zero_info("\n  ".join(self.lines(trainer)))

    def lines(self, trainer: Trainer) -> list[str]:
        """Return the block.

        Args:
            trainer: About to fit.
        """
        processes = f"{self.world_size} {'process' if self.world_size == 1 else 'processes'} ({self.device.type})"
        kind = f"accelight {__version__}, {self.strategy}: {self.engine} on {processes}"
        run = [f"precision {self.precision}", _accumulation(trainer), f"checkpoints {self.checkpoints}"]
        return [", ".join([kind, *self.details]), "; ".join(self.parts), "; ".join(run)]


def counted(classes: Iterable[type]) -> str:
    """Return how many there are of each class: ``"12 Block, 1 GPT"``."""
    return ", ".join(f"{number:,} {one.__name__}" for one, number in Counter(classes).items())


def short_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _accumulation(trainer: Trainer) -> str:
    if not trainer.lightning_module.automatic_optimization:
        return "manual optimization"
    number = trainer.accumulate_grad_batches
    return f"{number} micro-batch{'' if number == 1 else 'es'} a step"
