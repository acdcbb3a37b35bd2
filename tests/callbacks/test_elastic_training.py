"""Training on any number of processes, which changes in the middle, equals a plain loop over global batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler

from accelight.callbacks import ElasticTraining, TriggerEarlyStopping
from accelight.callbacks.elastic_training import Division, EpochOrder, GlobalBatches, count_anew
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.callbacks.elastic import (
    GLOBAL_BATCH_SIZE,
    MAX_BATCH_SIZE,
    NUM_EPOCHS,
    NUM_SAMPLES,
    NUM_STEPS,
    Module,
    Samples,
    assert_goes_on,
    loader,
    train,
    train_plain,
)
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer

ENGINES = ["ddp", "fsdp1", "fsdp2", "zero2", "zero3"]
WHOLE = NUM_EPOCHS * NUM_STEPS


def _begin(engine: str, folder: str, settings: dict[str, Any]) -> Any:
    return train(engine, folder=Path(folder), **settings)


def _go_on(engine: str, folder: str, settings: dict[str, Any]) -> list[Any]:
    paths = [Path(folder, f"step={step}.ckpt") for step in range(1, WHOLE)]
    return [train(engine, ckpt_path=str(path), **settings) for path in paths]


OTHERS = [(1, 2), (2, 3), (4, 3), (3, 4)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), *(pytest.param(*pair, marks=pytest.mark.machines) for pair in OTHERS)]
)
@pytest.mark.parametrize(
    "engine", [one if one == "fsdp2" else pytest.param(one, marks=pytest.mark.machines) for one in ENGINES]
)
def test_a_run_goes_on_with_another_number_of_processes(engine: str, before: int, after: int, tmp_path: Path) -> None:
    """From the checkpoint of each step, in the middle of epochs and at their ends."""
    expected = train_plain(engine)
    for found in run_on_ranks(before, _begin, engine, str(tmp_path), {}, timeout_s=120):
        assert_goes_on(found, expected)
    for runs in run_on_ranks(after, _go_on, engine, str(tmp_path), {}, timeout_s=200):
        for step, found in enumerate(runs, 1):
            assert_goes_on(found, expected, step)


TENSOR_PARALLEL = [("tp2", 4, "fsdp2", 1), ("fsdp2", 2, "tp2", 4), ("tp2", 4, "tp2", 2), ("tp2", 4, "fsdp2", 4)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("engine", "before", "other", "after"), TENSOR_PARALLEL)
def test_a_run_goes_on_with_other_sizes_of_its_groups(
    engine: str, before: int, other: str, after: int, tmp_path: Path
) -> None:
    """Processes that share one copy of the model have the same samples."""
    expected = train_plain(engine)
    for found in run_on_ranks(before, _begin, engine, str(tmp_path), {}, timeout_s=200):
        assert_goes_on(found, expected)
    for runs in run_on_ranks(after, _go_on, other, str(tmp_path), {}, timeout_s=300):
        for step, found in enumerate(runs, 1):
            assert_goes_on(found, expected, step)


HOOKS = [
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
]
FEW = ("on_train_batch_end", "on_validation_end")


class SavesAt(Callback):
    """Saves whenever it is called: in the middle of accumulation windows and of validations too."""

    def __init__(self, hook: str, folder: str) -> None:
        self.number = 0

        def save(trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(f"{folder}/{trainer.global_step}-{self.number}.ckpt")
            self.number += 1

        setattr(self, hook, save)


VALIDATING: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 2}


def _save_everywhere(engine: str, hook: str, folder: str) -> Any:
    return _train_and_validate(engine, callbacks=[SavesAt(hook, folder)])


def _train_and_validate(engine: str, **settings: Any) -> Any:
    return train(engine, validation=loader(shuffle=False), **VALIDATING, **settings)


def _resume_all(engine: str, folder: str) -> dict[str, Any]:
    return {path.name: _train_and_validate(engine, ckpt_path=str(path)) for path in sorted(Path(folder).iterdir())}


@pytest.mark.core("fsdp2-on_train_batch_end-2-1")
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.machines), (2, 3)])
@pytest.mark.parametrize(
    "hook", [hook if hook in FEW else pytest.param(hook, marks=pytest.mark.machines) for hook in HOOKS]
)
@pytest.mark.parametrize(
    "engine", ["fsdp2", *(pytest.param(name, marks=pytest.mark.machines) for name in ("ddp", "zero2"))]
)
def test_a_checkpoint_of_any_moment(engine: str, hook: str, before: int, after: int, tmp_path: Path) -> None:
    expected = train_plain(engine)
    [whole, *_] = run_on_ranks(before, _save_everywhere, engine, hook, str(tmp_path), timeout_s=120)
    assert_goes_on(whole, expected)
    assert whole.validated == [2, 5]  # after the second step of each epoch
    [runs, *_] = run_on_ranks(after, _resume_all, engine, str(tmp_path), timeout_s=250)
    assert len(runs) >= NUM_EPOCHS
    for name, found in runs.items():
        step = int(name.split("-")[0])
        assert_goes_on(found, expected, step)
        assert [one for one in found.validated if one > step] == [one for one in whole.validated if one > step], name


class _Told(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def _stopped_by_a_signal(folder: str) -> None:
    stopping = TriggerEarlyStopping(stop_on_signals=["SIGTERM"], lag=False)
    with pytest.raises(SystemExit):
        train("fsdp2", callbacks=[_Told(), stopping], default_root_dir=folder)


def _go_on_after_a_signal(folder: str) -> Any:
    stopping = TriggerEarlyStopping(stop_on_signals=["SIGTERM"])
    return train("fsdp2", callbacks=[stopping], elastic={"resume_from": folder})


def test_a_run_that_a_signal_stopped_goes_on(tmp_path: Path) -> None:
    """Both callbacks know which samples were used: they are left out once."""
    run_on_ranks(2, _stopped_by_a_signal, str(tmp_path))
    [found, *_] = run_on_ranks(3, _go_on_after_a_signal, str(tmp_path))
    assert found.resumed_from is not None
    assert found.global_step == WHOLE
    assert_goes_on(found, train_plain("fsdp2"), min(found.used))
    assert min(found.used) in (1, 2)


# ---------------------------------------------------------------------- what counts in steps
@pytest.mark.parametrize("size", [1, 2, 3])
def test_intervals_and_limits_count_steps(size: int) -> None:
    settings = {"limit_train_batches": 2, "val_check_interval": 1, "limit_val_batches": 1, "frequency": 2}
    [found, *_] = run_on_ranks(size, _limited, settings)
    assert sorted(found.used) == [0, 1, 2, 3]
    assert [len(found.used[step]) for step in sorted(found.used)] == [GLOBAL_BATCH_SIZE] * 4
    assert found.validated == [1, 2, 3, 4]
    # A schedule of two steps that steps at each epoch's second: halved after its second step.
    assert found.rates == {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1}
    [found, *_] = run_on_ranks(size, _limited, {"limit_train_batches": 0.7, "val_check_interval": 0.5, "frequency": 1})
    assert sorted(found.used) == [0, 1, 2, 3]  # two of three steps
    assert found.validated == [1, 2, 3, 4]
    assert found.rates == {0: 0.1, 1: 0.1, 2: 0.05, 3: 0.05}


def _limited(settings: dict[str, Any]) -> Any:
    return train("ddp", validation=loader(shuffle=False), **settings)


@pytest.mark.parametrize("size", [2, 3])
def test_drop_last_of_the_loader_counts(size: int) -> None:
    expected = train_plain("ddp", drop_last=True)
    for found in run_on_ranks(size, _drop_last):
        assert_goes_on(found, expected)


def _drop_last() -> Any:
    return train("ddp", data=loader(drop_last=True))


def test_a_batch_sampler_of_torchs_means_what_it_says() -> None:
    """The DataLoader itself has another sampler then, and another drop_last."""
    expected = train_plain("ddp", drop_last=True)
    for found in run_on_ranks(2, _with_batch_sampler):
        assert_goes_on(found, expected)


def _with_batch_sampler() -> Any:
    sampler = BatchSampler(RandomSampler(Samples()), 5, drop_last=True)
    return train("ddp", data=DataLoader(Samples(), batch_sampler=sampler))


@pytest.mark.parametrize("size", [2, 3])
def test_samples_that_are_counted_as_items_count_once(size: int) -> None:
    for found in run_on_ranks(size, _train_by_items):
        assert_goes_on(found, train_plain("fsdp2", num_samples=31))


def _train_by_items() -> Any:
    return train("fsdp2_items", data=DataLoader(Samples(31), shuffle=True))


# ---------------------------------------------------------------------- dealing
@pytest.mark.parametrize("num_samples", [5, 24, 26, 35])
def test_every_step_has_the_same_samples_on_any_number_of_processes(num_samples: int) -> None:
    whole = list(EpochOrder(num_samples, shuffle=True, seed=3).indices())
    for size in (1, 2, 3, 4, 6, 12):
        for limit in (None, 1, 2, 5):
            division = Division.of(12, size, limit)
            assert division.batch_size * size * division.accumulate_grad_batches == 12
            assert limit is None or division.batch_size <= limit
            ranks = [GlobalBatches(EpochOrder(num_samples, True, 3), division, rank, False) for rank in range(size)]
            dealt = [list(batches) for batches in ranks]
            assert {len(batches) for batches in dealt} == {len(ranks[0])}
            for step in range(ranks[0].num_steps):
                micro = range(step * division.accumulate_grad_batches, (step + 1) * division.accumulate_grad_batches)
                real = [(ranks[r].weight(m), dealt[r][m]) for r in range(size) for m in micro]
                samples = sorted(sample for weight, batch in real if weight for sample in batch)
                expected = sorted(whole[12 * step : 12 * (step + 1)])
                assert samples == expected
                assert sum(weight for weight, _ in real) == pytest.approx(len(real))  # a mean over samples
                assert all(weight == pytest.approx(len(b) * len(real) / len(expected)) for weight, b in real if weight)


def test_micro_batches_of_the_same_size_have_the_same_samples() -> None:
    """What looks at a whole micro-batch sees the same, if its size stays."""
    found = []
    for size in (1, 2, 4):
        division = Division.of(12, size, 3)
        ranks = [list(GlobalBatches(EpochOrder(24, True, 0), division, rank, False)) for rank in range(size)]
        found.append(sorted(batch for batches in ranks for batch in batches))
    assert found[0] == found[1] == found[2]


def test_used_steps_are_skipped_in_their_epoch_alone() -> None:
    batches = GlobalBatches(EpochOrder(24, False, 0), Division.of(12, 2, 3), 1, False)
    batches.skip(epoch=1, num_steps=1)
    counts = []
    for epoch in range(3):
        batches.sampler.set_epoch(epoch)
        counts.append(len(list(batches)))
    assert counts == [4, 2, 4]
    assert len(batches) == 4  # what the Trainer counts up to


# ---------------------------------------------------------------------- what does not fit
def _fit(data: Any = None, module: Any = None, elastic: dict[str, Any] | None = None, **settings: Any) -> None:
    given = {"global_batch_size": GLOBAL_BATCH_SIZE, "max_batch_size": MAX_BATCH_SIZE, **(elastic or {})}
    callbacks = [ElasticTraining(**given), *settings.pop("callbacks", [])]
    strategy = settings.pop("strategy", "auto")
    trainer = quiet_trainer(strategy, 1, max_epochs=1, callbacks=callbacks, **settings)
    trainer.fit(module or Module(), loader() if data is None else data)


class _Iterable(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(24))


class _Stateful(Samples):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def _batches_of(sampler: Any) -> Any:
    return DataLoader(Samples(), batch_sampler=BatchSampler(sampler, 5, drop_last=False))


class _Fetching(Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulate_grad_batches": 2}, "sets accumulate_grad_batches.* Remove accumulate_grad_batches=2"),
        ({"callbacks": [GradientAccumulationScheduler({2: 2})]}, "and GradientAccumulationScheduler"),
        ({"module": _Manual()}, "needs automatic optimization"),
        ({"module": _Fetching()}, r"cannot follow training_step\(dataloader_iter\)"),
        ({"data": DataLoader(_Iterable())}, "cannot distribute the samples of a DataLoader over _Iterable"),
        ({"data": [torch.zeros(1)]}, "cannot distribute the samples of a Tensor"),
        ({"data": loader(shuffle=None, sampler=SubsetRandomSampler([1, 2]))}, "would not use SubsetRandomSampler"),
        ({"data": loader(shuffle=None, sampler=RandomSampler(Samples(), True))}, "would not use RandomSampler"),
        ({"data": _batches_of(SubsetRandomSampler([1, 2]))}, "would not use SubsetRandomSampler"),
        ({"data": DataLoader(_Stateful())}, "_Stateful has a state_dict: checkpoints hold only that of process 0"),
        ({"data": [loader(), loader()]}, "one training loader, but there are 2"),
        (
            {"data": loader(drop_last=True), "elastic": {"global_batch_size": 27}},
            "26 samples, fewer than one global batch",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _fit(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be an int >= 1, got 0"),
        ({"global_batch_size": 8, "max_batch_size": 2.0}, r"max_batch_size must be an int >= 1, got 2\.0"),
    ],
)
def test_wrong_arguments_of_elastic_training_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticTraining(**arguments)


def accumulated(source: str) -> None:
    settings: dict[str, Any] = {}
    if source == "variable":
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    if source in ("variable", "strategy"):
        steps = 4 if source == "strategy" else None
        settings["strategy"] = AccelFSDPStrategy(fsdp_version=2, gradient_accumulation=steps)
    else:
        config = {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}
        settings["strategy"] = AccelDeepSpeedStrategy(hf_ds_config=config)
    with pytest.raises(ValueError, match=r"sets accumulate_grad_batches.* Remove accumulate_grad_batches=4"):
        _fit(elastic={"max_batch_size": None}, **settings)


@pytest.mark.parametrize("source", ["strategy", "variable", "config"])
def test_accumulation_from_elsewhere_is_refused(source: str) -> None:
    run_on_ranks(1, accumulated, source)


def test_a_number_of_processes_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"12 cannot be split equally over 5 processes. Start 1, 2, 3, 4, 6 or 12"):
        Division.of(12, 5)
    with pytest.raises(ValueError, match=r"over 5 groups of 2 processes. Start 2, 4, 6, 8, 12 or 24 processes"):
        Division.of(12, 5, group_size=2)
    with pytest.raises(AssertionError, match="12 cannot be split equally over 5 processes"):
        run_on_ranks(5, train, "ddp")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"elastic": {"global_batch_size": 6}}, "global_batch_size was 12, is now 6"),
        ({"elastic": {"seed": 1}}, "seed was 0, is now 1"),
        ({"data": DataLoader(Samples(NUM_SAMPLES + 1), shuffle=True)}, "num_samples was 26, is now 27"),
        ({"data": loader(shuffle=False)}, "shuffle was True, is now False"),
        ({"data": loader(drop_last=True)}, "drop_last was False, is now True"),
    ],
)
def test_a_checkpoint_of_another_order_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    _fit(callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)], enable_checkpointing=True)
    with pytest.raises(ValueError, match=message):
        _fit(elastic={"resume_from": tmp_path, **change.pop("elastic", {})}, **change)


def test_a_checkpoint_without_the_callback_is_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer("auto", 1, max_steps=1, callbacks=[_Nothing()])
    trainer.fit(_Unwatched(), loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="saved without ElasticTraining: the samples used in its epoch are unknown"):
        _fit(elastic={"resume_from": tmp_path})


class _Nothing(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


class _Unwatched(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]).square().mean()


def test_the_trainer_is_as_before_after_a_fit() -> None:
    trainer = quiet_trainer(
        "auto", 1, max_epochs=1, callbacks=[ElasticTraining(12, 3)], val_check_interval=2, limit_train_batches=2
    )
    trainer.fit(Module(), loader())
    assert (trainer.accumulate_grad_batches, trainer.val_check_interval, trainer.limit_train_batches) == (1, 2, 2)
    assert "training_step" not in vars(trainer.strategy)
    assert "_prepare_dataloader" not in vars(trainer._data_connector)


def test_an_open_window_is_forgotten() -> None:
    def counters(ready: int, processed: int, completed: int) -> dict[str, int]:
        return {"ready": ready, "started": ready, "processed": processed, "completed": completed}

    progress = {"total": counters(16, 16, 15), "current": counters(6, 6, 5), "is_last_batch": False}
    loops: dict[str, Any] = {"epoch_loop.batch_progress": progress}
    assert count_anew(loops, steps_in_epoch=1, steps=3, before=4, now=3)
    assert progress["current"] == counters(3, 3, 3)
    assert progress["total"] == counters(9, 9, 9)
    progress.update(current=counters(8, 8, 7), total=counters(16, 16, 15))
    assert not count_anew(loops, steps_in_epoch=2, steps=4, before=4, now=1)
    assert progress["current"] == counters(2, 2, 1)  # as in on_train_batch_end
    assert progress["total"] == counters(4, 4, 3)


# ---------------------------------------------------------------------- torchdata
def _stateful(folder: str, steps: list[int]) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = StatefulDataLoader(Samples(), 5, shuffle=True)
    if not steps:
        return train("fsdp2", data=data, folder=Path(folder))
    return [train("fsdp2", data=data, ckpt_path=f"{folder}/step={step}.ckpt") for step in steps]


def test_a_stateful_loader_goes_on_where_the_callback_says(tmp_path: Path) -> None:
    """Its own state counts batches of one process; loaded beside, samples would be left out."""
    pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    expected = train_plain("fsdp2")
    [whole, *_] = run_on_ranks(2, _stateful, str(tmp_path), [], timeout_s=120)
    assert_goes_on(whole, expected)
    for size in (1, 3):
        [runs, *_] = run_on_ranks(size, _stateful, str(tmp_path), [1, 3, 4], timeout_s=120)
        for step, found in zip([1, 3, 4], runs, strict=True):
            assert_goes_on(found, expected, step)
