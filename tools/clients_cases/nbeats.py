"""N-BEATS of pytorch-forecasting."""

from __future__ import annotations

from typing import Any

from pytorch_forecasting import MAE, NBeats

from tools.clients_cases._series import fit_forecaster, series


def fit(trainer_options: dict[str, Any], batch_size: int) -> None:
    """Train on a sine."""
    data = series(time_varying_unknown_reals=["value"], min_encoder_length=8)
    model = NBeats.from_dataset(
        data,
        learning_rate=0.01,
        optimizer="sgd",
        loss=MAE(),
        dropout=0.0,
        widths=[16, 16],
        num_blocks=[1, 1],
        num_block_layers=[2, 2],
        expansion_coefficient_lengths=[3, 3],
        backcast_loss_ratio=0.1,
        log_interval=-1,
    )
    fit_forecaster(model, data, trainer_options, batch_size)
