"""The series that forecasters are trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from lightning.pytorch import Trainer
from pytorch_forecasting import TimeSeriesDataSet

from tools.clients_cases.sharing import shared


def series(**columns: Any) -> Any:
    """Return windows over four sines, of which the first are used."""
    time = np.arange(40)
    frames = [
        pd.DataFrame({"time": time, "value": np.sin(time / 3 + phase) + phase, "name": f"series {phase}"})
        for phase in range(4)
    ]
    options: dict[str, Any] = {"max_encoder_length": 8, "max_prediction_length": 4, "add_relative_time_idx": False}
    return TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True), time_idx="time", target="value", group_ids=["name"], **options, **columns
    )


def fit_forecaster(model: Any, data: Any, trainer_options: dict[str, Any], batch_size: int) -> None:
    """Train a model of pytorch-forecasting."""
    loader = data.to_dataloader(train=True, batch_size=batch_size, shuffle=False)
    Trainer(**trainer_options).fit(model, shared(loader))
