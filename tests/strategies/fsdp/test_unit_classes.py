"""Modules whose classes cannot take FSDP2's as another base: gathered with what is around them, or refused by name."""

from __future__ import annotations

from abc import ABC
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from accelight.strategies import AccelFSDPStrategy, FullyShardedDataParallelPlugin
from accelight.strategies.fsdp import fsdp2_prepare_model
from accelight.strategies.fsdp.fsdp2 import can_be_unit
from tests.log_messages import log_messages
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


class Recurrent(ABC, nn.RNNBase):
    """As in pytorch-forecasting: a base beside torch's own class."""


class LSTM(Recurrent, nn.LSTM):
    pass


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.lstm = LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x)[:, None])[0][:, 0])


class Reading(TinyModule):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.model: Any = Reader()


FULL: dict[str, Any] = {"state_dict_type": "full_state_dict"}


def train(version: int) -> tuple[Outcome, list[str], list[str]]:
    outcome = Outcome()
    module = Reading(Case(), outcome)
    strategy = AccelFSDPStrategy(fsdp_version=version, auto_wrap_policy="size_based_wrap", min_num_params=40, **FULL)
    trainer = quiet_trainer(strategy, 2, max_epochs=2)
    with log_messages("", "lightning.pytorch", "lightning_utilities", "lightning.fabric") as lines:
        trainer.fit(module, rank_loader(2))
    weights = trainer.strategy.lightning_module_state_dict()
    outcome.weights = {name.removeprefix("model."): tensor.cpu().clone() for name, tensor in weights.items()}
    outcome.global_step = trainer.global_step
    units = [name for name, one in module.model.named_modules() if isinstance(one, FSDPModule)]
    return outcome, units, [line for line in dict.fromkeys(lines) if "with their parent's unit" in line]


def test_the_class_is_one_that_torch_fails_with() -> None:
    lstm = LSTM(2, 2)
    assert not can_be_unit(lstm)
    assert type(lstm) is LSTM
    assert can_be_unit(nn.LSTM(2, 2))


@pytest.mark.parametrize("version", [1, 2])
def test_it_is_gathered_with_what_is_around_it(version: int) -> None:
    expected = train_plain(Case(), 2, model=Reader())
    for rank, (outcome, units, lines) in enumerate(run_on_ranks(2, train, version)):
        if rank == 0:
            assert_same(outcome, expected)
        assert units == ([] if version == 1 else ["embed"])
        assert len(lines) == (1 if (version, rank) == (2, 0) else 0)
        assert all("model.lstm (LSTM)" in line for line in lines)


class Alone:
    """What `fsdp2_prepare_model` asks for."""

    def __init__(self) -> None:
        self.device, self.is_main_process = torch.device("cpu"), True
        self.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        self.device_mesh = init_device_mesh("cpu", (1,))


def refuse() -> str:
    with pytest.raises(ValueError, match="FSDP2 cannot shard this LSTM") as caught:
        fsdp2_prepare_model(Alone(), LSTM(2, 2))
    return str(caught.value)


def test_a_root_of_such_a_class_is_refused_by_name() -> None:
    assert "attribute" in run_on_ranks(1, refuse)[0]
