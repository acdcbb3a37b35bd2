"""Training on many machines that goes on where it was: under SLURM, Kubernetes, or torchrun by hand.

    sbatch examples/slurm/train.sbatch --output /shared/run
    kubectl apply --filename examples/kubernetes/train.yaml
    torchrun --nnodes=2 --node-rank=0 --master-addr=first --nproc-per-node=8 examples/many_machines.py   # and rank 1

SIGTERM, and SLURM's SIGUSR1 before the time of a job is over, save one checkpoint at the end of the optimizer step.
After SIGUSR1 the SLURM job goes back into the queue. Started again, the script goes on with the next batch.
"""

from __future__ import annotations

import argparse
import os

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", default="demo_output/many_machines", help="a folder that all nodes see")
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
    num_processes = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS", "1"))
    num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    torch.manual_seed(0)
    inputs = torch.randn(8192, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = Trainer(
        strategy=AccelFSDPStrategy(fsdp_version=2),
        accelerator="auto",
        devices=num_local_processes,
        num_nodes=num_processes // num_local_processes,
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
