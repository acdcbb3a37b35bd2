"""A module with buffers that each rank changes in its own way, and the same training under ddp."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.oracle import quiet_trainer

NUM_BATCHES = 5


class Buffered(LightningModule):
    """BatchNorm in eval mode after the first epoch, an integer, a bool and a buffer that a hook changes.

    Args:
        changes: Whether the hook and BatchNorm change anything.
        manual: Whether it optimizes by itself.
    """

    count: Tensor
    is_odd: Tensor
    bank: Tensor

    def __init__(self, *, changes: bool = True, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.changes, self.automatic_optimization = changes, not manual
        self.net, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_odd", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("bank", torch.zeros(3), persistent=False)
        self.seen: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.norm.train(self.changes and self.current_epoch == 0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            float(self.bank.sum() + self.count + self.is_odd.sum() + torch.as_tensor(self.norm.running_mean).sum())
        )
        return self.net(self.norm(x)) + self.bank * self.is_odd.sum()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        if self.changes:
            self.count += 1 + dist.get_rank()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        if self.changes:
            self.bank = self.bank.lerp(batch[1].mean(0), 0.5)  # another tensor
            self.is_odd[0] ^= dist.get_rank() == batch_idx % 2

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(strategy: Any, *, manual: bool = False, changes: bool = True, accumulate: int = 1) -> list[float]:
    """Train and return what forwards have read of the buffers on this rank, and the validation's loss."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x, y = (torch.randn(2 * NUM_BATCHES, width, generator=generator) for width in (4, 3))
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    module = Buffered(manual=manual, changes=changes)
    trainer = quiet_trainer(
        strategy,
        2,
        max_epochs=2,
        use_distributed_sampler=False,
        val_check_interval=3,
        limit_val_batches=2,
        **({} if manual else {"accumulate_grad_batches": accumulate}),
    )
    trainer.fit(module, loader, loader)
    return [*module.seen, float(trainer.callback_metrics["val"])]


def under_ddp(broadcast_buffers: bool, manual: bool, accumulate: int) -> list[float]:
    """Return what `fit` does under Lightning's ddp."""
    strategy = DDPStrategy(process_group_backend="gloo", broadcast_buffers=broadcast_buffers)
    return fit(strategy, manual=manual, accumulate=accumulate)
