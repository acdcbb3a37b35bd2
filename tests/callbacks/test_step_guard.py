"""Training with skipped steps is that of a plain loop that skips the same steps."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import statistics
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from accelight.callbacks import GradNormMonitor, ShardedEMA, StepGuard
from accelight.state import GradientAccumulationPlugin, PartialState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, ParallelismConfig
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import fp16_on_cpu
from tests.strategies.fsdp import cut_model
from tests.strategies.oracle import (
    BATCH_SIZE,
    NUM_MICRO_BATCHES,
    Case,
    Outcome,
    TinyModule,
    build_model,
    dataset,
    full_weights,
    quiet_trainer,
    rank_loader,
    strategy_called,
)

POISON = {(0, 4): math.nan, (1, 2): 1e3, (2, 0): -1e4, (2, 5): math.inf}
"""Epoch and batch to what the first target of the last rank is there."""
EPOCHS = 3
FACTOR, WINDOW = 10.0, 2
STRATEGIES = [
    *("fsdp1", "fsdp1_orig_params", "fsdp1_offload", "fsdp2", "fsdp2_offload"),
    *("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"),
]


def decay(step: int) -> float:
    return 0.9**step


@dataclass
class Trained:
    """What training left: comparable between the two ways."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    """Steps, counted from 1."""
    rates: list[float] = field(default_factory=list)
    """Learning rate after each step."""
    global_step: int = 0


class Poisoned(TinyModule):
    """Notes what a step left, and its weights at the end."""

    def __init__(self, case: Case, poison: dict[tuple[int, int], float]) -> None:
        super().__init__(case, Outcome())
        self.poison, self.found = poison, Trained()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        value = self.poison.get((self.current_epoch, batch_idx))
        if value is not None and dist.get_rank() == dist.get_world_size() - 1:
            batch[1][0] = value
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self) -> None:
        self.found.weights = full_weights(self.trainer.strategy)
        self.found.global_step = self.trainer.global_step


class Noting(Callback):
    """Which steps were skipped, by what is logged."""

    def __init__(self, skipped_before: int = 0) -> None:
        self.skipped, self.step = skipped_before, 0

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        module.found.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if (skipped := int(trainer.callback_metrics["step_guard/skipped"])) != self.skipped:
            module.found.skipped.append(trainer.global_step)
            self.skipped = skipped


def guard(**options: Any) -> StepGuard:
    return StepGuard(**{"spike_factor": FACTOR, "window": WINDOW, **options})


def train(
    name: str,
    case: Case,
    poison: dict[tuple[int, int], float] = POISON,
    *,
    callbacks: list[Callback] | None = None,
    skipped_before: int = 0,
    ckpt_path: str | None = None,
    save_to: str | None = None,
    module: Poisoned | None = None,
    plugins: Any = None,
) -> Trained:
    size = PartialState().num_processes
    trainer = quiet_trainer(
        strategy_called(name),
        size,
        max_epochs=case.epochs,
        precision=None if plugins else case.precision,
        plugins=plugins,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_norm or case.clip_value,
        gradient_clip_algorithm="norm" if case.clip_norm else "value" if case.clip_value else None,
        callbacks=[*([guard()] if callbacks is None else callbacks), Noting(skipped_before)],
    )
    module = module or Poisoned(case, poison)
    trainer.fit(module, rank_loader(size), ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    reset_state()
    return module.found


def train_plain(
    case: Case,
    world_size: int,
    poison: dict[tuple[int, int], float] = POISON,
    max_norm: float = math.inf,
    left_out: Collection[int] = (),
) -> Trained:
    """Train in a plain loop that leaves out the optimizer, and its schedule, for the same reasons, and ``left_out``."""
    model, found = build_model(), Trained()
    norms: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # type: ignore[assignment]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    inputs, targets = dataset(world_size).tensors
    size = BATCH_SIZE * world_size
    for epoch, start in itertools.product(range(case.epochs), range(0, NUM_MICRO_BATCHES, case.accumulate)):
        optimizer.zero_grad()
        for index in range(start, min(start + case.accumulate, NUM_MICRO_BATCHES)):
            batch = slice(index * size, (index + 1) * size)
            wanted = targets[batch].clone()
            if (epoch, index) in poison:
                wanted[world_size - 1] = poison[epoch, index]
            (nn.functional.mse_loss(model(inputs[batch]), wanted) / case.accumulate).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
        last = norms[-WINDOW:]
        threshold = max_norm
        if len(last) == WINDOW:
            middle = statistics.median(last)
            spread = 1.4826 * statistics.median([abs(one - middle) for one in last])
            threshold = min(threshold, middle + FACTOR * max(spread, middle / 10))
        found.global_step += 1
        if math.isfinite(norm) and norm <= threshold and found.global_step not in left_out:
            norms.append(norm)
            if case.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            if case.clip_value:
                nn.utils.clip_grad_value_(model.parameters(), case.clip_value)
            optimizer.step()
            schedule.step()
        else:
            found.skipped.append(found.global_step)
        found.rates.append(optimizer.param_groups[0]["lr"])
    found.weights = {name: value.detach() for name, value in model.state_dict().items()}
    return found


def assert_same(found: Trained, expected: Trained) -> None:
    """Sums in another order differ by some 1e-7 of the largest summand."""
    assert found.skipped == expected.skipped
    assert found.rates == pytest.approx(expected.rates)
    assert found.global_step == expected.global_step
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=2e-6)


# ---------------------------------------------------------------------- every strategy, against a plain loop
CASES = {
    "plain": Case(epochs=EPOCHS),
    "clip_norm": Case(epochs=EPOCHS, clip_norm=0.3),
    "accumulate": Case(epochs=EPOCHS, accumulate=3),
    "accumulate_clip": Case(epochs=EPOCHS, accumulate=3, clip_norm=0.3),
    "clip_value": Case(epochs=EPOCHS, clip_value=0.02),
    "adamw": Case(epochs=EPOCHS, optimizer="adamw", clip_norm=0.3),
}


def train_all_cases(name: str) -> dict[str, Trained]:
    deepspeed = name.startswith("zero")
    return {key: train(name, case) for key, case in CASES.items() if not (deepspeed and case.clip_value)}


@pytest.mark.core("fsdp2]", "ddp", "zero2]")
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_that_of_a_plain_loop_that_skips_the_same_steps(name: str) -> None:
    for found in run_on_ranks(2, train_all_cases, name, timeout_s=200):
        for key, trained in found.items():
            expected = train_plain(CASES[key], 2)
            assert 3 <= len(expected.skipped) < expected.global_step
            assert_same(trained, expected)


def test_a_single_device() -> None:
    for key, trained in run_on_ranks(1, train_all_cases, "auto", timeout_s=100)[0].items():
        assert_same(trained, train_plain(CASES[key], 1))


# ---------------------------------------------------------------------- resuming
def stop_and_resume(name: str, other: str, path: str, case: Case) -> Trained:
    before = train(name, Case(epochs=2, accumulate=case.accumulate, clip_norm=case.clip_norm), save_to=path)
    after = train(other, case, skipped_before=len(before.skipped), ckpt_path=path)
    after.skipped, after.rates = before.skipped + after.skipped, before.rates + after.rates
    return after


@pytest.mark.core("fsdp2-fsdp2", "ddp-ddp")
@pytest.mark.parametrize("key", ["accumulate_clip", "plain"])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("fsdp1", "fsdp1"),
        ("fsdp2", "fsdp2"),
        ("fsdp1", "fsdp2"),
        ("ddp", "ddp"),
        ("zero2", "zero2"),
        ("zero3", "zero3"),
    ],
)
def test_a_run_that_resumes_decides_alike(name: str, other: str, key: str, tmp_path: Path) -> None:
    expected = train_plain(CASES[key], 2)
    steps_before = 2 * math.ceil(NUM_MICRO_BATCHES / CASES[key].accumulate)
    assert steps_before + 1 in expected.skipped  # by norms from before the checkpoint
    for found in run_on_ranks(2, stop_and_resume, name, other, f"{tmp_path}/saved.ckpt", CASES[key], timeout_s=200):
        assert_same(found, expected)


# ---------------------------------------------------------------------- fp16: the scaler's own skips
class Half(Poisoned):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0].half(), batch[1]], batch_idx)


class Scale(Callback):
    """Begins with one that nothing overflows."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.scaler: Any = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": 64.0})


