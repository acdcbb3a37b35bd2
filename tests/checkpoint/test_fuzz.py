"""Files damaged at random, the same in each run: an error, or the right result, or what torch reads there, too."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.checkpoint import damage
from tests.checkpoint.zero_damage import MODEL, OPTIMIZER, SHARD

Saved = tuple[Path, dict[str, str]]


def fuzz(root: Path, file: str, num_examples: int) -> dict[str, int]:
    """Run the examples under a limit of memory and time; returns how many ended how."""
    command = [sys.executable, "-m", "tests.checkpoint.fuzz", str(root), file, str(num_examples)]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=250, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr[-4000:]
    ends: dict[str, int] = json.loads(result.stdout)
    assert sum(ends.values()) >= num_examples * 0.9  # else it was not random
    assert ends["refused"] > ends["right"] / 10
    return ends


@pytest.mark.core("metadata")
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_damaged_dcp_files_end_in_an_error(tmp_path: Path, file: str) -> None:
    folder = damage.good(tmp_path / "in")
    fuzz(tmp_path, file, 600)
    for disputed in (tmp_path / "disputed").iterdir():  # what is written there is another checkpoint: torch reads it so
        shutil.copy(disputed / "damaged", folder / file)
        expected: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(expected, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
        weights = load_file(disputed / "model.safetensors")
        flat = expected.get("model", expected)
        assert set(weights) <= set(flat), disputed
        assert all(torch.equal(value, flat[name]) for name, value in weights.items()), disputed


@pytest.mark.core("optim_states")
@pytest.mark.parametrize(("stage", "file"), [(2, MODEL), (2, OPTIMIZER.format(1)), (3, SHARD.format(0))])
def test_damaged_zero_files_end_in_an_error(zero_checkpoints: Saved, tmp_path: Path, stage: int, file: str) -> None:
    saved = zero_checkpoints[0] / f"stage {stage}, 2 processes"
    shutil.copytree(saved / (saved / "latest").read_text(), tmp_path / "in")
    fuzz(tmp_path, file, 300)
    assert not list((tmp_path / "disputed").iterdir())
