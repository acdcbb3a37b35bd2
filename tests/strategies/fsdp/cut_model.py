"""A small model that tensor parallelism cuts, how one process trains it, and what a step communicates."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader, DistributedSampler

BATCH, BATCHES = 8, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([Block(6), Block(6)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.embed(x) if block is self.blocks[0] else x)
        return self.head(x)


class Module(LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Net()
        for module in self.net.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        self.norms: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(nn.functional.mse_loss(self.net(batch[0]), batch[1]).item())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(sum(float(one.grad.norm()) ** 2 for one in self.parameters() if one.grad is not None))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = (
            torch.randn(BATCH * BATCHES, 5, generator=generator),
            torch.randn(BATCH * BATCHES, 4, generator=generator),
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def loader(num_replicas: int) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=BATCH // num_replicas)


def plain(epochs: int = 1, accumulate: int = 1, clip: float | None = None) -> dict[str, Any]:
    module = Module()
    trainer = train_plain(module, epochs, accumulate, clip)
    return {"weights": module.state_dict(), "norms": module.norms, "step": trainer.global_step}


def train_plain(module: Module, epochs: int = 1, accumulate: int = 1, clip: float | None = None) -> Trainer:
    """Train in this process, over batches in the order that the Trainer's sampler deals to several."""
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, accumulate_grad_batches=accumulate, gradient_clip_val=clip,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    order: Any = DistributedSampler(Rows(), num_replicas=1, rank=0)
    trainer.fit(module, DataLoader(Rows(), batch_size=BATCH, sampler=order))
    return trainer


class Counting(Callback):
    """Counts the collectives of the second batch."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._mode: Any = CommDebugMode()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._mode.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._mode.__exit__(None, None, None)
            self.counts = {f"{name}".split(".")[-1]: count for name, count in self._mode.get_comm_counts().items()}
