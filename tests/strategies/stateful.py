"""Training over loaders that know their place, for test_stateful_loaders.py and the scripts that it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import Dataset

from accelight.strategies import AccelDeepSpeedStrategy
from tests.strategies.oracle import quiet_trainer, strategy_named

NUM_SAMPLES = 24


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class OwnStream:
    """A stream that gives each process other numbers of samples at a time: no two are at the same place."""

    def __init__(self) -> None:
        self.next_sample, self.left = 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.left = self.left or 6
        while self.left:
            found = torch.tensor([[1000.0 * dist.get_rank() + self.next_sample]])
            self.next_sample += 1 + dist.get_rank()
            self.left -= 1
            yield found

    def state_dict(self) -> dict[str, Any]:
        return {"next_sample": self.next_sample, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_sample, self.left = state["next_sample"], state["left"]


class Block(nn.Linear):
    """The unit of `strategy_named`."""


class Seeing(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Block(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.flatten().tolist()
        return self.layer(batch / 1000).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SaveAt(Callback):
    """Saves after a step, or in a hook that comes after it."""

    def __init__(self, path: str, step: int, hook: str) -> None:
        self.path, self.step = path, step
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class SetUpEarly(Seeing):
    """Has its loaders set up before the checkpoint is read."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def loader_named(kind: str) -> Any:
    if kind == "own":
        return OwnStream()
    if kind.startswith("workers"):  # torch's own, which knows no place
        workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
        return torch.utils.data.DataLoader(Numbers(), batch_size=2, shuffle=True, **workers)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), batch_size=2, shuffle=kind == "shuffled")


def strategy_for(name: str) -> Any:
    if name == "zero2":  # a stream has no batch size to fill it from
        return AccelDeepSpeedStrategy(zero_stage=2, hf_ds_config={"train_micro_batch_size_per_gpu": 2})
    return strategy_named(name)


class StopAt(Callback):
    """Ends training, and its epoch, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


def seen(
    strategy: str,
    kind: str,
    path: str,
    save_at: int | None,
    hook: str = "on_train_batch_end",
    stop_at: int | None = None,
) -> list[float]:
    torch.manual_seed(3 + dist.get_rank())
    module = SetUpEarly() if kind == "workers_early" else Seeing()
    callbacks: list[Callback] = [] if save_at is None else [SaveAt(path, save_at, hook)]
    callbacks += [] if stop_at is None else [StopAt(stop_at)]
    world_size = dist.get_world_size()
    trainer = quiet_trainer(strategy_for(strategy), world_size, max_epochs=3, callbacks=callbacks)
    trainer.fit(module, loader_named(kind), torch.utils.data.DataLoader(Numbers()), ckpt_path=None if save_at else path)
    return module.seen
