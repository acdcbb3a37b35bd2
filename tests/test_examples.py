"""What holds for every example; that each does what it says stands beside the tests of what it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
WITH_ARGUMENTS = [path for path in EXAMPLES if "argparse" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_ARGUMENTS, ids=lambda path: path.stem)
def test_help_answers_before_anything_heavy_is_imported(path: Path) -> None:
    command = [sys.executable, "-S", str(path), "--help"]  # without site-packages: an import of torch fails
    done = subprocess.run(command, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {path.name} ")
    assert "--help" in done.stdout
