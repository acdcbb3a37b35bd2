"""Train on however many machines there are, and go on with those that are left when one is lost or comes back.

On each machine (here on one, in two terminals; the first must stay)::

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-id=job1 --rdzv-backend=c10d \
        --rdzv-endpoint=localhost:29500 examples/elastic.py

End one of them, start it again: the weights are those of a run without interruption, and so is the checksum printed.

    python examples/elastic.py --devices 2    # without torchrun, on two CPU processes: the same checksum
"""

from __future__ import annotations

import argparse
import os

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "2")))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", default="demo_output/elastic")
    arguments = parser.parse_args()

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import ElasticTraining
from accelight.strategies import AccelFSDPStrategy


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])  # a mean over the samples

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_end(self) -> None:
        squares = torch.stack([parameter.detach().double().square().sum() for parameter in self.parameters()])
        total = getattr(squares, "full_tensor", lambda: squares)().sum().item()
        self.print(f"step {self.global_step}, sum of squared weights {total:.6f}")


def main(arguments: argparse.Namespace) -> None:
    inputs = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = Trainer(
        strategy=AccelFSDPStrategy(fsdp_version=2),
        accelerator="cpu",
        devices=arguments.devices,  # of this machine: how many machines there are, torchrun says
        max_epochs=arguments.epochs,
        callbacks=[
            ElasticTraining(global_batch_size=24, max_batch_size=6, resume_from=arguments.output),
            ModelCheckpoint(arguments.output, "{step}", every_n_train_steps=10, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=6, shuffle=True))


if __name__ == "__main__":
    main(arguments)
