"""`Watchdog` names the process that the others wait for, and changes nothing about the training."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import Watchdog
from accelight.callbacks.watchdog import _join_ranks, _Limits, _timings
from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.common import sections
from accelight.strategies.common.sections import PARTS, SECTIONS, SectionClock, Spread, Timings, section_of
from accelight.strategies.upstream.patches import Patches
from tests.log_messages import log_messages
from tests.ranks import run_on_ranks
from tests.slowness import slowness
from tests.strategies.oracle import Case, Outcome, TinyModule, dataset, full_weights, quiet_trainer, strategy_called

STALLS_AT = 4
"""Micro-batch: the Trainer has done everything at least three times by then."""
PLACES = ("data", "forward", "backward", "optimizer", "hooks", "validation", "save", "epoch")
LIMITS: dict[str, Any] = {"min_limit_s": 1.5, "every_s": 0.2, "first_limit_s": 60.0}


class Stall:
    """Stands still, once, on the last process, until that is reported."""

    def __init__(self, folder: Path, ranks: tuple[int, ...]) -> None:
        self.folder, self.is_armed = folder, True
        self.ranks = ranks
        """Those that then write their stacks."""

    def __call__(self) -> None:
        rank = dist.get_rank()
        if not self.is_armed or rank != dist.get_world_size() - 1:
            return
        self.is_armed = False
        deadline = time.monotonic() + 60 * slowness()
        while not (
            any(f"process {rank} " in text.split("\n")[0] for text in reports(self.folder))
            and all(list(self.folder.glob(f"rank{each}-step*.txt")) for each in self.ranks)
        ):
            assert time.monotonic() < deadline, "not reported"
            time.sleep(0.05)


class Stalling(TinyModule):
    """Stalls at one place."""

    def __init__(self, place: str, stall: Stall) -> None:
        super().__init__(Case(), Outcome())
        self.place, self.stall = place, stall

    def at(self, place: str, is_now: bool) -> None:
        if place == self.place and is_now:
            self.stall()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.at("forward", batch_idx == STALLS_AT)
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.at("backward", self.trainer.fit_loop.batch_idx == STALLS_AT)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("optimizer", self.trainer.global_step == STALLS_AT)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("hooks", batch_idx == STALLS_AT)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.at("validation", batch_idx == STALLS_AT)

    def on_train_epoch_end(self) -> None:
        self.at("epoch", True)


class SavesOften(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: Any) -> None:
        module.at("save", trainer.global_step == STALLS_AT)


class StallingData(TensorDataset):
    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.stall: Stall | None = None
        self.num_read = 0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.num_read += 1
        if self.stall is not None and self.num_read == 2 * STALLS_AT:
            self.stall()
        return super().__getitem__(index)


def reports(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("hang*.txt"))]


def fit(name: str, place: str, folder: str, watched: bool = True) -> dict[str, Tensor]:
    root = Path(folder)
    stall = Stall(
        root / "watchdog", (0, 1) if place not in ("validation", "epoch") else (1,)
    )  # process 0 may have left
    data = StallingData(*dataset(dist.get_world_size()).tensors)
    module, weights = Stalling(place if watched else "", stall), {}

    class AtEnd(Callback):
        def on_train_end(self, trainer: Trainer, module: Any) -> None:
            weights.update(full_weights(trainer.strategy))

    if watched and place == "data":
        data.stall = stall
    watchdog = Watchdog(dirpath=root / "watchdog", limits={"on_train_epoch_end": 1.5}, **LIMITS)
    trainer = quiet_trainer(
        strategy_called(name),
        dist.get_world_size(),
        max_epochs=1,
        limit_val_batches=None if place == "validation" else 0,
        callbacks=[
            *([watchdog] if watched else []),
            *([SavesOften(root)] if place == "save" else []),
            AtEnd(),
        ],
    )
    trainer.fit(module, DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
    return weights


@pytest.mark.core("ddp-data")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["fsdp1_orig_params", "fsdp2", "zero2", "zero3", "ddp"])
def test_a_process_that_stands_still_is_named_with_its_place(name: str, place: str, tmp_path: Path) -> None:
    found = run_on_ranks(2, fit, name, place, str(tmp_path), timeout_s=150)
    [text] = [each for each in reports(tmp_path / "watchdog") if "process 1 " in each.split("\n")[0]][:1]
    cause, *table = text.split("\n")
    section = {"epoch": "hooks"}.get(place, place)
    where = rf"Watchdog: process 1 \(\S+\) stands still in {section}, "
    assert re.match(where + r"\S*.* for [0-9.]+ s, limit 1.5 s\.", cause)
    one = next(line for line in table if line.startswith("1 "))
    assert "stands still" in one  # the line that it is in
    assert "test_watchdog.py" in one
    if place not in ("validation", "epoch"):  # in which no process needs the other
        assert any(line.startswith("0 ") and "waits for " in line for line in table)
    for rank in (0, 1) if place not in ("validation", "epoch") else (1,):
        [stacks] = (tmp_path / "watchdog").glob(f"rank{rank}-step*.txt")
        assert "most recent call first" in stacks.read_text()
    expected = run_on_ranks(2, fit, name, place, str(tmp_path), False)
    for one_found, one_expected in zip(found, expected, strict=True):
        assert one_found.keys() == one_expected.keys()
        assert one_found
        assert all(torch.equal(one_found[key], one_expected[key]) for key in one_found)


# ------------------------------------------------------------------ one process
class Pausing(Callback):
    """Stands still in one batch until this is reported, and in the next one until it is reported that it continues."""

    def __init__(self, folder: Path, messages: Callable[[], list[str]]) -> None:
        self.folder, self.messages = folder, messages

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        deadline = time.monotonic() + 60 * slowness()
        while not (
            batch_idx < STALLS_AT
            or (batch_idx == STALLS_AT and reports(self.folder))
            or (batch_idx > STALLS_AT and "Watchdog: process 0 continues." in self.messages())
        ):
            assert time.monotonic() < deadline, self.messages()
            time.sleep(0.02)


def fit_alone(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    class Module(TinyModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    trainer = quiet_trainer("auto", 1, max_epochs=1, default_root_dir=folder, callbacks=list(callbacks), **options)
    trainer.fit(Module(Case(), Outcome()), DataLoader(dataset(1), batch_size=2))
    return trainer


def test_one_process_reports_a_hang_and_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def messages() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name.endswith("watchdog")]

    watchdog, profiler = Watchdog(min_limit_s=0.4, every_s=0.1, limits={"setup": 60}), SimpleProfiler()
    fit_alone(tmp_path, watchdog, Pausing(tmp_path / "watchdog", messages), profiler=profiler)
    report, *_ = reports(tmp_path / "watchdog")
    assert "stands still in hooks, [Callback]Pausing.on_train_batch_end" in report
    assert report.rstrip() in messages()
    assert "profile" not in vars(profiler)
    assert "[Callback]Pausing.on_train_batch_end" in profiler.recorded_durations
    assert Timings.from_json((tmp_path / "watchdog" / "timings.json").read_text()).num_batches == [7]


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert fit_alone(tmp_path, Watchdog(dirpath=tmp_path / "file")).global_step == 7
    assert f"Watchdog cannot write to {tmp_path / 'file'}: " in caplog.text


@pytest.mark.exhaustive
def test_a_slow_start_and_fixed_limits_are_no_alarm(tmp_path: Path) -> None:
    class SlowAtFirst(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(3.0 if batch_idx < 2 else 0)

        def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
            time.sleep(3.0)

    limits: dict[str, Any] = {"min_limit_s": 2.0, "every_s": 0.1}
    fit_alone(tmp_path, Watchdog(first_limit_s=60, **limits), SlowAtFirst())
    fit_alone(tmp_path, Watchdog(first_limit_s=2.5, limits={"hooks": 60, "setup": 60}, **limits), SlowAtFirst())
    assert not reports(tmp_path / "watchdog")
    fit_alone(tmp_path, Watchdog(first_limit_s=2.5, limits={"setup": 60}, **limits), SlowAtFirst())
    assert reports(tmp_path / "watchdog")


@pytest.mark.exhaustive
@pytest.mark.parametrize("can_write", [True, False])
def test_abort_ends_the_process_with_status_75(can_write: bool, tmp_path: Path) -> None:
    folder = tmp_path / "watchdog"
    if not can_write:
        folder.touch()
    script = f"""
