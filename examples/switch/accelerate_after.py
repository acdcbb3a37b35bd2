"""After: ``accelerate_before.py`` with accelight; ``python accelerate_after.py`` starts it."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.strategies import AccelFSDPStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x).squeeze(1), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    seed_everything(0)
    inputs = torch.randn(64, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4)
    trainer = Trainer(
        strategy=AccelFSDPStrategy(  # these lines: accelight convert-config accelerate.yaml
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type="sharded_state_dict",
        ),
        accelerator="cpu",
        devices=2,
        num_nodes=1,
        precision="32-true",
        max_epochs=6,
        accumulate_grad_batches=8,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Regression(), data)
    trainer.save_checkpoint("run/sharded.ckpt")
