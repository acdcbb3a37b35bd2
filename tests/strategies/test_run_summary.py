"""What a run tells at its start, on rank 0: three lines, a fourth with FSDP1 by default, and no other of ours."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import pytest
import torch
from lightning.pytorch import Trainer

import accelight
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, FullyShardedDataParallelPlugin
from tests.log_messages import RANK_ZERO, log_messages
from tests.ranks import run_on_ranks
from tests.scripts import run_script
from tests.strategies.oracle import Block, Case, Outcome, TinyModule, quiet_trainer, rank_loader


class Manual(TinyModule):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def heard(kind: str, options: dict[str, Any], more: dict[str, Any], fits: int) -> list[str]:
    manual = more.pop("manual", False)
    module = (Manual if manual else TinyModule)(Case(), Outcome())
    with log_messages(RANK_ZERO, "lightning_utilities.core.rank_zero", "accelight", level=logging.INFO) as messages:
        for _ in range(fits):
            strategy: Any = (
                AccelDeepSpeedStrategy(**options)
                if kind == "zero"
                else AccelFSDPStrategy(auto_wrap_policy={Block}, **options)
            )
            trainer: Trainer = quiet_trainer(strategy, 2, max_epochs=1, limit_train_batches=4, **more)
            trainer.fit(module, rank_loader(2))
            trainer.validate(module, rank_loader(2), verbose=False)
    return [message for message in messages if message.startswith("accelight ")]


FSDP1 = f"accelight {accelight.__version__}, AccelFSDPStrategy: FSDP1 on 2 processes (cpu)"
FSDP2 = f"accelight {accelight.__version__}, AccelFSDPStrategy: FSDP2 on 2 processes (cpu)"
ZERO = f"accelight {accelight.__version__}, AccelDeepSpeedStrategy: ZeRO-{{}} of DeepSpeed {deepspeed.__version__}"
# TinyModel has 251: 48 of the first layer, 88 of each block, 27 of the last. FSDP2 halves each parameter by rows.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "fsdp1": (
        "fsdp1",
        {"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP", "state_dict_type": "full"},
        {"accumulate_grad_batches": 2},
        [
            f"{FSDP1}, mesh shard=2, SHARD_GRAD_OP",
            "units 2 Block, 1 TinyModule; 251 parameters, 126 of them on rank 0",
            "precision 32-true; 2 micro-batches a step; checkpoints full_state_dict",
        ],
    ),
    "fsdp1_by_default": (
        "fsdp1",
        {},
        {},
        [
            f"{FSDP1}, mesh shard=2, FULL_SHARD",
            "units 2 Block, 1 TinyModule; 251 parameters, 126 of them on rank 0",
            "precision 32-true; 1 micro-batch a step; checkpoints full_state_dict",
            "FSDP1 is Accelerate's default; prefer fsdp_version=2 for new code (docs: Choosing a strategy)",
        ],
    ),
    "fsdp2": (
        "fsdp2",
        {"fsdp_version": 2, "activation_checkpointing": True, "async_save": True},
        {"precision": "bf16-mixed"},
        [
            f"{FSDP2}, mesh shard=2, resharded after forward, activation checkpointing",
            "units 2 Block, 1 TinyModule; 251 parameters, 130 of them on rank 0",
            (
                "precision bf16-mixed, gathered in bfloat16, reduced in bfloat16; 1 micro-batch a step; checkpoints "
                "sharded_state_dict in the background"
            ),
        ],
    ),
    "fsdp1_hsdp": (
        "fsdp1",
        {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2), "use_orig_params": False},
        {},
        [
            f"{FSDP1}, mesh replicate=1 x shard=2, HYBRID_SHARD",
            "units 2 Block, 1 TinyModule; 251 parameters, 126 of them on rank 0",
            "precision 32-true; 1 micro-batch a step; checkpoints full_state_dict",
        ],
    ),
    "fsdp2_parts": (
        "fsdp2",
        {"fsdp_version": 2, "reshard_after_forward": False, "activation_checkpointing_policy": {Block}},
        {"manual": True},
        [
            f"{FSDP2}, mesh shard=2, resharded after backward, activation checkpointing",
            "units 2 Block, 1 TinyModel; 251 parameters, 130 of them on rank 0",
            "precision 32-true; manual optimization; checkpoints sharded_state_dict",
        ],
    ),
    "zero0": (
        "zero",
        {"zero_stage": 0},
        {},
        [
            f"{ZERO.format(0)} on 2 processes (cpu)",
            "251 parameters, 251 of them on rank 0",
            "precision 32-true; 1 micro-batch a step; checkpoints folder of DeepSpeed's",
        ],
    ),
    "zero2": (
        "zero",
        {"zero_stage": 2, "async_save": True},
        {"accumulate_grad_batches": 4},
        [
            f"{ZERO.format(2)} on 2 processes (cpu)",
            "251 parameters, 251 of them on rank 0; optimizer state of 126 on rank 0",
            "precision 32-true; 4 micro-batches a step; checkpoints folder of DeepSpeed's in the background",
        ],
    ),
    "zero3": (
        "zero",
        {"zero_stage": 3, "offload_optimizer_device": "none"},
        {"precision": "bf16-true"},
        [
            f"{ZERO.format(3)} on 2 processes (cpu)",
            "251 parameters, 126 of them on rank 0; optimizer state of 126 on rank 0",
            "precision bf16-true; 1 micro-batch a step; checkpoints folder of DeepSpeed's",
        ],
    ),
}


@pytest.mark.core("fsdp1", "fsdp2", "zero3")
@pytest.mark.parametrize("case", CASES)
def test_a_fit_tells_one_block_on_rank_0(case: str) -> None:
    kind, options, more, expected = CASES[case]
    found = run_on_ranks(2, heard, kind, options, more, 1)
    assert [said.split("\n  ") for said in found[0]] == [expected]
    assert found[1] == []


def test_each_fit_tells_what_it_is_and_evaluation_tells_nothing() -> None:
    found = run_on_ranks(2, heard, "fsdp2", {"fsdp_version": 2}, {}, 2)[0]
    assert len(found) == 2
    assert found[0] == found[1]


_SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    def training_step(self, batch, batch_idx):
        loss = self.layers(batch[0]).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss
    validation_step = training_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
strategy = {
    "ddp": lambda: "ddp",
    "fsdp1": lambda: AccelFSDPStrategy(fsdp_version=1, auto_wrap_policy={nn.Linear}),
    "fsdp2": lambda: AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={nn.Linear}),
    "zero2": lambda: AccelDeepSpeedStrategy(zero_stage=2),
}[sys.argv[1]]()
trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, default_root_dir=sys.argv[2],
                  accumulate_grad_batches=2, logger=False)
module = Module()
trainer.fit(module, loader, loader)
trainer.validate(module, loader)
"""