import time, torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from accelight.callbacks import Watchdog

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        while batch_idx == 8:
            pass
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, callbacks=[Watchdog("abort", min_limit_s=1, every_s=0.2, dirpath={str(folder)!r})])
trainer.fit(Module(), DataLoader(torch.ones(64, 4), batch_size=4))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 75, done.stderr
    assert "process 0 hangs: process 0 ends with exit status 75" in done.stderr
    if can_write:
        assert "in training_step" in (folder / "rank0-step8.txt").read_text()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on_hang": "stop"}, "on_hang must be 'report' or 'abort', got 'stop'"),
        ({"factor": 1.0}, "Factors must be > 1"),
        ({"straggler_factor": 0.5}, "Factors must be > 1"),
        ({"min_limit_s": 0}, "min_limit_s must be > 0 seconds, got 0"),
        ({"limits": {"data": -1}}, "must be > 0 seconds, got -1"),
        ({"limits": {"dataa": 5}}, "limits has 'dataa': name a hook, or a section: data, forward"),
        ({"straggler_reports": 0}, "straggler_reports must be >= 1"),
        ({"dirpath": "s3://bucket/stacks"}, "dirpath must be on a file system"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        Watchdog(**options)


def test_timings_need_a_run_and_a_watchdog() -> None:
    with pytest.raises(RuntimeError, match="only while the Trainer runs"):
        Watchdog().timings()
    with pytest.raises(RuntimeError, match=r"needs Trainer\(callbacks=\[Watchdog"):
        AccelFSDPStrategy().timings()


# ------------------------------------------------------------------ slow processes
class SlowData(TensorDataset):
    seconds = 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        time.sleep(self.seconds)
        return super().__getitem__(index)


def names_slow(warnings: list[str], kind: str) -> bool:
    pattern = rf"process 1 \(\S+\) needs .*[0-9.]+ times the median of all processes for {kind} "
    return any(re.search(pattern, each) for each in warnings)


class Slow(TinyModule):
    """Process 1 is slow, and slower with time, until process 0 warns of it."""

    def __init__(self, kind: str, data: SlowData, warnings: list[str]) -> None:
        super().__init__(Case(), Outcome())
        self.kind, self.data, self.warnings = kind, data, warnings
        self.seconds, self.deadline = 0.05 * dist.get_rank(), math.inf
        data.seconds = self.seconds if kind == "data" else 0.0

    def on_train_start(self) -> None:
        self.deadline = time.monotonic() + 60 * slowness()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.seconds if self.kind == "compute" else 0.0)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        time.sleep(self.seconds if self.kind == "save" else 0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kind == "save":
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "last.ckpt")
        self.seconds = min(1.1 * self.seconds, 2.0)  # a busy machine makes both slow: the difference grows
        self.data.seconds = min(1.1 * self.data.seconds, 2.0)
        if batch_idx % 5 == 4:
            ends = names_slow(self.warnings, self.kind) or time.monotonic() > self.deadline
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(ends, all=False)


