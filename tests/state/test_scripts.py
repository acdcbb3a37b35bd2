"""Scripts as newcomers write them: under torchrun, on two nodes, beside Lightning's launcher, and with torch alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "accumulate_fsdp2.py"

NEWCOMER = """
from accelight.state import PartialState, gather_object

state = PartialState()
with state.main_process_first():
    print(f"prepare {state.process_index}")
with state.split_between_processes(["A", "B", "C"]) as prompts:
    answers = [prompt.lower() for prompt in prompts]
answers = gather_object(answers)
if state.is_main_process:
    state.set_trigger("done")
done = state.check_trigger("done", blocking=False), state.check_trigger("done", blocking=False)

@state.on_main_process
def report():
    print(f"answers {answers} on {state.num_processes}, done {done}")

report()
state.wait_for_everyone()
# and no farewell: newcomers forget destroy_process_group
"""

NODES = """
from accelight.state import PartialState

state = PartialState()
with state.local_main_process_first():
    pass

@state.on_local_process(local_process_index=1)
def second_of_node():
    return "second"

place = (state.process_index, state.local_process_index, state.num_local_processes)
print(f"process {place} of {state.num_processes}: main {state.is_local_main_process}, {second_of_node()}", flush=True)
state.print(f"node of {state.process_index}", flush=True)
state.destroy_process_group()
"""

LIGHTNING = """
import torch, lightning.pytorch as L
from torch.utils.data import DataLoader, TensorDataset
from accelight.state import PartialState, check_trigger, set_trigger

state = PartialState()
before = (state.process_index, state.num_processes)

@state.on_process(process_index=1)
def second():
    return "second"

state.wait_for_everyone()
with state.main_process_first():
    pass

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        with state.main_process_first():
            pass
        if state.is_last_process and batch_idx == 0:
            set_trigger()
        print(f"inside {state.process_index} of {state.num_processes}: {check_trigger()} {second()}", flush=True)
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, logger=False, barebones=True)
trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(8, 1))))
state.wait_for_everyone()
print(f"after {before} -> {state.process_index} of {state.num_processes}", flush=True)
"""


def found(pattern: str, output: str) -> list[str]:
    """Find what was printed, wherever it stands: lines of two processes may run into each other."""
    return re.findall(pattern, output)


@pytest.mark.exhaustive
@pytest.mark.parametrize("nproc", [1, 3])
def test_a_newcomers_script_under_torchrun(nproc: int) -> None:
    result = run_script(NEWCOMER, launcher="torchrun", nproc=nproc)
    prepared = found(r"prepare \d", result.output)
    assert prepared[0] == "prepare 0"
    assert sorted(prepared) == [f"prepare {rank}" for rank in range(nproc)]
    assert f"answers ['a', 'b', 'c'] on {nproc}, done (False, True)" in result.output


def test_a_newcomers_script_under_plain_python() -> None:
    assert "answers ['a', 'b', 'c'] on 1, done (False, True)" in run_script(NEWCOMER).lines


@pytest.mark.machines
def test_two_nodes_on_loopback() -> None:
    result = run_script(NODES, launcher="two_nodes", nproc=2)
    assert sorted(found(r"process .*? (?:None|second)", result.output)) == [
        "process (0, 0, 2) of 4: main True, None",
        "process (1, 1, 2) of 4: main False, second",
        "process (2, 0, 2) of 4: main True, None",
        "process (3, 1, 2) of 4: main False, second",
    ]
    assert sorted(found(r"node of \d", result.output)) == ["node of 0", "node of 2"]


@pytest.mark.machines
def test_a_state_made_before_lightnings_launcher_tells_the_truth_inside_and_after_fit() -> None:
    result = run_script(LIGHTNING)
    assert sorted(found(r"inside \d of \d: (?:True|False) (?:None|second)", result.output)) == [
        "inside 0 of 2: True None",
        "inside 1 of 2: True second",
    ]
    assert sorted(found(r"after .*? -> \d of \d", result.output)) == [
        "after (0, 1) -> 0 of 2",
        "after (1, 2) -> 1 of 2",
    ]


@pytest.mark.machines
def test_the_example_trains_the_same_on_one_process_and_on_two() -> None:
    losses = []
    for launcher, nproc in (("python", 1), ("torchrun", 1), ("torchrun", 2)):
        lines = run_script(EXAMPLE, launcher=launcher, nproc=nproc).lines  # type: ignore[arg-type]
        losses.append([line for line in lines if line.startswith("epoch")])
    assert len(losses[0]) == 3
    assert losses[0] == losses[1] == losses[2]


def test_state_needs_only_torch() -> None:
    code = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "deepspeed", "transformers", "accelerate"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import torch
before = set(sys.modules)
import accelight.state
for name in accelight.state.__all__:
    getattr(accelight.state, name)
accelight.state.PartialState(), accelight.state.AcceleratorState(), accelight.state.GradientState()
new = {name.split(".")[0] for name in set(sys.modules) - before if not name.startswith("accelight")}
assert not new & {"numpy", "pandas", "datasets", "safetensors", "torchmetrics"}, new
heavy = {"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"}
assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
