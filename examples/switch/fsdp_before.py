"""Before: Lightning's FSDPStrategy, which needs GPUs. ``fsdp_after.py`` is the same script with accelight."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs).squeeze(1), targets)

    def configure_gradient_clipping(self, *_: object, **__: object) -> None:
        wrapped: Any = self.trainer.strategy.model
        wrapped.clip_grad_norm_(1.0)  # FSDPStrategy refuses Trainer(gradient_clip_val=1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    seed_everything(0)
    inputs = torch.randn(64, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4)
    strategy = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded")
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=2,
        max_epochs=6,
        accumulate_grad_batches=8,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Regression(), data)
    trainer.save_checkpoint("run/sharded.ckpt")
