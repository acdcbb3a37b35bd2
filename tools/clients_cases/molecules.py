"""Message passing over molecules, of chemprop: a layer returns graphs, objects without ``__dict__``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from chemprop import data, models, nn
from lightning.pytorch import Trainer

from tools.clients_cases.sharing import shared


class Regression(models.MPNN):  # type: ignore[misc]
    """With SGD instead of Adam, which hides a wrong scale of gradients."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(trainer_options: dict[str, Any], batch_size: int) -> None:
    """Train on alkanes and alcohols."""
    points = [
        data.MoleculeDatapoint.from_smi("C" * (1 + index % 5) + "O" * (index % 2), np.array([float(index % 3)]))
        for index in range(64)
    ]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=batch_size, num_workers=0, shuffle=False)
    model = Regression(
        nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=16)
    )
    Trainer(**trainer_options).fit(model, shared(loader))
