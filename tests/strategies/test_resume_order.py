"""A resume goes in plain Lightning's order: callbacks and weights, then ``on_fit_start``, then optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, eye, full, stack, tensor
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

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


class _Stream(IterableDataset[Tensor]):
    """Five samples without a length: the Trainer fetches a batch ahead."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(eye(5))


class _Weighted(Counting):
    """Its loader reads the number of batches in the buffer, in this process or in a worker."""

    def collate(self, samples: list[Tensor]) -> list[Tensor]:
        return [stack(samples), full((len(samples), 3), float(self.num_batches))]

    def loader(self, kind: str) -> DataLoader[Tensor]:
        data: Any = eye(5) if kind == "workers" else _Stream()
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "workers" else {}
        return DataLoader(data, 2, collate_fn=self.collate, **workers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.notes.append(f"a batch that was made after {float(batch[1][0, 0]):.0f} batches")
        return super().training_step(batch, batch_idx)


def _notes_of_loader(strategy: str, kind: str, folder: str) -> list[str]:
    notes = []
    for steps, path in ((1, None), (2, f"{folder}/{strategy}")):
        made = DDPStrategy(process_group_backend="gloo") if strategy == "ddp" else strategy_named(strategy)
        module, trainer = _Weighted(), quiet_trainer(made, 2, max_steps=steps, use_distributed_sampler=False)
        trainer.fit(module, module.loader(kind), ckpt_path=path)
        if path is None:
            trainer.save_checkpoint(f"{folder}/{strategy}")
        notes += [note for note in module.notes if note.startswith("a batch")]
    return notes


@pytest.mark.core("zero2")
@pytest.mark.parametrize(
    ("engine", "kind"),
    [("zero2", "workers"), *((engine, "ahead") for engine in ENGINES)],
)
def test_loaders_of_a_resumed_fit_begin_after_it_is_restored(engine: str, kind: str, tmp_path: Path) -> None:
    expected = run_on_ranks(2, _notes_of_loader, "ddp", kind, str(tmp_path))
    assert expected[0][-1] == "a batch that was made after 1 batches"
    assert run_on_ranks(2, _notes_of_loader, engine, kind, str(tmp_path)) == expected
