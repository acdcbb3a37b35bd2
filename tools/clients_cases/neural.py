"""N-HiTS of neuralforecast, which uses the package ``pytorch_lightning`` and makes its own Trainer."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

os.environ["ACCELIGHT_LIGHTNING"] = "pytorch_lightning"  # neuralforecast has both packages imported


def fit(trainer_options: dict[str, Any], batch_size: int) -> None:
    """Train on four sines; windows are drawn at random, alike on every process."""
    dates = pd.date_range("2024-01-01", periods=60, freq="D")
    frames = [
        pd.DataFrame({"unique_id": f"{phase}", "ds": dates, "y": np.sin(np.arange(60) / 3 + phase)})
        for phase in range(4)
    ]
    model = NHITS(
        h=4,
        input_size=8,
        mlp_units=[[16, 16]] * 3,
        learning_rate=0.01,
        optimizer=torch.optim.SGD,
        batch_size=batch_size,
        windows_batch_size=16,
        random_seed=1,
        **trainer_options,
    )
    NeuralForecast(models=[model], freq="D").fit(pd.concat(frames, ignore_index=True))
