"""Before: Lightning's DeepSpeedStrategy, which needs GPUs. ``deepspeed_after.py`` is the same script with accelight."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DeepSpeedStrategy
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    seed_everything(0)
    inputs = torch.randn(64, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4)
    strategy = DeepSpeedStrategy(stage=2, allgather_bucket_size=1_000_000, reduce_bucket_size=1_000_000)
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=2,
        max_epochs=6,
        accumulate_grad_batches=8,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Regression(), data)
    trainer.save_checkpoint("run/sharded.ckpt")
