"""A module that several others hold, below the units: no unit may gather it for itself alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.units import without_split_ties
from tests.ranks import run_on_ranks
from tests.strategies.oracle import (
    WIDTH,
    Case,
    Outcome,
    TinyModule,
    assert_same,
    quiet_trainer,
    rank_loader,
    train_plain,
)


class Selection(nn.Module):
    def __init__(self, scalers: nn.ModuleDict) -> None:
        super().__init__()
        self.scalers, self.linear = scalers, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.scalers["x"](x)))


class Sharing(nn.Module):
    """As pytorch-forecasting's Temporal Fusion Transformer: encoder and decoder scale by the same layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        scalers = nn.ModuleDict({"x": nn.Linear(WIDTH, WIDTH)})
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.encoder, self.decoder = Selection(scalers), Selection(scalers)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(self.embed(x))))


class SharingModule(TinyModule):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.model: Any = Sharing()


def train(version: int) -> Outcome:
    outcome = Outcome()
    module = SharingModule(Case(), outcome)
    strategy = AccelFSDPStrategy(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Selection"],
        state_dict_type="full_state_dict",
    )
    trainer = quiet_trainer(strategy, 2, max_epochs=2)
    trainer.fit(module, rank_loader(2))
    weights = trainer.strategy.lightning_module_state_dict()
    outcome.weights = {name.removeprefix("model."): tensor.cpu().clone() for name, tensor in weights.items()}
    outcome.global_step = trainer.global_step
    return outcome


@pytest.mark.parametrize("version", [1, 2])
def test_what_two_units_would_share_is_gathered_around_both(version: int) -> None:
    assert_same(run_on_ranks(2, train, version)[0], train_plain(Case(), 2, model=Sharing()))


def test_a_shared_module_that_is_a_unit_itself_leaves_the_others_be() -> None:
    model = Sharing()
    scaler = model.encoder.scalers["x"]
    with pytest.warns(UserWarning, match="gathered with their parent's unit .*: encoder, decoder"):
        assert without_split_ties(model, [model.encoder, model.decoder]) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        units = [scaler, model.encoder, model.decoder]
        assert without_split_ties(model, units) == units
        assert without_split_ties(model, [model.encoder, model.decoder], unsharded={scaler}) == units[1:]
