"""The examples with DeepSpeed, as a user starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import run_script

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.machines
def test_the_language_model_trains_and_its_merged_weights_are_the_live_ones(tmp_path: Path) -> None:
    """The script compares the logits of the engine with those of the merged file, and fails if they differ."""
    options = ["--steps", "4", "--accumulate", "3", "--strategy", "accel_deepspeed_stage_3", "--devices", "2"]
    output = run_script(
        EXAMPLES / "train_gpt.py", "--accelerator", "cpu", "--output", str(tmp_path), *options, timeout_s=200
    ).output
    assert len(re.findall(r"_states\.pt   [\d,]+ bytes", output)) == 4  # two processes, weights and optimizer
    assert "logits differ by at most" in output
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "AccelDeepSpeedStrategy: ZeRO-3" in report
    assert report.count("at step 4</figcaption>") == 2  # loss and gradient norm


@pytest.mark.machines
def test_a_student_learns_from_a_partitioned_teacher_without_flooding_the_terminal() -> None:
    """Started by Lightning's own launcher; what Lightning itself prints is left."""
    output = run_script(EXAMPLES / "distill_deepspeed.py", "--steps", "100", timeout_s=200).output
    assert "136,706 of 273,412 parameters on each of 2 processes" in output
    assert re.search(r"agree on \d+% of new inputs before, [789]\d% after", output)
    assert output.count("AccelDeepSpeedStrategy: ZeRO-") == 1  # of one fit, on one of the processes
    for noise in (
        "DeepSpeed config:",
        "deprecated. Please use",
        "[INFO]",
        "[WARNING]",
        "built successfully",
        "Setting accelerator",
    ):
        assert noise not in output
