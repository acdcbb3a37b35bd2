"""Temporal Fusion Transformer of pytorch-forecasting: an LSTM of several bases, a loss in the hyperparameters."""

from __future__ import annotations

from typing import Any

from pytorch_forecasting import TemporalFusionTransformer
from pytorch_forecasting.metrics import QuantileLoss

from tools.clients_cases._series import fit_forecaster, series


def fit(trainer_options: dict[str, Any], batch_size: int) -> None:
    """Train on a sine."""
    data = series(time_varying_unknown_reals=["value"], time_varying_known_reals=["time"], static_categoricals=["name"])
    model = TemporalFusionTransformer.from_dataset(
        data,
        learning_rate=0.05,
        optimizer="sgd",
        loss=QuantileLoss(),
        hidden_size=8,
        attention_head_size=2,
        hidden_continuous_size=4,
        dropout=0.0,
        log_interval=-1,
    )
    fit_forecaster(model, data, trainer_options, batch_size)
