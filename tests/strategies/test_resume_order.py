"""A resume goes in plain Lightning's order: callbacks and weights, then ``on_fit_start``, then optimizers."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from torch import Tensor, tensor
from torch.optim import SGD

from tests.ranks import run_on_ranks
from tests.strategies.oracle import build_model, quiet_trainer, rank_loader, strategy_named

ENGINES = ["fsdp1", "fsdp2", "zero2", "zero3"]


class Counting(LightningModule):
    """Counts its batches in a buffer, which is restored with the weights."""

    num_batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()
        self.register_buffer("num_batches", tensor(0))
        self.notes: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.num_batches += 1
        return (self.model(batch[0]) - batch[1]).square().mean()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.notes.append("the module looks at the checkpoint")

    def configure_optimizers(self) -> Any:
        self.notes.append(f"optimizers are made for weights of {int(self.num_batches)} batches")
        return SGD(self.parameters(), 0.1, momentum=0.9)

    def on_fit_start(self) -> None:
        known = any(optimizer.state for optimizer in self.trainer.optimizers)
        self.notes.append(f"on_fit_start with weights of {int(self.num_batches)} batches, momentum: {known}")

    def on_train_start(self) -> None:
        self.notes.append(f"on_train_start with momentum: {any(each.state for each in self.trainer.optimizers)}")


class Noting(Callback):
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.notes = pl_module.notes

    def state_dict(self) -> dict[str, Any]:
        return {"something": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.notes.append(f"the callback is restored: {state_dict}")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.notes.append("the callback looks at the checkpoint")

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.notes.append("the callback's on_fit_start")


def _resume(engine: str | None, folder: str) -> list[str]:
    strategy: Any = "auto" if engine is None else strategy_named(engine)
    num_processes = 1 if engine is None else 2
    trainer = quiet_trainer(strategy, num_processes, max_epochs=1, callbacks=[Noting()])
    trainer.fit(Counting(), rank_loader(num_processes))
    trainer.save_checkpoint(f"{folder}/saved")
    strategy = "auto" if engine is None else strategy_named(engine)
    module, trainer = Counting(), quiet_trainer(strategy, num_processes, max_epochs=2, callbacks=[Noting()])
    trainer.fit(module, rank_loader(num_processes), ckpt_path=f"{folder}/saved")
    return module.notes


@pytest.mark.core("fsdp1", "zero3")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_order_of_a_resume(engine: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    expected = run_on_ranks(1, _resume, None, str(tmp_path / "plain"))[0]
    if engine.startswith("zero"):  # the engine is made with the optimizer, and loads everything at once
        expected = [
            note.replace("weights of 7 batches, momentum: False", "weights of 7 batches, momentum: True")
            for note in expected
        ]
        expected = [note.replace("made for weights of 7", "made for weights of 0") for note in expected]
    for notes in run_on_ranks(2, _resume, engine, str(tmp_path)):
        assert notes == expected


class HasRun(Timer):
    """A `Timer` two hours ago."""

    @property
    def state_key(self) -> str:
        return "Timer"

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {"train": 7200.0}}


def _resume_late(engine: str | None, folder: str) -> int:
    num_processes = 1 if engine is None else 2
    steps = []
    for epochs, timer in ((1, HasRun(timedelta(days=1))), (3, Timer(timedelta(hours=1)))):
        strategy: Any = "auto" if engine is None else strategy_named(engine)
        trainer = quiet_trainer(strategy, num_processes, max_epochs=epochs, callbacks=[timer])
        path = None if epochs == 1 else f"{folder}/saved"
        trainer.fit(Counting(), rank_loader(num_processes), ckpt_path=path)
        steps.append(trainer.global_step)
        if epochs == 1:
            trainer.save_checkpoint(f"{folder}/saved")
    return steps[-1]


@pytest.mark.core("fsdp2", "zero2")
@pytest.mark.parametrize("engine", ENGINES)
def test_time_that_is_up_ends_a_resumed_run(engine: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    expected = run_on_ranks(1, _resume_late, None, str(tmp_path / "plain"))
    assert run_on_ranks(2, _resume_late, engine, str(tmp_path)) == expected * 2