FEW = {(0, 4): math.nan, (1, 2): 100.0}


def train_in_fp16(name: str) -> tuple[Trained, float, int]:
    case = Case(epochs=EPOCHS, precision="16-mixed")
    step_guard, module = guard(max_norm=10.0, spike_factor=None), Half(case, FEW)
    if not name.startswith("zero"):
        scale = Scale()
        plugins = None if name.startswith("fsdp") else [MixedPrecision("16-mixed", "cpu")]
        found = train(name, case, callbacks=[step_guard, scale], module=module, plugins=plugins)
        return found, scale.scaler.get_scale(), step_guard.num_skipped
    with fp16_on_cpu():
        found = train(name, case, callbacks=[step_guard], module=module)
    strategy: Any = module.trainer.strategy
    return found, strategy.deepspeed_engine.optimizer.loss_scale, step_guard.num_skipped


@pytest.mark.core("fsdp2", "zero2")
@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "ddp", "zero2_fp16", "zero3_fp16"])
def test_in_fp16_the_scaler_skips_overflows_and_the_guard_spikes(name: str) -> None:
    expected = train_plain(CASES["plain"], 2, FEW)
    assert expected.skipped == [5, 10]
    for found, scale, num_skipped in run_on_ranks(2, train_in_fp16, name, timeout_s=100):
        assert (found.skipped, num_skipped) == ([10], 1)
        assert scale == 32.0  # for the NaN, and not for the spike
        assert found.rates == pytest.approx(expected.rates)  # schedules wait for both
        for key, value in expected.weights.items():  # fp16 has 11 bits
            torch.testing.assert_close(found.weights[key], value, rtol=0.02, atol=0.02, check_dtype=False)


