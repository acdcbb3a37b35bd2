"""Saves on a disk that is full, inside one of several processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.small_disk import fill


class SavesOnAFullDisk(Callback):
    """Saves ``first``, fills the disk, fails to save ``second``, makes room and saves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.message = ""
        self.left: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.message:
            return
        self._save(trainer, "first")
        before = content(self.folder)
        dist.barrier()
        self._alone(lambda: fill(self.folder / "filler"))
        with pytest.raises(RuntimeError) as caught:
            self._save(trainer, "second")
        self.message = str(caught.value)
        dist.barrier()
        self.left = sorted(os.listdir(self.folder))
        dist.barrier()
        self._alone((self.folder / "filler").unlink)
        assert content(self.folder) == before
        dist.barrier()
        self._save(trainer, "second")

    def _save(self, trainer: Trainer, name: str) -> None:
        trainer.save_checkpoint(self.folder / name)
        getattr(trainer.strategy, "wait_for_saves", dist.barrier)()

    @staticmethod
    def _alone(action: Callable[[], object]) -> None:
        if dist.get_rank() == 0:
            action()
        dist.barrier()


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
