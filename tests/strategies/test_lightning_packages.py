"""Lightning's other package, ``pytorch_lightning``: chosen by what is imported or by a variable, never mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scripts import run_script

SCRIPT = """
import importlib, sys
FIRST, STRATEGY, TRAINER = sys.argv[1:4]
importlib.import_module(FIRST)
import torch
from torch.utils.data import DataLoader, TensorDataset
pl = importlib.import_module(TRAINER)
import accelight.strategies
from accelight.callbacks import ExactEvaluation, GradNormMonitor, MergeShardedCheckpoint, TriggerEarlyStopping
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        return self.model(batch[0]).square().mean()
    def validation_step(self, batch):
        self.log("loss", self.model(batch[0]).square().mean(), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    if STRATEGY == "fsdp":
        strategy = AccelFSDPStrategy(fsdp_version=2)
    elif STRATEGY == "zero":
        strategy = AccelDeepSpeedStrategy(zero_stage=3)
    else:
        strategy = "auto" if STRATEGY == "callbacks" else STRATEGY
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1 if STRATEGY == "callbacks" else 2, max_steps=4, logger=False,
        callbacks=[ExactEvaluation(), GradNormMonitor(), TriggerEarlyStopping(stop_on_signals=["SIGTERM"])],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    data = DataLoader(TensorDataset(torch.randn(16, 4)), 2)
    trainer.fit(Module(), data, data)
    trainer.save_checkpoint(sys.argv[4])
    trainer.validate(Module(), data, ckpt_path=sys.argv[4], verbose=False)
    print(f"{trainer.global_step} steps with {type(trainer).__module__.split('.')[0]}")
"""


_FOLLOWED: list[Any] = [
    ("accelight.strategies", "zero", "pytorch_lightning", "pytorch_lightning"),
]
_FOLLOWED_AT_NIGHT: list[Any] = [
    ("pytorch_lightning", "fsdp", "lightning.pytorch", "lightning"),
    ("pytorch_lightning", "fsdp", "pytorch_lightning", None),
    ("pytorch_lightning", "accel_deepspeed_stage_2", "pytorch_lightning", None),
    ("accelight.strategies", "accel_fsdp1", "pytorch_lightning", None),
    ("accelight.strategies", "accel_fsdp2", "lightning.pytorch", None),
]


@pytest.mark.parametrize(
    ("first", "strategy", "trainer", "variable"),
    [*_FOLLOWED, *(pytest.param(*one, marks=pytest.mark.machines) for one in _FOLLOWED_AT_NIGHT)],
)
@pytest.mark.exhaustive
def test_the_package_is_followed(first: str, strategy: str, trainer: str, variable: str | None, tmp_path: Path) -> None:
    env = {"ACCELIGHT_LIGHTNING": variable} if variable else {}
    result = run_script(SCRIPT, first, strategy, trainer, str(tmp_path / "saved"), env=env)
    assert result.lines.count(f"4 steps with {trainer.split('.')[0]}") == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "accel_fsdp2", "callbacks"])
def test_the_wrong_trainer_says_how_to_switch(strategy: str, tmp_path: Path) -> None:
    result = run_script(SCRIPT, "lightning.pytorch", strategy, "pytorch_lightning", str(tmp_path), check=False)
    assert result.returncodes != [0]
    assert "For pytorch_lightning, set ACCELIGHT_LIGHTNING=pytorch_lightning, or import" in result.output


@pytest.mark.exhaustive
def test_another_package_is_refused(tmp_path: Path) -> None:
    env = {"ACCELIGHT_LIGHTNING": "fabric"}
    result = run_script("import accelight.strategies as s; s.AccelFSDPStrategy", env=env, check=False)
    assert "ACCELIGHT_LIGHTNING='fabric' is no package of Lightning's" in result.output


CLI = """
import sys
import torch
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
import accelight.strategies

if __name__ == "__main__":
    cli = LightningCLI(BoringModel, save_config_callback=None)
    print(type(cli.trainer.strategy).__name__, cli.trainer.global_step)
"""


@pytest.mark.machines
def test_the_other_packages_command_line_builds_strategies(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer: {accelerator: cpu, devices: 2, max_steps: 2, logger: false, enable_checkpointing: false,\n"
        "  strategy: {class_path: accelight.strategies.AccelFSDPStrategy, init_args: {fsdp_version: 2}}}\n"
    )
    result = run_script(CLI, "fit", "--config", str(config), cwd=tmp_path)
    assert result.output.count("AccelFSDPStrategy 2") == 2