# ---------------------------------------------------------------------- too many in a row
def skip_too_many(name: str, folder: str) -> tuple[str, int, list[Any], dict[str, Any]]:
    case = Case(epochs=1)
    poison = {(0, batch): math.nan for batch in (1, 3, 4, 5)}
    step_guard = guard(max_consecutive_skips=2, save_batches_to=folder)
    module = Poisoned(case, poison)
    with pytest.raises(RuntimeError, match="StepGuard skipped 3 optimizer steps in a row") as raised:
        train(name, case, callbacks=[step_guard], module=module)
    state: Any = module.trainer.strategy
    plugin = module.trainer.precision_plugin
    assert "_clip_gradients" not in vars(plugin)
    assert "lr_scheduler_step" not in vars(module)
    return str(raised.value), step_guard.num_skipped, module.found.rates, {"rank": state.global_rank}


@pytest.mark.core("fsdp2", "ddp")
@pytest.mark.parametrize("name", ["fsdp2", "ddp", "zero2"])
def test_more_than_so_many_in_a_row_end_the_run_on_all_ranks(name: str, tmp_path: Path) -> None:
    for message, num_skipped, rates, _ in run_on_ranks(2, skip_too_many, name, str(tmp_path), timeout_s=100):
        assert "max_consecutive_skips=2: 4 (norm " in message
        assert ", 5 (norm " in message
        assert ", 6 (norm " in message
        assert num_skipped == 4
        assert rates == pytest.approx([0.09, 0.09, 0.081, 0.081, 0.081])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step{step:08d}-rank{rank}.pt" for step in (2, 4, 5, 6) for rank in (0, 1)]
    saved = torch.load(tmp_path / "step00000004-rank1.pt", weights_only=False)
    assert (saved["step"], saved["epochs"], saved["batch_indices"]) == (4, [0], [3])
    assert not math.isfinite(saved["norm"])
    assert math.isnan(saved["losses"][0])
    inputs, targets = dataset(2).tensors
    assert torch.equal(saved["batches"][0][0], inputs[[13, 15]])  # micro-batch 3 of rank 1
    assert saved["batches"][0][1][0].isnan().all()
    assert torch.equal(saved["batches"][0][1][1], targets[15])


def fail_to_save(folder: str) -> int:
    step_guard = guard(save_batches_to=f"{folder}/file/inside")
    train("fsdp2", Case(epochs=1), callbacks=[step_guard])
    return step_guard.num_skipped


def test_a_batch_that_cannot_be_saved_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run_on_ranks(2, fail_to_save, str(tmp_path)) == [1, 1]


# ---------------------------------------------------------------------- going back, without the batches
BAD = {(0, 4): math.nan, **{(1, batch): math.nan for batch in (2, 3, 4)}}


class SavesEpoch(Callback):
    """Saves at the end of an epoch, and after one batch."""

    def __init__(self, path: str, epoch: int = 0, place: tuple[int, int] | None = None) -> None:
        self.path, self.epoch, self.place = path, epoch, place

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if self.place is None and trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.place == (trainer.current_epoch, batch_idx):
            trainer.save_checkpoint(self.path)


