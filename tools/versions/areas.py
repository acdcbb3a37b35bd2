"""The areas of ``tools.matrix``: the tests that tell whether versions fit, and how they are run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .environments import ROOT, MissingPythonError, bare, uv

_FSDP = "tests/strategies/fsdp"
_ZERO = "tests/strategies/deepspeed"
_ENGINE = (
    f"{_FSDP}/test_training.py::test_adamw[{{engine}}]",
    f"{_FSDP}/test_training.py::test_windows_go_on_over_the_end_of_an_epoch[{{engine}}-2]",
    f"{_FSDP}/test_strategy.py::test_gradients_are_reduced_once_for_each_window[{{engine}}]",
    f"{_FSDP}/test_strategy.py::test_options_train_the_same[{{version}}-units]",
    f"{_FSDP}/test_strategy.py::test_options_train_the_same[{{version}}-size_based_wrap]",
    f"{_FSDP}/test_checkpoint.py::test_resume_continues_as_if_nothing_had_happened[{{engine}}-full_state_dict]",
    f"{_FSDP}/test_checkpoint.py::test_resume_continues_as_if_nothing_had_happened[{{engine}}-sharded_state_dict]",
    f"{_FSDP}/test_exceptions.py::test_exceptions_arrive_and_training_goes_on[{{engine}}-forward]",
    f"{_FSDP}/test_exceptions.py::test_exceptions_arrive_and_training_goes_on[{{engine}}-backward]",
    f"{_FSDP}/test_grid.py::test_processes_train_as_one[2_processes-{{engine}}-tied-bf16-mixed]",
    f"{_FSDP}/test_strategy.py::test_hybrid_sharding_trains_the_same[{{version}}]",
    "tests/strategies/test_orders.py::test_random_orders[0-{engine}]",
)
_BACKGROUND = f"{_FSDP}/test_async_save.py::test_a_save_in_the_background_holds_what_was_there_when_it_was_asked_for"
_FILES = f"{_FSDP}/test_save_safetensors.py::test_the_files_are_those_of_a_merge"
_NEXT_LOSSES = f"{_FSDP}/test_accelerate_folders.py::test_the_next_losses_are_those_that_accelerate_would_have_had"
_CALLBACKS = "tests/callbacks"
INSTALLATION = "installation"
AREAS: dict[str, tuple[str, ...]] = {
    INSTALLATION: (
        "tests/test_package.py::test_imports_are_silent",
        "tests/test_package.py::test_a_plain_run_warns_of_nothing_deprecated",
    ),
    "private names": ("tests/test_upstream.py",),
    "state": (
        "tests/state/test_gradient_state.py",
        "tests/state/test_gathering.py::test_collectives",
        "tests/state/test_triggers.py::test_any_process_sets_and_all_know_once",
        "tests/state/test_accelerator_state.py::test_an_accelerator_state_made_by_hand",
        "tests/state/test_scripts.py::test_a_newcomers_script_under_torchrun",
    ),
    "FSDP1": tuple(test.format(engine="fsdp1", version=1) for test in _ENGINE),
    "FSDP2": (
        *(test.format(engine="fsdp2", version=2) for test in _ENGINE),
        f"{_FSDP}/test_hooks_of_units.py",
    ),
    "ZeRO": (
        f"{_ZERO}/test_strategy.py::test_seven_batches_with_accumulation_two_are_four_steps",
        f"{_ZERO}/test_strategy.py::test_overflowing_steps_are_skipped_and_hold_schedules_back",
        f"{_ZERO}/test_strategy.py::test_offloaded_adam_is_deepspeeds_own",
        f"{_ZERO}/test_checkpoint.py::test_resumes_with_the_same_next_loss",
        f"{_ZERO}/test_short_windows.py",
        f"{_ZERO}/test_grid.py::test_trains_as_a_plain_loop[stage2]",
        f"{_ZERO}/test_grid.py::test_trains_as_a_plain_loop[stage3_offload]",
        *(f"tests/strategies/test_orders.py::test_random_orders[0-zero{stage}]" for stage in (1, 2, 3)),
    ),
    "users' code": tuple(
        f"tests/strategies/test_user_code.py::test_users_code_trains_as_under_ddp[core-{engine}]"
        for engine in ("fsdp1", "fsdp2", "zero2", "zero3")
    ),
    "checkpoints": (
        f"{_FSDP}/test_interop.py",
        f"{_BACKGROUND}[fsdp1-full_state_dict]",
        f"{_BACKGROUND}[fsdp2-sharded_state_dict]",
        f"{_FILES}[2-fsdp_version=1]",
        f"{_FILES}[3-fsdp_version=2]",
        *(f"{_FSDP}/test_{name}.py" for name in ("plan_cache", "save_plans", "dcp_metadata")),
        *(f"{_FSDP}/test_{name}.py" for name in ("flat_shards", "flat_state", "async_contents")),
        "tests/strategies/test_store_messages.py",
    ),
    "merge": (
        "tests/checkpoint/test_merge.py",
        "tests/checkpoint/test_zero.py::test_equal_to_the_live_weights_and_to_deepspeed[stage 2, 2 processes]",
        "tests/checkpoint/test_zero.py::test_equal_to_the_live_weights_and_to_deepspeed[stage 3, 2 processes]",
    ),
    "callbacks": (
        f"{_CALLBACKS}/test_exact_evaluation.py::test_every_length_gives_the_values_of_one_process[accel_fsdp2-2]",
        f"{_CALLBACKS}/test_grad_norm_monitor.py::test_fsdp_logs_the_norm_of_a_plain_loop",
        f"{_CALLBACKS}/test_merge_sharded_checkpoint.py::test_at_the_end_of_fit[merge_last_and_best]",
        f"{_CALLBACKS}/test_trigger_early_stopping.py::test_one_of_several_stops_all_at_the_same_step",
    ),
    "Lightning": (
        "tests/strategies/test_lightning_packages.py",
        "tests/strategies/test_resume_order.py::test_the_order_of_a_resume",
        "tests/strategies/test_schedules.py",
        "tests/strategies/test_termination.py::test_a_plain_run_ends_on_all_processes",
    ),
    "transformers": (
        "tests/checkpoint/test_interop.py",
        f"{_CALLBACKS}/test_merge_sharded_checkpoint.py::test_hugging_face_models_load_by_from_pretrained",
        f"{_ZERO}/test_transformers.py",
    ),
    "Accelerate": (
        f"{_FSDP}/test_accelerate_folders.py::test_weights_cross_to_accelerate_as_safetensors",
        f"{_NEXT_LOSSES}[2-fsdp2-TinyModule]",
    ),
}
"""Column of the table to its tests."""
EXTRAS = ("", "[deepspeed]", "[all]")
"""What a user installs: each has to fit together without our constraints."""


@dataclass
class Cell:
    """What became of an area's tests."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    """Each a test, and what it says."""
    skipped: list[str] = field(default_factory=list)
    """The reasons."""
    why: str = ""
    """Nothing was run: the reason."""

    def __str__(self) -> str:
        """Return what stands in the table."""
        if self.why:
            return f"skipped: {self.why}"
        words = [f"**{len(self.failed)} fail**"] if self.failed else []
        words += [f"{self.passed} pass"] if self.passed else []
        words += [f"{len(self.skipped)} skipped"] if self.skipped else []
        return ", ".join(words) or "**no test**"

    @property
    def is_good(self) -> bool:
        """Whether nothing failed, and something was run or could not be."""
        return not self.failed and bool(self.passed or self.skipped or self.why)

    def as_dict(self) -> dict[str, object]:
        """Return what JSON takes."""
        return asdict(self)


