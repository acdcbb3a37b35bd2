"""What the agents of an elastic job run: a training that kills some of its own processes, and tells what it used."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from accelight.callbacks import ElasticTraining
from tests.callbacks.elastic import (
    GLOBAL_BATCH_SIZE,
    MAX_BATCH_SIZE,
    NUM_EPOCHS,
    Module,
    loader,
    optimizer_for,
    strategy,
    whole_weights,
)
from tests.strategies.oracle import quiet_trainer


class Events(Callback):
    """Does at a step of a run what the test wants, and writes down each step's samples before it is taken.

    Args:
        folder: Where to write.
        plan: Run (from 1) to ``[kind, step]``: ``worker`` kills the last process by SIGKILL, ``agent`` its agent
            before it, and ``joined`` waits until another agent has come, which ends the run by SIGTERM.
    """

    def __init__(self, folder: Path, plan: dict[str, list[Any]]) -> None:
        self.folder, self.plan = folder, plan
        self.run = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.run = 1 + len(list(self.folder.glob("run*")))
            (self.folder / f"run{self.run}").write_text(json.dumps([trainer.world_size, trainer.global_step]))
        self.run = trainer.strategy.broadcast(self.run)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        used = self.folder / f"used-{self.run}-{trainer.global_rank}"
        used.write_text(json.dumps(pl_module.used))
        kind, step = self.plan.get(f"{self.run}", ["nothing", -1])
        if trainer.global_step != step or trainer.global_rank != trainer.world_size - 1:
            return
        if kind == "agent":
            os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)  # of which its workers are no part
        if kind in ("worker", "agent"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "joined":
            (self.folder / "alone").touch()
            deadline = time.monotonic() + 100
            while not trainer.strategy._termination._is_noted:  # type: ignore[attr-defined]
                assert time.monotonic() < deadline, "nobody came"
                time.sleep(0.02)


def main(engine: str, folder: Path, plan: dict[str, list[Any]]) -> None:
    torch.set_num_threads(1)
    saving = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1)
    elastic = ElasticTraining(GLOBAL_BATCH_SIZE, MAX_BATCH_SIZE, resume_from=folder / "checkpoints")
    callbacks = [elastic, saving, Events(folder, plan)]
    settings: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": NUM_EPOCHS}
    trainer = quiet_trainer(strategy(engine), 1, **settings)
    module = Module(optimizer_for(engine))
    trainer.fit(module, loader())
    weights = whole_weights(trainer)
    if trainer.is_global_zero:
        torch.save([weights, trainer.global_step, trainer.current_epoch], folder / "weights.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
