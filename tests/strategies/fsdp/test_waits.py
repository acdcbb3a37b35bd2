"""No step reads a number out of a tensor that is on the device: the host would wait for all that it has begun there.

Seen on the CPU by the operations that do so; ``python -m benchmarks gpu`` counts waits on a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
SCALERS = {"grad_scaler.py", "sharded_grad_scaler.py"}


def _asker() -> str:
    """Return who asks: the file of a gradient scaler of torch's, else the innermost module of accelight's."""
    frame: Any = sys._getframe(2)
    ours = ""
    while frame is not None:
        file, module = Path(frame.f_code.co_filename).name, frame.f_globals.get("__name__", "")
        if file in SCALERS:
            return file
        ours = ours or (module if module.startswith("accelight.") else "")
        frame = frame.f_back
    return ours or "others"


class Waits(TorchDispatchMode):
    """Counts them by who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counts and func.__name__.split(".")[0] in WAITING:
            self.found[_asker()] += 1
        return func(*args, **(kwargs or {}))


class _During(Callback):
    """Counts in the steps between the second and the fourth."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.waits.counts = 2 <= trainer.global_step < 4


class _Silent(TinyModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self.model(batch[0]).float(), batch[1])


def _train(engine: str, precision: Any) -> dict[str, int]:
    waits = Waits()
    trainer = quiet_trainer(
        AccelFSDPStrategy(**ENGINES[engine]),
        dist.get_world_size(),
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision=precision,
        callbacks=[_During(waits)],
    )
    with waits:
        waits.counts = True
        torch.zeros(()).item()
        waits.counts = False
        trainer.fit(_Silent(Case(), Outcome()), rank_loader(dist.get_world_size()))
    return dict(waits.found)


@pytest.mark.core("bf16", "fsdp2-16")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_do_not_wait_for_the_device(engine: str, precision: str) -> None:
    for found in run_on_ranks(2, _train, engine, precision):
        assert found.pop("others") == 1  # the test's own, so that the count is known to count
        # A scaler's is what fp16 needs, whoever trains.
        assert set(found) <= (SCALERS if precision == "16-mixed" else set())
