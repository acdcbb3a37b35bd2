"""Small files that would take hours or gigabytes: each is refused at once, in a process with little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint import damage
from tests.checkpoint.bombs import BOMBS, RECORD_BOMBS

READ = """
import resource, sys
from accelight.checkpoint import CheckpointError, inspect_checkpoint, merge_fsdp_weights, verify_merged
resource.setrlimit(resource.RLIMIT_AS, (600 * 2**20,) * 2)
try:
    verify_merged(*sys.argv[1:3]) if sys.argv[3] == "verify" else merge_fsdp_weights(*sys.argv[1:3])
except CheckpointError as error:
    assert len(str(error)) < 2000, len(str(error))
    sys.exit(3)
"""


def read(folder: Path, output: Path, how: str) -> None:
    command = [sys.executable, "-c", READ, str(folder), str(output), how]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert result.returncode == 3, result.stderr[-2000:]
    assert how == "verify" or not output.exists()


@pytest.mark.parametrize("name", BOMBS)
def test_a_metadata_bomb(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/.metadata").write_bytes(BOMBS[name])
    read(tmp_path / "in", tmp_path / "out", "merge")


@pytest.mark.parametrize("name", RECORD_BOMBS)
def test_a_record_bomb(tmp_path: Path, name: str) -> None:
    folder = damage.good(tmp_path / "in", a=torch.arange(12.0))
    record = damage.rebuild(damage.record_of(folder, "model.a"), data_pkl=RECORD_BOMBS[name])
    damage.replace_record(folder, "model.a", record)
    read(folder, tmp_path / "out", "merge")


def test_a_header_bomb(tmp_path: Path) -> None:
    """A shape of a million sizes has a product of sixty million digits."""
    folder = damage.good(tmp_path / "in", a=torch.arange(12.0))
    described = {"a": {"dtype": "F32", "shape": [2**61] * 1_000_000, "data_offsets": [0, 8]}}
    header = json.dumps(described).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    read(folder, tmp_path / "m.safetensors", "verify")