def go_back(
    name: str, case: Case, folder: str, before: int, poison: dict[tuple[int, int], float] = BAD
) -> tuple[Trained, str]:
    """Fail, and fit again with the same guard from the checkpoint before."""
    path = f"{folder}/saved.ckpt"
    step_guard = guard(
        max_consecutive_skips=1,
        leave_out_file=f"{folder}/run/left_out.json",
        leave_out_before=before,
    )
    module = Poisoned(case, poison)
    with pytest.raises(RuntimeError, match="optimizer steps in a row") as raised:
        train(name, case, callbacks=[step_guard, SavesEpoch(path)], module=module)
    before_it = module.found.rates[: math.ceil(NUM_MICRO_BATCHES / case.accumulate)]
    num_before = sum(epoch == 0 for epoch, _ in poison)
    after = train(name, case, poison, callbacks=[step_guard], skipped_before=num_before, ckpt_path=path)
    after.rates = [*before_it, *after.rates]
    return after, str(raised.value)


@pytest.mark.core("plain-1-fsdp2]", "plain-0-ddp")
@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "ddp", "zero2", "zero3", "fsdp2_offload"])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("key", ["plain", "clip_norm"])
def test_a_run_goes_back_and_leaves_the_batches_out(key: str, before: int, name: str, tmp_path: Path) -> None:
    steps = [10, 11] if before == 0 else [9, 10, 11]  # 12 is skipped for its norm
    expected = train_plain(CASES[key], 2, BAD, left_out=steps)
    assert expected.skipped == [5, *steps, 12]
    for found, message in run_on_ranks(2, go_back, name, CASES[key], str(tmp_path), before, timeout_s=100):
        found.skipped = [5, *found.skipped]
        assert_same(found, expected)
        assert f"left_out.json lists their batches now, from batch {2 - before} of epoch 1 to batch 3 of" in message
    [entry] = json.loads((tmp_path / "run/left_out.json").read_text())
    assert entry == {"first": [1, 2 - before], "last": [1, 3], "num_processes": 2, "num_batches": NUM_MICRO_BATCHES}


def test_a_window_is_left_out_as_a_whole(tmp_path: Path) -> None:
    poison = {(1, 2): math.nan, (1, 4): math.nan}
    expected = train_plain(CASES["accumulate"], 2, poison, left_out=[4, 5])
    for found, _ in run_on_ranks(2, go_back, "fsdp2", CASES["accumulate"], str(tmp_path), 0, poison):
        assert_same(found, expected)
    [entry] = json.loads((tmp_path / "run/left_out.json").read_text())
    assert (entry["first"], entry["last"]) == ([1, 0], [1, 5])


def test_a_single_device_goes_back(tmp_path: Path) -> None:
    [(found, _)] = run_on_ranks(1, go_back, "auto", CASES["plain"], str(tmp_path), 0)
    found.skipped = [5, *found.skipped]
    assert_same(found, train_plain(CASES["plain"], 1, BAD, left_out=[10, 11]))


def leave_out(case: Case, file: str, options: dict[str, Any], stops: bool = False) -> tuple[Trained, list[str]]:
    """Train with a file, from a checkpoint in the middle of an epoch if it ``stops``."""
    path = str(Path(file).with_name("saved.ckpt"))
    before = train("fsdp2", case, {}, callbacks=[guard(), SavesEpoch(path, place=(1, 2))]) if stops else Trained()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(
            "fsdp2", case, {}, callbacks=[guard(leave_out_file=file, **options)], ckpt_path=path if stops else None
        )
    found.rates = [*before.rates[: len(before.rates) - len(found.rates)], *found.rates]
    return found, [
        str(each.message) for each in caught if "left out" in str(each.message) or "leave" in str(each.message)
    ]


ENTRY = {"first": [1, 1], "last": [1, 3], "num_processes": 2, "num_batches": NUM_MICRO_BATCHES}


def test_a_list_written_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "left_out.json"
    entries = [ENTRY, {**ENTRY, "first": [1, 6], "last": [2, 0]}]
    file.write_text(json.dumps(entries))
    steps = [9, 10, 11, 14, 15]
    (found, warned), (_, silent) = run_on_ranks(2, leave_out, CASES["plain"], str(file), {})
    assert_same(found, train_plain(CASES["plain"], 2, {}, left_out=steps))
    assert warned[0] == f"StepGuard left out optimizer step 9: {file} lists batches 1 of epoch 1."
    assert (len(warned), silent) == (5, [])