def fit_slow(name: str, kind: str, folder: str) -> tuple[list[str], dict[str, float]]:
    data = SlowData(*(each.repeat(1200, 1) for each in dataset(2).tensors))
    watchdog = Watchdog(every_s=0.2, report_every_s=1.0, straggler_reports=2, dirpath=Path(folder) / "watchdog")
    trainer = quiet_trainer(strategy_called(name), 2, max_epochs=1, default_root_dir=folder, callbacks=[watchdog])
    with log_messages("accelight.callbacks.watchdog") as records:
        trainer.fit(Slow(kind, data, records), DataLoader(data, batch_size=2))
    return records, {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["data", "compute", "save"])
@pytest.mark.parametrize("name", ["fsdp1_orig_params", "fsdp2", "zero2", "ddp"])
def test_a_slow_process_is_named_with_what_is_slow(name: str, kind: str, tmp_path: Path) -> None:
    (warnings, logged), (of_other, not_logged) = run_on_ranks(2, fit_slow, name, kind, str(tmp_path), timeout_s=150)
    assert names_slow(warnings, kind)
    assert logged[f"straggler/{kind}"] >= 1.0  # of the last window, of a second: ten samples of what waits
    assert not of_other
    assert not not_logged
    table = Timings.from_json((tmp_path / "watchdog" / "timings.json").read_text())
    shown = subprocess.run(
        [sys.executable, "-m", "accelight", "timings", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.rstrip() == str(table)


# ------------------------------------------------------------------ parts
def spreads_of(**of_parts: list[float]) -> dict[str, Spread]:
    """Return what a clock has where these are the seconds of each micro-batch."""
    spreads = {part: Spread() for part in PARTS}
    for part, all_spent in of_parts.items():
        for spent in all_spent:
            spreads[part].add(spent)
    return spreads


def message(
    batches: int, host: str = "a", spreads: dict[str, Spread] | None = None, **seconds: float
) -> dict[str, Any]:
    return {
        "spreads": {part: asdict(spread) for part, spread in (spreads or spreads_of()).items()},
        "step": batches,
        "host": host,
        "batches": batches,
        "seconds": seconds,
        "waited": {"backward": 0.5 * batches},
    }


def test_timings_are_those_of_the_window_per_micro_batch() -> None:
    before = [message(10, data=1.0, backward=10.0), message(10, data=1.0, backward=10.0)]
    now = [message(20, data=2.0, backward=20.0), message(30, "b", data=6.0, backward=20.0)]
    table = _timings(now, before)
    assert table == Timings(
        20,
        ["a", "b"],
        [10, 20],
        {"data": [0.1, 0.25], "backward": [1.0, 0.5]},
        {"data": [0.0, 0.0], "backward": [0.5, 0.5]},
        {part: [0.0, 0.0] for part in PARTS},
    )
    assert table.work("compute") == [0.5, 0.0]
    assert table.work("data") == [0.1, 0.25]
    assert table.factors("data") == [1.0, 2.5]
    assert Timings.from_json(table.to_json()) == table
    assert "Process 1 (b) needs 2.5 times the median for data." in str(table)
    for text in (json.dumps({"step": 1}), "[1, 2]", '{"step":', ""):
        with pytest.raises(ValueError, match="no timings of a Watchdog"):
            Timings.from_json(text)


class Hands:
    """Stands for ``time.perf_counter`` in `SectionClock`: time passes where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(sections, "perf_counter", lambda: self.now)

    def turn(self, seconds: float) -> None:
        self.now += seconds


def test_the_clock_counts_each_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, profiler = Hands(monkeypatch), PassThroughProfiler()
    clock = SectionClock(profiler, Patches("callbacks"))
    hands.turn(1.0)
    with profiler.profile("run_training_batch"):
        hands.turn(2.0)
        with profiler.profile("[Strategy]X.training_step"):
            hands.turn(4.0)
        profiler.start(
            "[_TrainingEpochLoop].train_dataloader_next"
        )  # a loader that raises StopIteration is not stopped
        hands.turn(8.0)
    with profiler.profile("[Callback]Y.on_train_epoch_end"):
        hands.turn(16.0)
    assert {each.name: each.seconds for each in clock.all_actions()} == {
        "between hooks": 1.0,
        "run_training_batch": 2.0,
        "[Strategy]X.training_step": 4.0,
        "[_TrainingEpochLoop].train_dataloader_next": 8.0,
        "[Callback]Y.on_train_epoch_end": 16.0,
    }
    assert [each.name for each in clock.open] == ["between hooks"]


def test_the_clock_has_how_micro_batches_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, profiler = Hands(monkeypatch), PassThroughProfiler()
    clock = SectionClock(profiler, Patches("callbacks"))
    for loaded, waited in ((0.0, 0.0), (4.0, 1.0), (0.0, 0.0), (8.0, 3.0), (0.0, 0.0)):
        with profiler.profile("run_training_batch"), profiler.profile("[Strategy]X.backward"):
            hands.turn(1.0)
        if loaded:
            with profiler.profile("train_dataloader_next"):
                hands.turn(loaded)
            clock.waited["data"] += waited
    assert clock.spreads["data"] == Spread(2, 3.0 + 5.0, 9.0 + 25.0)
    assert clock.spreads["compute"] == Spread(4, 4.0, 4.0)  # the last micro-batch's end is not known yet
    assert clock.spreads["save"] == Spread()


def test_limits_are_learned_from_what_was_usual() -> None:
    profiler = PassThroughProfiler()
    clock, limits = SectionClock(profiler, Patches("callbacks")), _Limits(10.0, 2.0, 100.0, {"save": 7.0})
    action = clock.action("[Strategy]X.training_step")
    assert limits.of(action, compiles=False) == 100.0
    for spent in (30.0, 0.1, 0.1, 0.1, 0.1):  # the first one compiles
        action.count, action.longest = action.count + 1, spent
        limits.learn(clock)
    assert limits.of(action, compiles=False) == 2.0
    assert limits.of(action, compiles=True) == 100.0
    action.longest = 4.0
    limits.learn(clock)
    assert limits.of(action, compiles=False) == 8.0  # it has been as long twice
    assert limits.of(clock.action("save_checkpoint"), compiles=False) == 7.0


def test_every_action_has_a_section() -> None:
    expected = {
        "[_TrainingEpochLoop].train_dataloader_next": "data",
        "[_EvaluationLoop].val_next": "validation",
        "[Strategy]X.validation_step": "validation",
        "[Strategy]X.backward": "backward",
        "[Callback]ModelCheckpoint{'monitor': None}.on_train_batch_end": "hooks",
        "save_checkpoint": "save",
        "optimizer_step": "optimizer",
        "run_training_epoch": "between hooks",
        "[LightningModule]X.setup": "setup",
    }
    assert {name: section_of(name) for name in expected} == expected
    assert set(expected.values()) <= set(SECTIONS)
    assert _join_ranks([0, 2, 3, 4, 7]) == "0, 2-4, 7"


def report(before: list[list[float]], now: list[list[float]]) -> Timings:
    """Return the comparison of processes by the seconds that each micro-batch spends in its loader."""
    messages = [
        [message(len(each), spreads=spreads_of(data=each), data=sum(each), forward=0.1 * len(each)) for each in both]
        for both in (before, [first + second for first, second in zip(before, now, strict=True)])
    ]
    return _timings(messages[1], messages[0])


def test_the_error_of_a_window_is_that_of_its_micro_batches() -> None:
    own = [0.1, 0.4, 0.1, 0.3]
    table = report([[5.0, 7.0], [9.0]], [own, [0.2]])
    expected = math.sqrt(len(own)) * statistics.stdev(own) / len(own)
    assert table.errors["data"] == pytest.approx([expected, 0.0])  # sums of a few floats
    assert Timings.from_json(table.to_json()) == table


@pytest.mark.parametrize("num_pauses", [4, 6, 12])
def test_rare_pauses_that_any_process_meets_by_chance_make_none_slow(num_pauses: int) -> None:
    """Each pause of a window falls on either process; 480 reports of a night, ten nights."""
    drawn, in_a_row = random.Random(num_pauses), [0, 0]
    num_exceeded = longest = 0
    for _ in range(4800):
        windows = [[0.001] * 30, [0.001] * 30]
        for _ in range(num_pauses):
            windows[drawn.randrange(2)][drawn.randrange(30)] += 4.0
        table = report([[], []], windows)
        work = table.work("data")
        num_exceeded += max(work) >= 1.5 * min(work)
        factors = table.factors("data")
        in_a_row = [count + 1 if factor >= 1.5 else 0 for count, factor in zip(in_a_row, factors, strict=True)]
        longest = max(longest, *in_a_row)
    assert num_exceeded > 1000  # with means alone, three in a row are common
    assert longest < 3


def test_a_process_that_alone_has_the_pauses_is_slow() -> None:
    windows = [[0.001] * 300, [0.001] * 300]
    windows[1][:240:30] = [4.0] * 8
    assert report([[], []], windows).factors("data")[1] > 1.5
    steady = report([[], []], [[0.01] * 20, [0.016] * 20])
    assert steady.factors("data") == pytest.approx([1.0, 1.6])  # sums of floats
