"""A variational autoencoder of single cells, of scvi-tools, which makes its own Trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import scvi
import torch
from anndata import AnnData


def fit(trainer_options: dict[str, Any], batch_size: int) -> None:
    """Train on drawn counts; the latent values are drawn alike on every process."""
    scvi.settings.seed = 1
    cells = AnnData(np.random.default_rng(0).poisson(3.0, size=(64, 20)).astype(np.float32))
    scvi.model.SCVI.setup_anndata(cells)
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4, dropout_rate=0.0, use_batch_norm="none")
    plan = {"optimizer": "Custom", "optimizer_creator": lambda parameters: torch.optim.SGD(parameters, lr=0.001)}
    options = {name: value for name, value in trainer_options.items() if name != "enable_checkpointing"}
    model.train(
        max_epochs=1,
        train_size=0.9,
        shuffle_set_split=False,
        batch_size=batch_size,
        plan_kwargs=plan,
        enable_checkpointing=False,
        **options,
    )