@pytest.mark.parametrize("other", [{"num_processes": 4}, {"num_batches": None}])
def test_batches_of_other_sizes_are_not_left_out(other: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "left_out.json"
    file.write_text(json.dumps([{**ENTRY, **other}]))
    (found, warned), _ = run_on_ranks(2, leave_out, CASES["plain"], str(file), {})
    assert_same(found, train_plain(CASES["plain"], 2, {}))
    numbers = tuple({**ENTRY, **other}.values())[2:]
    [warning] = warned
    assert warning.startswith(
        f"StepGuard does not leave out what {file} lists for num_processes, num_batches of {numbers}"
    )
    assert "this run has (2, 7), and other samples in its batches. Resume with those numbers" in warning


def test_a_checkpoint_between_the_steps_to_leave_out_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "left_out.json"
    file.write_text(json.dumps([ENTRY]))
    (_, warned), _ = run_on_ranks(2, leave_out, CASES["plain"], str(file), {"leave_out_before": 1}, True)
    assert warned[0].startswith(f"This run resumes at batch 3 of epoch 1, and {file} lists the batches from batch 1 of")
    assert "Resume from an earlier one." in warned[0]
    (_, warned), _ = run_on_ranks(2, leave_out, CASES["plain"], str(file), {}, True)  # skipped steps changed nothing
    assert [each for each in warned if "resumes at" in each] == []


def read_damaged(file: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)left_out.json failed on rank 0: .*Mend it, or remove it"):
        train("fsdp2", Case(epochs=1), {}, callbacks=[guard(leave_out_file=file)])


@pytest.mark.parametrize("text", ["", "[", "{}x", '[{"first": [0, 1]}]', '[{"first": 1, "last": [0, 1], "num": 2}]'])
def test_a_damaged_list_ends_the_run_on_all_ranks(text: str, tmp_path: Path) -> None:
    file = tmp_path / "left_out.json"
    file.write_text(text)
    run_on_ranks(2, read_damaged, str(file))


def fail_to_write(file: str) -> None:
    step_guard = guard(leave_out_file=file, max_consecutive_skips=0)
    with pytest.raises(RuntimeError, match=r"in a row, .* Adding their batches to .* failed on rank 0"):
        train("fsdp2", Case(epochs=1), callbacks=[step_guard])


def test_a_list_that_cannot_be_written_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_on_ranks(2, fail_to_write, f"{tmp_path}/file/left_out.json")


class EndsEarly(Poisoned):
    """Ends the first epoch in the middle of a window, which Lightning drops."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (0, 1) else None


def warnings_of(name: str, ends_early: bool) -> list[str]:
    case = Case(epochs=2, accumulate=3)
    module = EndsEarly(case, {(1, 2): math.inf}) if ends_early else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(name, case, module=module)
    return [str(each.message) for each in caught if "StepGuard" in str(each.message)]


def test_each_skip_is_one_warning_on_rank_zero() -> None:
    first, second = run_on_ranks(2, warnings_of, "fsdp2", False)
    assert second == []
    assert len(first) == 2
    assert first[0].startswith(
        "StepGuard skipped optimizer step 2: the gradient norm nan. Loss nan (not finite on rank 1)"
    )
    assert first[0].endswith(
        "; batches 3 of epoch 0, 4 of epoch 0, 5 of epoch 0; samples of rank 1: 13, 15, 17, 19, 21, 23."
    )
    assert re.search(r"step 4: the gradient norm \S+ is above .* \(largest \S+ on rank 1\)", first[1])


def test_batches_of_a_window_that_lightning_dropped_are_not_in_it() -> None:
    [warning] = run_on_ranks(2, warnings_of, "fsdp2", True)[0]
    assert warning.endswith("; batches 0 of epoch 1, 1 of epoch 1, 2 of epoch 1; samples of rank 1: 1, 3, 5, 7, 9, 11.")


# ---------------------------------------------------------------------- the samples of a skipped step
SHUFFLED, IN_ORDER, OWN_SAMPLER, DRAWN = "shuffled", "in order", "own sampler", "drawn by a generator"


def numbered_loader(kind: str, num_workers: int) -> DataLoader[Any]:
    """Batches whose third part are the samples' indices."""
    inputs, targets = dataset(2).tensors
    data = TensorDataset(inputs, targets, torch.arange(len(inputs)))
    options: dict[str, Any] = {"shuffle": kind == SHUFFLED}
    if kind == OWN_SAMPLER:
        options = {"sampler": DistributedSampler(data, shuffle=True)}
    if kind == DRAWN:
        options = {"sampler": WeightedRandomSampler([1.0] * len(data), len(data))}
    if num_workers:
        options |= {"num_workers": num_workers, "multiprocessing_context": "fork"}  # the fastest
    return DataLoader(data, BATCH_SIZE, **options)


def skip_all(name: str, loader: Any, folder: str, epochs: int, **more: Any) -> int:
    """Skip each step, whose batches the guard saves with their indices; return how many names were right."""
    folder, size = f"{folder}{dist.get_rank()}", dist.get_world_size()
    shutil.rmtree(folder, ignore_errors=True)
    step_guard = guard(max_norm=1e-9, max_consecutive_skips=100, save_batches_to=folder)
    callbacks = [step_guard, *more.pop("callbacks", [])]
    trainer = quiet_trainer(
        strategy_called(name), size, max_epochs=epochs, accumulate_grad_batches=2, callbacks=callbacks
    )
    trainer.fit(Poisoned(Case(), {}), loader, **more)
    num_right = 0
    for path in Path(folder).iterdir():
        saved = torch.load(path, weights_only=False)
        for indices, batch in zip(saved["dataset_indices"], saved["batches"], strict=True):
            if indices is not None:
                assert indices == batch[2].tolist()
                num_right += 1
    reset_state()
    return num_right


def name_samples(name: str, kind: str, num_workers: int, folder: str) -> list[int]:
    path = f"{folder}/saved.ckpt"
    loader = numbered_loader(kind, num_workers)
    found = [skip_all(name, loader, f"{folder}/skipped", 2, callbacks=[SavesEpoch(path, 1)])]
    found.append(skip_all(name, loader, f"{folder}/skipped", 1))  # its own sampler has the epoch of the fit before
    found.append(skip_all(name, loader, f"{folder}/skipped", 4, ckpt_path=path, weights_only=False))
    within = SavesEpoch(path, place=(0, 3))
    skip_all(name, loader, f"{folder}/skipped", 1, callbacks=[within])
    found.append(skip_all(name, loader, f"{folder}/skipped", 2, ckpt_path=path, weights_only=False))
    return found


@pytest.mark.core("0-shuffled-fsdp2", "2-own sampler-ddp")
@pytest.mark.parametrize("name", ["fsdp2", "ddp", "zero2", "auto"])
@pytest.mark.parametrize("kind", [SHUFFLED, IN_ORDER, OWN_SAMPLER, DRAWN])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_those_of_the_dataset(num_workers: int, kind: str, name: str, tmp_path: Path) -> None:
    size = 1 if name == "auto" else 2
    num_batches = NUM_MICRO_BATCHES * 2 // size
    expected = [2 * num_batches, num_batches, 2 * num_batches, num_batches]
    if kind == DRAWN or (kind == SHUFFLED and size == 1):
        expected = [0, 0, 0, 0]
    for found in run_on_ranks(size, name_samples, name, kind, num_workers, str(tmp_path), timeout_s=200):
        assert found == expected


def stop_between(path: str) -> tuple[dict[str, Any], str]:
    """Save between skipped steps, and resume where the next is skipped, too."""
    case = Case(epochs=1)
    poison = {(0, batch): math.nan for batch in range(3, NUM_MICRO_BATCHES)}

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.save_checkpoint(path)

    train("fsdp2", case, poison, callbacks=[guard(), Saves()])
    state = torch.load(path, weights_only=True)["callbacks"]["StepGuard"]
    every = {(0, batch): math.nan for batch in range(NUM_MICRO_BATCHES)}
    with pytest.raises(RuntimeError, match="3 optimizer steps in a row") as raised:
        train("fsdp2", case, every, callbacks=[guard(max_consecutive_skips=2)], skipped_before=2, ckpt_path=path)
    return state, str(raised.value)


def test_checkpoints_have_the_skips_in_a_row(tmp_path: Path) -> None:
    for state, message in run_on_ranks(2, stop_between, f"{tmp_path}/saved.ckpt", timeout_s=100):
        assert state["num_skipped"] == 2
        assert [step for step, _ in state["skipped_in_a_row"]] == [4, 5]
        assert len(state["norms"]) == WINDOW
        assert ": 4 (norm nan), 5 (norm nan), 6 (norm nan)." in message


# ---------------------------------------------------------------------- reductions
def count_reductions(name: str, case: Case) -> tuple[int, int]:
    """Reductions with the guard beyond those without it, and the number of steps without those skipped."""
    counts: list[int] = []
    original = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return original(*args, **kwargs)

    dist.all_reduce = counting
    steps = 0
    try:
        for callbacks in ([StepGuard(max_norm=1e9, spike_factor=None)], []):
            counts.append(0)
            size = PartialState().num_processes
            trainer = quiet_trainer(
                strategy_called(name),
                size,
                max_epochs=1,
                accumulate_grad_batches=case.accumulate,
                gradient_clip_val=case.clip_norm,
                callbacks=callbacks,
            )
            trainer.fit(Poisoned(case, {}), rank_loader(size))
            steps = trainer.global_step
            reset_state()
    finally:
        dist.all_reduce = original
    return counts[0] - counts[1], steps


@pytest.mark.parametrize(
    ("name", "case", "each_step"),
    [
        ("fsdp1", Case(clip_norm=0.5), 0),
        ("fsdp2", Case(clip_norm=0.5, accumulate=3), 0),
        ("fsdp2", Case(), 1),
        ("ddp", Case(clip_norm=0.5), 1),
    ],
)
def test_reductions_for_each_step(name: str, case: Case, each_step: int) -> None:
    for more, steps in run_on_ranks(2, count_reductions, name, case, timeout_s=100):
        assert more == each_step * steps


# ---------------------------------------------------------------------- with others
class CountsInGroups(torch.optim.SGD):
    """Counts its steps where some optimizers do, and has a rate of its own that follows them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group.update(k=0, total=torch.zeros(1))

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += 1
        super().step()
        return loss


class Counted(Poisoned):
    def configure_optimizers(self) -> Any:
        return CountsInGroups(self.parameters())


def train_with_others(name: str) -> tuple[Any, ...]:
    case = Case(epochs=EPOCHS)
    ema, monitor, step_guard = ShardedEMA(decay=0.5), GradNormMonitor(), guard()
    norms: list[float] = []

    class Norms(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            norms.append(float(monitor.last["grad_norm"]))

    counts: tuple[int, float] = (0, 0.0)
    if not name.startswith("zero"):
        module: Poisoned = Counted(case, POISON)
        train(name, case, callbacks=[step_guard], module=module)
        [group] = module.trainer.optimizers[0].param_groups
        counts = group["k"], float(group["total"])
    found = train(name, case, callbacks=[ema, monitor, step_guard, Norms()])
    return found, norms, ema.num_averaged, counts


@pytest.mark.core("fsdp2", "zero2")
@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "ddp", "zero2", "zero3"])
def test_averages_monitored_norms_and_counts_of_optimizers(name: str) -> None:
    expected = train_plain(CASES["plain"], 2)
    for found, norms, num_averaged, (k, total) in run_on_ranks(2, train_with_others, name, timeout_s=100):
        assert_same(found, expected)
        assert num_averaged == expected.global_step  # as for steps that overflow in fp16
        assert not math.isfinite(norms[4])
        assert max(norms[:4]) < 10 < norms[9]
        if not name.startswith("zero"):
            num_taken = expected.global_step - len(expected.skipped)
            assert k == total == num_taken


class NormsOfDeepSpeed(Callback):
    """What `AccelDeepSpeedStrategy.grad_norm` says before each step, and DeepSpeed after it."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self.before = float(trainer.strategy.grad_norm())  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.found):
            self.found.append((self.before, float(trainer.strategy.last_grad_norm)))  # type: ignore[attr-defined]


def norms_of_deepspeed(stage: int) -> list[tuple[float, float]]:
    norms, plugin = NormsOfDeepSpeed(), GradientAccumulationPlugin(short_windows="mean")  # multiplies in the step
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 64}}
    strategy = AccelDeepSpeedStrategy(hf_ds_config=config, gradient_accumulation=plugin)
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3, "callbacks": [norms]}
    quiet_trainer(strategy, 2, max_epochs=2, **options).fit(Poisoned(Case(), {}), rank_loader(2))
    return norms.found