def run_area(area: str, env: Path, scratch: Path, timeout_s: float) -> Cell:
    """Run an area's tests against the wheel that an environment has.

    Args:
        area: A key of ``AREAS``.
        env: The environment.
        scratch: Where the log and the tests' report go.
        timeout_s: After so long, what runs is ended and is a failure.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    report, log = scratch / f"{area}.xml", scratch / f"{area}.log"
    report.unlink(missing_ok=True)
    for lock in (env / "torch_extensions").glob("*/lock"):  # of a build that ended with an area's tests
        lock.unlink()
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [str(env / "bin" / "python"), "-m", "pytest", *options, *AREAS[area]]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {
        "PATH": os.pathsep.join([str(env / "bin"), os.environ.get("PATH", "")]),  # ninja and accelight are there
        "TORCH_EXTENSIONS_DIR": str(env / "torch_extensions"),  # of this torch and this DeepSpeed
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Cell(failed=[f"{area}: not ended after {timeout_s:.0f} s, see {log}"])
    if not report.exists():
        return Cell(failed=[f"{area}: ended with status {process.returncode}, see {log}"])
    return read_report(report.read_text(encoding="utf-8"))


def read_report(text: str) -> Cell:
    """Return what a JUnit report says."""
    cell = Cell()
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        wrong = [child for kind in ("failure", "error") for child in case.iter(kind)]
        skipped = [child.get("message", "") for child in case.iter("skipped")]
        if wrong:
            cell.failed.append(f"{name}: {_first_line(wrong[0].get('message', ''))}")
        elif skipped:
            cell.skipped += skipped
        else:
            cell.passed += 1
    return cell


def fits_together(wheel: Path, python: str, folder: Path) -> Cell:
    """Ask whether the wheel, with each of its extras, can be installed beside nothing, as a user does it."""
    cell = Cell()
    try:
        bare(python, folder)
    except MissingPythonError as error:
        return Cell(why=str(error))
    for extra in EXTRAS:
        try:
            uv("pip", "install", "--dry-run", "--python", str(folder), f"accelight{extra} @ {wheel.as_uri()}")
        except subprocess.CalledProcessError as error:
            cell.failed.append(f"accelight{extra}: {_first_line(error.stderr)}")
        else:
            cell.passed += 1
    return cell


def together(cells: Sequence[Cell]) -> Cell:
    """Return one cell for several."""
    return Cell(
        sum(cell.passed for cell in cells),
        [failure for cell in cells for failure in cell.failed],
        [reason for cell in cells for reason in cell.skipped],
        " ".join(cell.why for cell in cells if cell.why),
    )


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return re.sub(r"\s+", " ", lines[0])[:200] if lines else "no message"


def say(line: str) -> None:
    """Tell how far it is, beside the table."""
    print(line, file=sys.stderr, flush=True)
