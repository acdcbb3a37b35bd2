"""Checkpoints that take long to save, saved once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.checkpoint import zero_saving
from tests.ranks import run_on_ranks


@pytest.fixture(scope="session")
def zero_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return the folder with all of DeepSpeed's checkpoints, and what its own conversion of some failed with.

    One worker of pytest-xdist makes them for all: they are to be read.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "zero"
    done = folder / "failures.json"
    with FileLock(folder.with_suffix(".lock")):
        if not done.exists():
            done.write_text(json.dumps(_save_all(folder)))
    return folder, json.loads(done.read_text())


def _save_all(folder: Path) -> dict[str, str]:
    failures: dict[str, str] = {}
    for world_size in (1, 2, 3):
        ending = f", {world_size} processes"
        mine = {name: variant for name, variant in zero_saving.VARIANTS.items() if name.endswith(ending)}
        args = (str(folder), mine)
        failures |= run_on_ranks(world_size, zero_saving.save_variants, *args, env=zero_saving.ENV, timeout_s=300)[0]
    return failures


@pytest.fixture(scope="session")
def zero_universal(zero_checkpoints: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with universal checkpoints, 2 and 3, of the two-process ones of these stages."""
    folder = tmp_path_factory.mktemp("universal")
    for stage in (2, 3):
        args = (str(zero_checkpoints[0] / f"stage {stage}, 2 processes"), str(folder / str(stage)))
        run_on_ranks(1, zero_saving.convert_to_universal, *args, env=zero_saving.ENV, timeout_s=200)
    return folder
