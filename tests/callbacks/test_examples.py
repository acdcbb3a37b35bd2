"""The examples of the callbacks run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.machines
def test_the_example_of_stopping_together_runs(tmp_path: Path) -> None:
    output = run_script(EXAMPLES / "stop_together.py", "--output", str(tmp_path)).output
    [(step, process)] = re.findall(r"stopped at step (\d+): non-finite loss, seen by process (\d)$", output, re.M)
    assert 0 < int(step) <= 128 + 1  # within the first epoch
    assert process in "01"


@pytest.mark.machines
def test_monitoring_gradients() -> None:
    output = run_script(EXAMPLES / "monitor_gradients.py").output
    number = r"'(\d+\.\d+)'"
    found = re.findall(
        rf"step \d+: {{'grad_norm': {number}, 'grad_norm/encoder': {number}, .*head': {number}}}", output
    )
    assert len(found) == 3
    for whole, *parts in (map(float, norms) for norms in found):
        assert whole**2 == pytest.approx(sum(part**2 for part in parts), rel=0.02)  # printed with three digits


@pytest.mark.machines
def test_a_night_with_faults_ends_with_the_same_weights(tmp_path: Path) -> None:
    output = run_script(EXAMPLES / "night_run.py", "--output", str(tmp_path), timeout_s=240).output
    assert "StepGuard skipped optimizer step 13: the gradient norm nan" in output
    assert re.search(r"Watchdog: process 1 \(\S+\) is stopped by a signal", output)
    assert "ReplicaCheck: after step 46 not all copies are equal" in output
    assert "The same weights: True" in output
