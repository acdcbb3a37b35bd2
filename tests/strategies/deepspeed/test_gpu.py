"""DeepSpeed on CUDA with NCCL: every stage, half precision, offloading, a resume; a plain loop is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import ACCELERATOR, NUM_DEVICES, TRIED_ON_CPU
from tests.ranks import forget_processes, run_on_ranks
from tests.strategies.deepspeed.training import CONFIGS, ds_config, trainer_for, whole_weights
from tests.strategies.oracle import Case, Outcome, TinyModule, assert_same, rank_loader, train_plain

pytestmark = pytest.mark.gpu

CASE = Case(accumulate=3, clip_norm=0.1)


@pytest.fixture(scope="module", autouse=True)
def _processes_of_their_own() -> Iterator[None]:
    """DeepSpeed chooses between CPU and CUDA once in a process."""
    forget_processes(NUM_DEVICES)
    yield
    forget_processes(NUM_DEVICES)


def train(case: Case, config: dict[str, Any], save_to: str = "", resume_from: str | None = None) -> Outcome:
    outcome, world_size = Outcome(), NUM_DEVICES
    trainer, module = trainer_for(case, config, accelerator=ACCELERATOR, devices=world_size), TinyModule(case, outcome)
    trainer.fit(module, rank_loader(world_size), ckpt_path=resume_from)
    if save_to:
        trainer.save_checkpoint(save_to)
    outcome.weights, outcome.global_step = whole_weights(module), trainer.global_step
    return outcome


def on_gpus(*args: Any) -> Outcome:
    return run_on_ranks(NUM_DEVICES, train, *args, init_group=False, timeout_s=280)[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_trains_as_a_plain_loop(config: dict[str, Any], optimizer: str) -> None:
    case = Case(accumulate=3, clip_norm=0.1, optimizer=optimizer)
    # fp32 sums of CUDA kernels have another order than those of the CPU; errors grow over some ten steps.
    assert_same(on_gpus(case, config), train_plain(case, NUM_DEVICES), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_precision_trains(stage: int, precision: str) -> None:
    config = ds_config(stage)
    if precision == "16-mixed" and TRIED_ON_CPU:
        pytest.skip("DeepSpeed has no fp16 on the CPU")
    if precision == "16-mixed":  # small enough that no step is skipped while it is looked for
        config["fp16"] = {"enabled": "auto", "initial_scale_power": 8}
    case = Case(accumulate=3, clip_norm=0.1, precision=precision)
    found, expected = on_gpus(case, config), train_plain(case, NUM_DEVICES)
    assert found.global_step == expected.global_step
    assert found.losses == pytest.approx(expected.losses, rel=0.1)  # bf16 keeps three digits; ten steps lose one


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resume_goes_on(stage: int, tmp_path: Path) -> None:
    path, config = str(tmp_path / "checkpoint"), ds_config(stage)
    whole = Case(accumulate=3, clip_norm=0.1)
    first = on_gpus(Case(accumulate=3, clip_norm=0.1, epochs=1), config, path)
    second = on_gpus(whole, config, "", path)
    expected = train_plain(whole, NUM_DEVICES)
    assert first.losses + second.losses == pytest.approx(expected.losses, rel=1e-4)


def validated(stage: int) -> list[float]:
    """Validate before fit, and within it after every batch."""
    config, module = ds_config(stage), TinyModule(CASE, Outcome())
    for call in ("validate", "fit"):
        trainer = trainer_for(CASE, config, accelerator=ACCELERATOR, devices=NUM_DEVICES, val_check_interval=1)
        loaders = [rank_loader(NUM_DEVICES)] * (1 if call == "validate" else 2)
        getattr(trainer, call)(module, *loaders)
    return module.outcome.losses


@pytest.mark.parametrize("stage", [2, 3])
def test_validation_before_and_within_fit_changes_nothing(stage: int) -> None:
    losses = run_on_ranks(NUM_DEVICES, validated, stage, init_group=False, timeout_s=280)[0]
    assert losses == pytest.approx(train_plain(CASE, NUM_DEVICES).losses, rel=1e-4)
