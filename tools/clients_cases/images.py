"""A U-Net of MONAI under a LightningModule."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from torch.utils.data import DataLoader, TensorDataset

from tools.clients_cases.sharing import shared


class Segmentation(LightningModule):
    """Tells two regions apart."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2))
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(trainer_options: dict[str, Any], batch_size: int) -> None:
    """Train on noise."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(64, 1, 16, 16, generator=generator)
    loader = DataLoader(TensorDataset(images, (images > 0).float()), batch_size)
    Trainer(**trainer_options).fit(Segmentation(), shared(loader))
