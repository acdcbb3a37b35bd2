"""Tensor parallelism under FSDP2: two groups of two processes, each of which holds a part of each layer.

    python examples/tensor_parallel.py               # four processes
    python examples/tensor_parallel.py --tp-size 1   # the same losses from FSDP2 alone

The two processes of a group see the same batches. The checkpoint of either run is resumed by the other.
"""

from __future__ import annotations

import argparse

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tp-size", type=int, default=2)
    arguments = parser.parse_args()

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import PartialState
from accelight.strategies import AccelFSDPStrategy, ParallelismConfig

BATCH = 32
"""Of all processes."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Regressor(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), Block(64), Block(64), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        PartialState().print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main(arguments: argparse.Namespace) -> None:
    """Train."""
    seed_everything(1, verbose=False)
    size = arguments.tp_size
    inputs = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())
    strategy = AccelFSDPStrategy(
        fsdp_version=2,
        auto_wrap_policy={Block},
        parallelism_config=ParallelismConfig(tp_size=size),
        tp_plan={"net.*.up": "colwise", "net.*.down": "rowwise"} if size > 1 else None,
    )
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=arguments.devices, max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regressor(), DataLoader(data, batch_size=BATCH // (arguments.devices // size)))


if __name__ == "__main__":
    main(arguments)
