"""Before: Lightning's ModelParallelStrategy. ``model_parallel_after.py`` is the same script with accelight."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
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

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in list(self.net)[:3]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs).squeeze(1), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    seed_everything(0)
    inputs = torch.randn(64, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=2,
        max_epochs=6,
        accumulate_grad_batches=8,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Regression(), data)
    trainer.save_checkpoint("run/sharded.ckpt")
