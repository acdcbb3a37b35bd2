"""Whole scripts, as users start them: `PartialState` before, inside and after ``Trainer.fit`` under every launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import Launcher, run_script

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from accelight.state import PartialState, gather

state = PartialState()
def tell(where):
    print(f"{where}: {state.process_index} of {state.num_processes}, local {state.local_process_index} of "
          f"{state.num_local_processes}, main {state.is_main_process}, local main {state.is_local_main_process}",
          flush=True)
tell("before")

@state.on_main_process
def once():
    print("once only", flush=True)
once()
with state.main_process_first():
    print("everybody", flush=True)
state.wait_for_everyone()

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from accelight.strategies import AccelFSDPStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 1)
    def on_train_start(self):
        tell("inside")
        totals = gather(torch.tensor([float(state.process_index)]))
        assert totals.tolist() == [float(i) for i in range(state.num_processes)], totals
    def training_step(self, batch):
        return self.model(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

devices, nodes = int(sys.argv[1]), int(sys.argv[2])
trainer = Trainer(strategy=AccelFSDPStrategy(fsdp_version=2), accelerator="cpu", devices=devices, num_nodes=nodes,
                  max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False)
trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(16, 4)), 2))
tell("after")
state.wait_for_everyone()
once()
"""


def _told(output: str, where: str) -> list[str]:
    # Not line by line: Lightning's own messages may end up on the same one.
    return sorted(re.findall(rf"{where}: (\d of \d, local \d of \d, main \w+?, local main (?:True|False))", output))


@pytest.mark.machines
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_the_state_tells_the_truth_before_inside_and_after_fit(launcher: Launcher) -> None:
    result = run_script(SCRIPT, "2", "1", launcher=launcher, nproc=2)
    places = [f"{i} of 2, local {i} of 2, main {i == 0}, local main {i == 0}" for i in range(2)]
    assert _told(result.output, "inside") == places, result.output
    assert _told(result.output, "after") == places, result.output
    if launcher == "torchrun":
        assert _told(result.output, "before") == places
    else:  # Lightning's launcher: the first process is alone until fit, and starts the second, which knows its place
        assert _told(result.output, "before") == ["0 of 1, local 0 of 1, main True, local main True", places[1]]
    assert result.output.count("once only") == 2  # before and after, each on one process
    assert result.output.count("everybody") == 2


@pytest.mark.machines
def test_two_nodes_know_their_places() -> None:
    result = run_script(SCRIPT, "1", "2", launcher="two_nodes", nproc=1)
    places = [f"{i} of 2, local 0 of 1, main {i == 0}, local main True" for i in range(2)]
    for where in ("before", "inside", "after"):
        assert _told(result.output, where) == places


@pytest.mark.machines
def test_the_example_trains_merges_and_uses_its_weights(tmp_path: Path) -> None:
    example = ROOT / "examples" / "train_gpt.py"
    options = ["--steps", "6", "--accumulate", "3", "--strategy", "accel_fsdp1", "--devices", "2"]
    output = run_script(example, "--accelerator", "cpu", "--output", str(tmp_path), *options, timeout_s=200).output
    assert "parameters," in output
    assert "validation loss" in output
    assert "logits differ by at most" in output
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert output.rstrip().endswith(f"report: {tmp_path / 'report.html'}")
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "AccelFSDPStrategy: FSDP1 on 2 processes" in report
    assert report.count("at step 6</figcaption>") == 2  # loss and gradient norm


def test_the_readmes_example_runs_as_printed(tmp_path: Path) -> None:
    _, code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    output = run_script(code, cwd=tmp_path).output
    assert "4 tensors in" in output
    assert (tmp_path / "merged" / "model.safetensors").is_file()


SAMPLES = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
import accelight.strategies

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
    def training_step(self, batch):
        used = " ".join(map(str, batch[0].flatten().int().tolist()))
        sys.stdout.write(f"samples {used}\\n")  # at once: torchrun's processes have no buffer
        return self.model(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)

trainer = Trainer(strategy=sys.argv[1], accelerator="cpu", devices=1, max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), DataLoader(TensorDataset(torch.arange(8.0).unsqueeze(1)), 2))
"""


@pytest.mark.machines
@pytest.mark.parametrize("strategy", ["accel_fsdp1", "accel_fsdp2", "accel_deepspeed_stage_2"])
def test_samples_are_dealt_to_all_nodes_that_are_there(strategy: str) -> None:
    """Where ``num_nodes`` was left out, each node used all samples."""
    lines = run_script(SAMPLES, strategy, launcher="two_nodes", nproc=1).lines
    used = [int(word) for line in lines if line.startswith("samples ") for word in line.split()[1:]]
    assert sorted(used) == list(range(8))
