"""The scripts of `examples/switch`: those before and those after the switch end with the weights of one process."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import accelerate.commands.launch
import pytest
import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file
from torch import nn

from accelight.checkpoint import load_state_dict
from accelight.strategies.convert_config import convert, read_config
from examples.switch.fsdp_after import Block
from tests.docs import without_gpus
from tests.docs.pages import ROOT
from tests.scripts import Launcher, run_script

FOLDER = ROOT / "examples" / "switch"
RTOL, ATOL = 1e-4, 1e-5  # fp32 means of 64 samples, summed in another order in each of six steps


def _of_one_process(divided_by: int = 1) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop, in which each step has all 64 samples, and its loss is divided."""
    set_seed(0)
    inputs = torch.randn(64, 16)
    model = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(inputs).squeeze(1), inputs.sum(1)) / divided_by).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def _weights(name: str, folder: Path, launcher: Launcher = "python") -> dict[str, torch.Tensor]:
    """Run a script in a folder and return the weights that it saves, by their names in the model."""
    folder.mkdir()
    script = FOLDER / name
    if name == "accelerate_before.py":
        arguments = ["--config_file", str(script.with_name("accelerate.yaml")), str(script)]
        run_script(Path(accelerate.commands.launch.__file__), *arguments, cwd=folder, timeout_s=200)
    elif name in ("fsdp_before.py", "deepspeed_before.py") and torch.cuda.device_count() < 2:
        run_script(Path(without_gpus.__file__), str(script), cwd=folder, timeout_s=200)
    else:
        run_script(script, launcher=launcher, cwd=folder, timeout_s=200)
    [saved] = (folder / "run").iterdir()
    files = list(saved.glob("model.safetensors"))
    weights = load_file(files[0]) if files else load_state_dict(saved)
    return {key.removeprefix("net.").removeprefix("model."): value for key, value in weights.items()}


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=RTOL, atol=ATOL, msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "fsdp_before.py",
        "fsdp_after.py",
        "model_parallel_before.py",
        "model_parallel_after.py",
        "deepspeed_before.py",
        "deepspeed_after.py",
        "accelerate_before.py",
        "accelerate_after.py",
    ],
)
def test_a_script_ends_with_the_weights_of_one_process(name: str, tmp_path: Path) -> None:
    # With DeepSpeed, Lightning 2.6 divides by the number of micro-batches, and DeepSpeed does so once more.
    expected = _of_one_process(divided_by=8 if name == "deepspeed_before.py" else 1)
    _compare(_weights(name, tmp_path / name), expected)


@pytest.mark.exhaustive
def test_transformers_trainer_and_its_successor_end_with_the_same_weights(tmp_path: Path) -> None:
    before = _weights("transformers_before.py", tmp_path / "before", "torchrun")
    _compare(_weights("transformers_after.py", tmp_path / "after"), before)


def test_the_config_file_of_accelerate_gives_the_arguments_of_the_script_after_it() -> None:
    printed = str(convert(read_config(FOLDER / "accelerate.yaml")))
    lines = [line.strip() for line in printed.splitlines() if line.startswith(" ")]
    script = (FOLDER / "accelerate_after.py").read_text(encoding="utf-8")
    assert len(lines) > 5
    assert [line for line in lines if line.replace("'", '"') not in script.replace("'", '"')] == []


def test_the_table_names_arguments_of_transformers() -> None:
    from transformers import TrainingArguments  # seconds, which each worker would pay that collects the tests

    page = (ROOT / "docs" / "from-transformers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page[page.index("## TrainingArguments") :], re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(names) > 30
    assert names <= {field.name for field in dataclasses.fields(TrainingArguments)}
