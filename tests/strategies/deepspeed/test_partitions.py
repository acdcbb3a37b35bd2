"""Where parameters lie in ZeRO's flat partitions, and what is behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelight.state import PartialState
from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import EVERYTHING_OFFLOADED, ds_config, trainer_for
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

NUM_RANKS = 3


class PartlyFrozen(TinyModule):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        first = next(each for each in self.model.modules() if isinstance(each, nn.Linear))
        first.requires_grad_(False)


class WithOneElement(TinyModule):
    """A parameter of which two of three ranks have nothing."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.model.register_parameter("scale", nn.Parameter(torch.ones(1)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.model.get_parameter("scale").square().sum()


def sums_of_paddings(config: dict[str, Any], kind: type[TinyModule], precision: str, folder: Path) -> list[float]:
    """Return the sum of magnitudes in each padding of this rank: in weights, and all that a checkpoint has of them."""
    import deepspeed

    module = kind(Case(epochs=1, precision=precision), Outcome())
    trainer = trainer_for(module.case, config)
    trainer.fit(module, rank_loader(NUM_RANKS))
    rank, found = PartialState().process_index, []
    parameter: Any
    for parameter in module.parameters():
        size = parameter.partition_numel()
        padding = slice(max(0, min(size, parameter.ds_numel - rank * size)), size)
        partitions: list[Tensor] = [parameter.ds_tensor]
        if parameter.requires_grad:
            partitions.append(deepspeed.utils.safe_get_local_fp32_param(parameter))
            partitions.append(deepspeed.utils.safe_get_local_optimizer_state(parameter, "momentum_buffer"))
        found += [float(partition[padding].abs().sum()) for partition in partitions if padding.start < size]
    trainer.save_checkpoint(folder)
    for file in folder.glob(f"**/*zero_pp_rank_{rank}_*optim_states.pt"):
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        assert state["fp32_flat_groups"]
        assert all(bool(flat.isfinite().all()) for flat in state["fp32_flat_groups"])
        found.append(0.0)
    return found


@pytest.mark.parametrize(
    ("config", "kind", "precision"),
    [
        (ds_config(3), TinyModule, "32-true"),
        (ds_config(3), PartlyFrozen, "bf16-mixed"),
        (ds_config(3, **EVERYTHING_OFFLOADED), PartlyFrozen, "32-true"),
        (ds_config(3, stage3_param_persistence_threshold=10**6), WithOneElement, "32-true"),
    ],
    ids=["plain", "bf16", "offloaded", "one element"],
)
def test_paddings_are_zero(config: dict[str, Any], kind: type[TinyModule], precision: str, tmp_path: Path) -> None:
    """The harness fills memory with NaN until it is written."""
    paddings = run_on_ranks(NUM_RANKS, sums_of_paddings, config, kind, precision, tmp_path / "checkpoint")
    assert all(paddings)  # each has a file, and at least the last one pieces that end early
    assert len(paddings[-1]) > 1
    assert {total for each in paddings for total in each} == {0.0}


# ---------------------------------------------------------------------- parameters in another order
class Reordered(LightningModule):
    """The second parameters of both groups begin at 2, but not where DeepSpeed deals parameters to ranks in turn."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (2, 4, 6), (2, 4, 3, 3)
        self.groups = nn.ModuleList(nn.ParameterList(torch.zeros(size) for size in some) for some in sizes)
        self.difference = -1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.stack([each @ torch.arange(1.0, len(each) + 1) for each in self.parameters()]).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        one, other = (list(group.parameters())[1].grad for group in self.groups)
        assert one is not None
        assert other is not None
        self.difference = float((one + other - 2 * torch.arange(1.0, 5.0)).abs().sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": group.parameters()} for group in self.groups], lr=0.1)


def add_reordered(config: dict[str, Any]) -> float:
    module = Reordered()
    trainer = quiet_trainer(AccelDeepSpeedStrategy(hf_ds_config=config), 2, max_epochs=1)
    trainer.fit(module, DataLoader(torch.zeros(4, 1)))  # type: ignore[arg-type]
    return module.difference


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_parameters_that_begin_elsewhere_are_added_as_wholes(stage: int) -> None:
    assert run_on_ranks(2, add_reordered, ds_config(stage, round_robin_gradients=True)) == [0.0, 0.0]
