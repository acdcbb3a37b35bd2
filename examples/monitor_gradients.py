"""The gradients' norm, whole and by parts of the model, while FSDP2 shards it over two processes.

    python examples/monitor_gradients.py

`GradNormMonitor` logs like any metric of the module: to the loggers, the progress bar's metrics and
``trainer.callback_metrics``, which the little callback here prints.
"""

from __future__ import annotations

import argparse
from typing import Any

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import GradNormMonitor
from accelight.state import PartialState
from accelight.strategies import AccelFSDPStrategy


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Show(Callback):
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        norms = {name: f"{norm:.3f}" for name, norm in trainer.callback_metrics.items() if name.startswith("grad")}
        if norms and trainer.global_step % 10 == 0:
            PartialState().print(f"step {trainer.global_step}: {norms}")


def main(arguments: argparse.Namespace) -> None:
    inputs = torch.randn(2048, 16, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        strategy=AccelFSDPStrategy(fsdp_version=2),
        accelerator="cpu",
        devices=arguments.devices,
        max_steps=31,
        gradient_clip_val=1.0,
        callbacks=[GradNormMonitor(groups={"encoder": r"^encoder\.", "head": r"^head\."}), Show()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), 16, shuffle=True))


if __name__ == "__main__":
    main(arguments)
