"""What type checkers see of the installed wheel: a user's script, in an environment that has no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
from lightning.pytorch import Trainer
from typing_extensions import assert_type

import accelight
from accelight.callbacks import ExactEvaluation, GradNormMonitor, MergeShardedCheckpoint, TriggerEarlyStopping
from accelight.checkpoint import inspect_checkpoint, merge_fsdp_weights, verify_merged
from accelight.state import GradientState, PartialState
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, FullyShardedDataParallelPlugin

state = PartialState()
assert_type(accelight.__version__, str)
assert_type(state.process_index, int)
assert_type(state.is_main_process, bool)
assert_type(GradientState().sync_gradients, bool)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
assert_type(merge_fsdp_weights("sharded", "merged").num_tensors, int)
Trainer(
    strategy=AccelFSDPStrategy(fsdp_plugin=plugin),
    callbacks=[ExactEvaluation(), GradNormMonitor(), MergeShardedCheckpoint("merged"), TriggerEarlyStopping()],
)
Trainer(strategy=AccelDeepSpeedStrategy(zero_stage=2))
wrong: str = state.num_processes
state.no_such_name
"""
WRONG = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "wrong" in line or "no_such_name" in line]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, beside which it has what this one has."""
    folder = tmp_path_factory.mktemp("user")
    for part in ("package", "state", "checkpoint", "strategies", "callbacks"):  # a build writes beside the sources
        shutil.copytree(ROOT / part, folder / "sources" / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "sources" / name)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(packages), str(folder / "sources")], check=True)
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    return python


def _elsewhere() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


@pytest.mark.machines
def test_mypy_sees_the_types(python: Path) -> None:
    folder = python.parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--output", "json"]
    done = subprocess.run([*command, "script.py"], cwd=folder, env=_elsewhere(), capture_output=True, text=True)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [found["line"] for found in told if found["severity"] == "error"] == WRONG, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_pyright_sees_the_types(python: Path) -> None:
    program = shutil.which("pyright") or shutil.which("pyright", path=sysconfig.get_path("scripts"))
    if program is None:
        pytest.skip("there is no pyright: pip install 'pyright[nodejs]'")
    command = [program, "--outputjson", "--pythonpath", str(python), "script.py"]
    done = subprocess.run(command, cwd=python.parents[2], env=_elsewhere(), capture_output=True, text=True)
    told = json.loads(done.stdout)["generalDiagnostics"]
    errors = [found["range"]["start"]["line"] + 1 for found in told if found["severity"] == "error"]
    assert errors == WRONG, done.stdout