@pytest.mark.core("2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_before_the_step_is_deepspeeds(stage: int) -> None:
    first, second = run_on_ranks(2, norms_of_deepspeed, stage, timeout_s=100)
    assert first == second
    assert len(first) == 6
    for before, after in first:
        assert before == pytest.approx(after, rel=1e-5)
        assert before > 0.01


class ClipsItself(Poisoned):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


def clip_in_a_hook(name: str) -> Trained:
    case = Case(epochs=EPOCHS)
    return train(name, case, module=ClipsItself(case, POISON))


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("name", ["fsdp2", "ddp", "zero2"])
def test_clipping_in_a_hook_of_the_module(name: str) -> None:
    for found in run_on_ranks(2, clip_in_a_hook, name):
        assert_same(found, train_plain(CASES["clip_norm"], 2))


class Cut(cut_model.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * {1: 1e4, 2: math.nan}.get(batch_idx, 1.0)


def train_cut(tp: int, clip: float | None) -> tuple[int, dict[str, Tensor]]:
    plan = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise", "net.head": "colwise_rep"}
    strategy = AccelFSDPStrategy(
        fsdp_version=2,
        auto_wrap_policy={cut_model.Block},
        parallelism_config=ParallelismConfig(tp_size=tp),
        tp_plan=plan if tp > 1 else None,
    )
    step_guard, module, size = guard(max_norm=1e3, spike_factor=None), Cut(), dist.get_world_size()
    trainer = quiet_trainer(strategy, size, max_epochs=1, gradient_clip_val=clip, callbacks=[step_guard])
    trainer.fit(module, cut_model.loader(size // tp))
    return step_guard.num_skipped, {k: v.clone() for k, v in strategy.full_state_dict(module).items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("clip", [None, 0.05])
def test_layers_cut_over_processes(clip: float | None) -> None:
    [(num_skipped, expected)] = run_on_ranks(1, train_cut, 1, clip, timeout_s=100)
    assert num_skipped == 2
    for skipped, weights in run_on_ranks(2, train_cut, 2, clip, timeout_s=100):
        assert skipped == 2
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def train_again_after_an_error(name: str) -> Trained:
    """A fit that ends with too many skips, then another of the same module, from where the weights are."""
    case = Case(epochs=1)
    module = Poisoned(case, {(0, 0): math.nan})
    step_guard = guard(max_consecutive_skips=0)
    with pytest.raises(RuntimeError, match="in a row"):
        train(name, case, callbacks=[step_guard], module=module)
    module.poison, module.found = {}, Trained()
    return train(name, case, callbacks=[step_guard], module=module)


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "ddp", "zero2"])
def test_another_fit_after_the_error(name: str) -> None:
    for found in run_on_ranks(2, train_again_after_an_error, name):
        assert_same(found, train_plain(Case(epochs=1), 2, {}))


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_norm": 0.0}, "max_norm must be > 0 or None, got 0.0"),
        ({"spike_factor": math.nan}, "spike_factor must be > 0 or None"),
        ({"window": 1}, "window must be an int >= 2, got 1"),
        ({"max_consecutive_skips": True}, "max_consecutive_skips must be an int >= 0"),
        ({"save_batches_to": "s3://bucket/batches"}, "save_batches_to must be on a file system"),
        ({"leave_out_file": "s3://bucket/left_out.json"}, "leave_out_file must be on a file system"),
        ({"leave_out_before": -1}, "leave_out_before must be an int >= 0, got -1"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        StepGuard(**options)


class Manual(Poisoned):
    def __init__(self) -> None:
        super().__init__(Case(), {})
        self.automatic_optimization = False


class Lbfgs(Poisoned):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refuse(what: str) -> None:
    case = Case(epochs=1)
    if what == "manual":
        with pytest.raises(ValueError, match="StepGuard skips steps in automatic optimization"):
            train("fsdp2", case, module=Manual())
    elif what == "lbfgs":
        with pytest.raises(ValueError, match="StepGuard cannot skip a step of LBFGS"):
            train("auto", case, module=Lbfgs(case, {}))
    else:
        module = Poisoned(Case(optimizer="fused_adamw"), {})
        with pytest.raises(ValueError, match="A fused AdamW unscales fp16 gradients inside its step"):
            train("auto", case, module=module, plugins=[MixedPrecision("16-mixed", "cpu")])


@pytest.mark.parametrize("what", ["manual", "lbfgs", "fused"])
def test_what_cannot_skip_is_refused(what: str) -> None:
    run_on_ranks(1, refuse, what)


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_other_strategies_are_refused(strategy: type, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer("auto", 1)
    monkeypatch.setattr(Trainer, "strategy", strategy())
    with pytest.raises(ValueError, match=f"StepGuard cannot skip steps of {strategy.__name__}"):
        StepGuard().setup(trainer, Poisoned(Case(), {}), "fit")


@hypothesis.given(
    st.lists(st.one_of(st.floats(1e-6, 1e6), st.sampled_from([1.0, 1.5, 2.0, math.inf])), min_size=8, max_size=40),
    st.floats(0.5, 20.0),
)
def test_spikes_are_those_of_medians_over_the_window(norms: list[float], spike_factor: float) -> None:
    guard, before = StepGuard(spike_factor=spike_factor, window=5), list[float]()
    for norm in norms:
        is_spike = False
        if len(before) >= 5:
            median = statistics.median(before[-5:])
            deviation = 1.4826 * statistics.median(abs(one - median) for one in before[-5:])
            threshold = median + spike_factor * max(deviation, 0.1 * median)
            is_spike = not norm <= threshold
            hypothesis.assume(not math.isclose(norm, threshold, rel_tol=1e-9))  # the order of products
        assert (not norm <= guard._threshold(norm)) == is_spike
        if not is_spike and math.isfinite(norm):
            before.append(norm)
            guard._norms.add(norm)
    assert guard.state_dict()["norms"] == before[-5:]
