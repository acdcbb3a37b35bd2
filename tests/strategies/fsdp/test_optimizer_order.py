"""A full checkpoint numbers parameters as an optimizer over the plain module does; so do those that it resumes from.

Lightning and torch match optimizer state by number alone. FSDP1's flat parameters come in another order than the
parameters in them, and where shapes are equal nothing raises: each parameter would go on with another one's momentum.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import NUM_MICRO_BATCHES, dataset, quiet_trainer, rank_loader

BLOCKS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Square"]}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, "use_orig_params": False, **BLOCKS},
    "fsdp1_orig_params": {"fsdp_version": 1, "use_orig_params": True, **BLOCKS},
    "fsdp2": {"fsdp_version": 2, **BLOCKS},
}
CELLS = (
    ("all", False),
    ("all", True),
    ("two_groups", True),
    ("own_order", False),
    ("trainable_only", True),
    ("a_block_before_the_rest", False),
    ("tied", False),
)
"""How the optimizer is made, and whether a block is frozen."""


class Square(nn.Module):
    """All parameters have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.second(self.first(x)))


class Module(LightningModule):
    """``embed`` and ``head`` end up in one flat parameter, the blocks between them in others."""

    def __init__(self, groups: str, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(5, 5, bias=False)
        self.blocks = nn.Sequential(Square(), Square(), Square())
        self.extra = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 5, bias=False)
        self.groups = groups
        if groups == "tied":
            self.extra.weight = self.embed.weight
        self.blocks[1].requires_grad_(not frozen)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.head(self.extra(self.blocks(self.embed(batch[0])))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        first, _, last = self.blocks
        parameters: Any = list(self.parameters())
        in_last = set(last.parameters())
        others = [parameter for parameter in parameters if parameter not in in_last]
        if self.groups == "two_groups":
            parameters = [{"params": others, "lr": 0.01}, {"params": list(last.parameters()), "lr": 0.02}]
        elif self.groups == "own_order":
            parameters = [*last.parameters(), *others]
        elif self.groups == "trainable_only":
            parameters = [parameter for parameter in parameters if parameter.requires_grad]
        elif self.groups == "a_block_before_the_rest":
            in_first = set(first.parameters())
            rest = [parameter for parameter in others if parameter not in in_first]
            parameters = [{"params": [*last.parameters(), *first.parameters()]}, {"params": rest, "lr": 0.02}]
        return torch.optim.AdamW(parameters, lr=0.01)


def _train_plain(groups: str, frozen: bool, path: Path) -> dict[str, Any]:
    """Return the state after an epoch; keep it as a checkpoint of Lightning's, in which parameters have no names."""
    module = Module(groups, frozen)
    optimizer = module.configure_optimizers()
    for batch in dataset(2).tensors[0].unflatten(0, (NUM_MICRO_BATCHES, -1)):
        optimizer.zero_grad()
        module.training_step([batch]).backward()
        optimizer.step()
    state = optimizer.state_dict()
    torch.save({"state_dict": module.state_dict(), "optimizer_states": [state], "global_step": 7}, path)
    return state


def _train(engine: str, options: dict[str, Any], groups: str, frozen: bool, path: str) -> tuple[Any, Any]:
    """Return what rank 0 would save after an epoch, and after loading the plain checkpoint."""
    strategy = AccelFSDPStrategy(state_dict_type="full_state_dict", **ENGINES[engine], **options)
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=1)
    trainer.fit(Module(groups, frozen), rank_loader(dist.get_world_size()))
    trained = copy.deepcopy(strategy.optimizer_state(trainer.optimizers[0]))
    for state in trainer.optimizers[0].state.values():
        for value in state.values():
            value.zero_()
    trainer.state.fn = "fit"  # type: ignore[assignment] # load optimizer state, too
    strategy.load_optimizer_state_dict(strategy.load_checkpoint(path, weights_only=True))
    return trained, strategy.optimizer_state(trainer.optimizers[0])


def _run(engine: str, cells: list[tuple[dict[str, Any], str, bool, str]]) -> list[tuple[Any, Any]]:
    return [_train(engine, *cell) for cell in cells]


@pytest.mark.core("fsdp1_orig_params")
@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_are_those_of_the_plain_optimizer(engine: str, tmp_path: Path) -> None:
    cells: list[tuple[dict[str, Any], str, bool, str]] = []
    expected = []
    for groups, frozen in CELLS:
        if engine == "fsdp1" and len(Module(groups, frozen).configure_optimizers().param_groups) > 1:
            continue  # refused over flat parameters
        path = tmp_path / f"{groups}_{frozen}"
        expected.append(_train_plain(groups, frozen, path))
        cells.append(({}, groups, frozen, str(path)))
    expected.append(expected[0])
    cells.append(({"ignored_modules": r"extra|blocks\.1\.first"}, "all", False, cells[0][3]))
    for cell, plain, (trained, loaded) in zip(cells, expected, run_on_ranks(2, _run, engine, cells)[0], strict=True):
        for found, rtol in ((trained, 1e-4), (loaded, 0.0)):  # 1e-4: sums in another order; Adam divides by them
            for group, plain_group in zip(found["param_groups"], plain["param_groups"], strict=True):
                assert group["params"] == plain_group["params"], cell
                assert group["lr"] == plain_group["lr"], cell
            assert sorted(found["state"]) == sorted(plain["state"]), cell
            for number, state in plain["state"].items():
                torch.testing.assert_close(found["state"][number], state, rtol=rtol, atol=rtol * 1e-3)
