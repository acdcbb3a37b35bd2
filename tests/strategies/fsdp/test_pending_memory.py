"""Copies behind the next backward take no more memory than those that are waited for."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint import staging
from tests.ranks import forget_processes, run_on_ranks
from tests.strategies.fsdp.steps import AtStep
from tests.strategies.oracle import quiet_trainer
from tests.strategies.planning.measured import build_allocator

WIDTH, DEPTH = 256, 6
NUM_STEPS = 12
SAVES = (2, 4, 6, 8, 10)
COPIED_BYTES = 3 * DEPTH * WIDTH * WIDTH // 2 * 4  # of each process: weights and both moments, float32


class _Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _peak(library: str, folder: str, from_bytes: int) -> tuple[int, list[int]]:
    """Return the most held from a save to the end of the next step, and how many copies each save left for later.

    The least of several counts: now and then, on a busy machine, gloo frees what it has reduced late.
    """
    counting = ctypes.CDLL(library)
    for name in ("held_bytes", "highest_bytes"):
        getattr(counting, name).restype = ctypes.c_int64
    gc.collect()
    counting.install()
    before = counting.held_bytes()
    num_copies: list[int] = []
    highest: list[int] = []

    def save(trainer: Trainer) -> None:
        counting.begin_again()
        trainer.save_checkpoint(f"{folder}/{from_bytes}-{trainer.global_step}")
        saves = trainer.strategy._checkpointer.saves  # type: ignore[attr-defined]
        num_copies.append(len(saves._current.copies._sources))

    def note(trainer: Trainer) -> None:
        highest.append(counting.highest_bytes() - before)

    strategy = AccelFSDPStrategy(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        async_save=True,
    )
    actions: dict[int, Callable[[Trainer], None]] = {}
    for step in SAVES:
        actions |= {step: save, step + 1: note}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_FROM_BYTES", from_bytes)
        trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=[AtStep(actions)])
        trainer.fit(_Wide(), DataLoader(list(torch.randn(2 * NUM_STEPS * 2, WIDTH)), 2))  # type: ignore[arg-type]
    return min(highest), num_copies


@pytest.mark.exhaustive
def test_the_peak_is_that_of_copies_made_at_once(tmp_path: Path) -> None:
    library = str(build_allocator(tmp_path))
    try:  # biases are copied at once either way
        later = run_on_ranks(2, _peak, library, str(tmp_path), 2**16)
        at_once = run_on_ranks(2, _peak, library, str(tmp_path), 2**60)
    finally:
        forget_processes(2)  # theirs counts for good
    for (peak, num_copies), (expected, none) in zip(later, at_once, strict=True):
        assert (num_copies, none) == ([3 * DEPTH] * len(SAVES), [0] * len(SAVES))
        assert peak < expected + COPIED_BYTES / 3  # as much as weights or one moment: none of them is held twice
