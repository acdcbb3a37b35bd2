"""The strategy through LightningCLI, in real processes: YAML, names, the printed configuration and the help."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from accelight.strategies import AccelFSDPStrategy
from tests.scripts import run_script

MODULE = """
import sys
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset
import accelight.strategies

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    def training_step(self, batch):
        return self.model(batch[0]).square().mean()
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 4)), 2)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_end(self):
        settings = self.trainer.strategy.engine.settings
        print(f"trained: {settings.wrap.kind} {settings.wrap.min_num_params} {settings.precision.param_dtype} "
              f"reshard {settings.reshard_after_forward} accumulate {self.trainer.accumulate_grad_batches}", flush=True)
"""
TELL = """
import contextlib, io
def tell(*arguments):
    out = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        LightningCLI(Module, args=list(arguments))
    return out.getvalue()
open("printed.yaml", "w").write(tell("fit", "--config", "asked.yaml", "--print_config"))
open("help.txt", "w").write(tell("fit", "--trainer.strategy.help", "accelight.strategies.AccelFSDPStrategy"))
for name in ("accel_fsdp2", "accel_fsdp2_offload", "accel_fsdp1_offload"):
    cli = LightningCLI(Module, args=["--trainer.strategy", name, "--trainer.accelerator", "cpu"], run=False)
    settings = cli.trainer.strategy.fsdp_plugin.settings()
    print(name, type(settings).__name__, settings.cpu_offload, flush=True)
"""
CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: accelight.strategies.AccelFSDPStrategy
    init_args:
      fsdp_version: 2
      auto_wrap_policy: size_based_wrap
      min_num_params: 10
      reshard_after_forward: false
      mixed_precision_policy: {param_dtype: bf16}
      gradient_accumulation: 2
      parallelism_config: {dp_shard_size: 2}
      timeout: "0:10:00"
"""


@pytest.mark.machines
def test_what_the_cli_prints_trains_the_same_again(tmp_path: Path) -> None:
    (tmp_path / "asked.yaml").write_text(CONFIG)
    told = run_script(MODULE + TELL, cwd=tmp_path)
    assert "Unable to serialize" not in told.output
    assert [line for line in told.lines if line.startswith("accel_")] == [
        "accel_fsdp2 FSDP2Settings False",
        "accel_fsdp2_offload FSDP2Settings True",
        "accel_fsdp1_offload FSDP1Settings True",
    ]
    assert "auto_wrap_policy: size_based_wrap" in (tmp_path / "printed.yaml").read_text()
    _check_help((tmp_path / "help.txt").read_text())
    output = run_script(MODULE + "LightningCLI(Module)", "fit", "--config", "printed.yaml", cwd=tmp_path).output
    assert output.count("trained: size_based_wrap 10 torch.bfloat16 reshard False accumulate 2") == 2


def _check_help(text: str) -> None:
    """Every argument of the strategy comes with words before its type."""
    text = " ".join(text.split())
    names = [name for name in inspect.signature(AccelFSDPStrategy).parameters if name != "self"]
    assert len(names) > 25
    for name in names:
        # Behind the usage line, an option's entry is its name, its value's name, words, and "(type: ".
        entries = re.findall(rf"--trainer\.strategy\.{name} [^-]*?([a-zA-Z`][^(]*(?:\([^)]*\)[^(]*)*?)\(type: ", text)
        assert any(len(entry.split()) >= 4 for entry in entries), f"{name} is not described in --help"