def _printed(strategy: str, folder: str) -> list[str]:
    found = run_script(_SCRIPT, strategy, folder, launcher="torchrun", timeout_s=200).output.replace("\r", "\n")
    return sorted(line.rstrip() for line in found.splitlines() if line.strip() and "it/s" not in line)


class Wide(TinyModule):
    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        self.wide = torch.nn.Sequential(torch.nn.Linear(5, 1), torch.nn.Linear(2**10, 2**10), torch.nn.LayerNorm(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0 * self.wide[0](batch[0]).sum()


def _lines(**options: Any) -> list[str]:
    strategy = AccelFSDPStrategy(**options)
    with log_messages(RANK_ZERO) as messages:
        quiet_trainer(strategy, 1, max_steps=1).fit(Wide(), rank_loader(1))
    return [line.strip() for said in messages if said.startswith("accelight ") for line in said.split("\n")]


def _with_units(version: int, policy: set[type]) -> list[str]:
    return _lines(fsdp_version=version, auto_wrap_policy=policy)


def _with_a_version_set_later() -> list[str]:
    plugin = FullyShardedDataParallelPlugin()
    plugin.fsdp_version, plugin.reshard_after_forward = 2, True
    return _lines(fsdp_plugin=plugin)


@pytest.mark.exhaustive
def test_a_plugin_that_gets_its_version_later_says_nothing_of_fsdp1() -> None:
    [lines] = run_on_ranks(1, _with_a_version_set_later, init_group=False)
    assert "FSDP2" in lines[0]
    assert not [line for line in lines if "FSDP1 is Accelerate's default" in line]


@pytest.mark.core("2]")
@pytest.mark.parametrize("version", [1, 2])
def test_small_units_of_a_large_model_are_named(version: int) -> None:
    [lines] = run_on_ranks(1, _with_units, version, {torch.nn.LayerNorm, Wide}, init_group=False)
    norms = sum(isinstance(one, torch.nn.LayerNorm) for one in Wide().modules())
    assert lines[-1].startswith(f"{norms} LayerNorm: units of fewer than 65,536 parameters cost")
    [lines] = run_on_ranks(1, _with_units, version, {Wide}, init_group=False)
    assert "units of fewer" not in lines[-1]


@pytest.mark.machines
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2"])
def test_a_plain_run_prints_what_ddp_prints_and_the_block(strategy: str, tmp_path: Any) -> None:
    expected, found = _printed("ddp", str(tmp_path / "ddp")), _printed(strategy, str(tmp_path / "ours"))
    more = [line for line in found if line not in expected]
    assert len(more) == 3, more
    assert sum(line.startswith("accelight ") for line in more) == 1
