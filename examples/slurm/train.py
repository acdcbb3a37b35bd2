"""Training that goes on in the next job of SLURM's when its time is over; see train.sbatch beside this file.

    sbatch examples/slurm/train.sbatch --output /shared/run

Two minutes before the end SLURM sends SIGUSR1 to all processes. They save one checkpoint at the end of the optimizer
step, and the job goes back into the queue; when it starts again, it goes on with the next batch.
`scancel --signal=USR1 JOB` does the same by hand.
"""

from __future__ import annotations

import argparse
import os

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", default="demo_output/slurm", help="a folder that all nodes see")
    arguments = parser.parse_args()

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import TriggerEarlyStopping
from accelight.strategies import AccelFSDPStrategy


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(8192, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = Trainer(
        strategy=AccelFSDPStrategy(fsdp_version=2),
        accelerator="auto",
        devices=int(os.environ.get("SLURM_NTASKS_PER_NODE", "1")),
        num_nodes=int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
        max_epochs=arguments.epochs,
        callbacks=[
            TriggerEarlyStopping(stop_on_signals=["SIGTERM"], requeue_on_signals=["SIGUSR1"]),
            ModelCheckpoint(arguments.output, save_last=True),
        ],
        logger=CSVLogger(arguments.output, name="log", version=int(os.environ.get("SLURM_RESTART_COUNT", "0"))),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data, ckpt_path="last")  # from the start where there is none


if __name__ == "__main__":
    main(arguments)
