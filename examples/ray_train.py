"""Train in the workers of Ray Train, which starts them again when one is lost.

    python examples/ray_train.py                                            # two CPU workers of a local cluster
    ray job submit -- python train.py --workers 16 --gpu --storage /shared  # on a cluster whose nodes share that folder

End a worker (``ray::RayTrainWorker`` in ``ps``) while it trains: all are started again from the newest checkpoint, and
the checksum that is printed is that of a run without interruption. The same command again goes on with what is there.
"""

from __future__ import annotations

import argparse
import os

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", default="demo_output/ray", help="a folder that all nodes see")
    arguments = parser.parse_args()

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import RayReportCheckpoint
from accelight.strategies import RayAccelFSDPStrategy, reported_checkpoint


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_end(self) -> None:
        squares = torch.stack([parameter.detach().double().square().sum() for parameter in self.parameters()])
        total = getattr(squares, "full_tensor", lambda: squares)().sum().item()
        self.print(f"step {self.global_step}, sum of squared weights {total:.6f}")


def train(config: dict[str, Any]) -> None:  # in each worker
    inputs = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = Trainer(
        strategy=RayAccelFSDPStrategy(fsdp_version=2),
        plugins=[RayLightningEnvironment()],
        accelerator="auto",
        devices="auto",
        max_epochs=config["epochs"],
        callbacks=[RayReportCheckpoint(every_n_train_steps=50)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(Regression(), DataLoader(data, batch_size=6, shuffle=True), ckpt_path=reported_checkpoint())


def main(arguments: argparse.Namespace) -> None:
    result = TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(
            name="regression",
            storage_path=os.path.abspath(arguments.storage),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(f"The newest checkpoint: {result.checkpoint}")


if __name__ == "__main__":
    main(arguments)
