"""Every process stops when one of them has a reason to: here a bad sample that only one of them sees.

    python examples/stop_together.py             # two CPU processes
    python examples/stop_together.py --devices 4

A signal does the same: ``kill -TERM`` to any of the processes, and all save one checkpoint and end. The same command
goes on from it, with the next batch.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--output", default="demo_output/stop_together")
    arguments = parser.parse_args()

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import TriggerEarlyStopping
from accelight.state import PartialState
from accelight.strategies import AccelFSDPStrategy


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def took_too_long(trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> bool:
    """Show a condition: whatever one process knows is enough, it need not be the same on all."""
    return trainer.global_step >= 1000


def main(arguments: argparse.Namespace) -> None:
    inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(dim=1, keepdim=True)
    targets[1001] = float("inf")
    stopping = TriggerEarlyStopping(
        took_too_long, stop_on_nonfinite_loss=True, stop_on_signals=[signal.SIGTERM, signal.SIGUSR1]
    )
    trainer = Trainer(
        strategy=AccelFSDPStrategy(fsdp_version=2),
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=10,
        callbacks=[stopping, ModelCheckpoint(arguments.output, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(inputs, targets), 16, shuffle=True), ckpt_path="last")
    by = ", ".join(map(str, stopping.triggered_by))
    PartialState().print(f"stopped at step {stopping.stopped_step}: {stopping.reason}, seen by process {by}")


if __name__ == "__main__":
    main(arguments)
