"""`Tuner.scale_batch_size`: all processes find the same size, and the run after it is as without a search."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner as LightningTuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.strategies import Tuner, batch_size
from accelight.strategies.deepspeed import AccelDeepSpeedStrategy
from accelight.strategies.fsdp import AccelFSDPStrategy
from accelight.strategies.upstream.lightning import LightningModule
from tests.ranks import run_on_ranks
from tests.scripts import run_script
from tests.strategies.deepspeed.training import whole_weights
from tests.strategies.oracle import quiet_trainer

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp1": lambda: AccelFSDPStrategy(fsdp_version=1, auto_wrap_policy={nn.Linear}),
    "fsdp2": lambda: AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={nn.Linear}),
    "zero2": lambda: AccelDeepSpeedStrategy(zero_stage=2),
    "zero3": lambda: AccelDeepSpeedStrategy(zero_stage=3),
}
NUM_SAMPLES = 128
tried: list[int] = []


def _note(size: int) -> None:
    if tried[-1:] != [size]:
        tried.append(size)


class _Limited(LightningModule):
    """Has memory for so many samples on each process, in a section of the second batch."""

    def __init__(self, limits: tuple[int, ...], section: str = "backward", batch_size: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.limits, self.section, self.batch_size = limits, section, batch_size

    def use_memory(self, section: str, batch_idx: int) -> None:
        too_large = self.batch_size > self.limits[self.global_rank]
        if too_large and section == self.section and (batch_idx == 1 or self.section != "backward"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        _note(self.batch_size)
        output = self.net(batch[0])
        output.register_hook(lambda _: self.use_memory("backward", batch_idx))
        return output.pow(2).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        _note(self.batch_size)
        self.use_memory("validation", batch_idx)
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return _loader(self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return _loader(self.batch_size)


class _Data(LightningDataModule):
    """Its size is a hyperparameter."""

    def __init__(self, batch_size: int = 1, drop_last: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            RandomDataset(32, NUM_SAMPLES), self.hparams["batch_size"], drop_last=self.hparams["drop_last"]
        )


def _loader(batch_size: int) -> DataLoader[Any]:
    data = torch.arange(8.0 * NUM_SAMPLES).view(NUM_SAMPLES, 8) / (8 * NUM_SAMPLES)
    return DataLoader(TensorDataset(data), batch_size, shuffle=True)


def _weights(strategy: str, trainer: Any, module: LightningModule) -> dict[str, Tensor]:
    if strategy.startswith("zero"):
        return whole_weights(module)
    if strategy == "ddp":
        return {name: each.clone() for name, each in module.state_dict().items()}
    return {name: each.clone() for name, each in trainer.strategy.full_state_dict(module).items()}


def _train(
    strategy: str, limits: tuple[int, int], search: dict[str, Any] | None, section: str = "backward", size: int = 1
) -> tuple[int, list[int], dict[str, Tensor]]:
    """Return the size, all that were tried, and what a fit after the search comes to."""
    torch.manual_seed(0)
    module = _Limited(limits, section, size)
    trainer = quiet_trainer(STRATEGIES[strategy](), 2, max_epochs=2)
    tried.clear()
    if search is not None:
        assert Tuner(trainer).scale_batch_size(module, **search) == module.batch_size
        assert trainer.global_step == 0
    sizes = list(tried)
    trainer.fit(module)
    return module.batch_size, sizes, _weights(strategy, trainer, module)


@pytest.mark.core("fsdp2-power", "ddp-binsearch")
@pytest.mark.parametrize(
    ("search", "limits", "sizes", "found"),
    [
        ({}, (16, 4), [2, 4, 8], 4),
        ({"mode": "binsearch", "margin": 0.0}, (6, 14), [2, 4, 8, 6, 7], 6),
    ],
    ids=["power", "binsearch"],
)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_processes_find_a_size_together_and_train_as_without_a_search(
    strategy: str, search: dict[str, Any], limits: tuple[int, int], sizes: list[int], found: int
) -> None:
    [(_, _, expected), _] = run_on_ranks(2, _train, strategy, limits, None, "backward", found)
    for size, tries, weights in run_on_ranks(2, _train, strategy, limits, search, timeout_s=100, group_timeout_s=1800):
        assert (size, tries) == (found, sizes)
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("search", [{}, {"method": "validate"}], ids=["fit", "validate"])
def test_validation_counts(search: dict[str, Any]) -> None:
    """A fit runs it before it trains."""
    for size, tries, _ in run_on_ranks(
        2, _train, "fsdp2", (4, 16), search, "validation", timeout_s=100, group_timeout_s=1800
    ):
        assert (size, tries) == (4, [2, 4, 8])


def _find(limit: int, tuner: Any = Tuner, **search: Any) -> tuple[int, list[int]]:
    tried.clear()
    module = _Limited((limit,))
    trainer = quiet_trainer("auto", 1, max_epochs=2)
    found = tuner(trainer).scale_batch_size(module, **search)
    assert module.batch_size == found
    return found, list(tried)


@pytest.mark.parametrize("init_val", [1, 2, 5])
@pytest.mark.parametrize("limit", [1, 5, 31])
def test_one_process_finds_what_lightnings_tuner_finds(limit: int, init_val: int) -> None:
    assert _find(limit, init_val=init_val)[0] == _find(limit, LightningTuner, init_val=init_val)[0]
    search = {"init_val": init_val, "mode": "binsearch", "margin": 0.0}
    found, _ = _find(limit, **search)
    assert found == limit


def test_limits_of_the_search() -> None:
    assert _find(100, max_trials=3) == (8, [2, 4, 8])
    assert _find(100, max_val=12) == (12, [2, 4, 8, 12])
    assert _find(200) == (NUM_SAMPLES, [2, 4, 8, 16, 32, 64, NUM_SAMPLES])  # one batch is the whole dataset
    assert _find(40, mode="binsearch", margin=0.25)[0] == 30


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_data_module_has_the_size(drop_last: bool) -> None:
    """With drop_last, a loader has no batch that is larger than the dataset."""
    data = _Data(drop_last=drop_last)
    trainer = quiet_trainer("auto", 1, max_epochs=1)
    assert Tuner(trainer).scale_batch_size(BoringModel(), data, init_val=4, mode="binsearch", margin=0.0) == NUM_SAMPLES
    assert data.hparams["batch_size"] == NUM_SAMPLES


class _Counted(Callback):
    calls = 0

    def on_train_start(self, *_: Any) -> None:
        self.calls += 1


class _Another(Callback):
    """Of the module."""

    calls = 0

    def on_train_start(self, *_: Any) -> None:
        self.calls += 1


class _Logging(_Limited):
    callback: _Another

    def configure_callbacks(self) -> list[Callback]:
        return [self.callback]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("value", 1.0)
        logger: Any = self.logger
        logger.log_metrics({"another": 1.0}, step=batch_idx)
        return super().training_step(batch, batch_idx)


def test_callbacks_and_loggers_take_part_in_the_run_alone(tmp_path: Path) -> None:
    callback, module = _Counted(), _Logging((4,))
    module.callback = _Another()
    trainer = quiet_trainer("auto", 1, max_epochs=1, callbacks=[callback])
    trainer.loggers = [CSVLogger(tmp_path)]
    assert Tuner(trainer).scale_batch_size(module) == 4
    assert (callback.calls, module.callback.calls) == (0, 0)
    assert list(tmp_path.iterdir()) == []
    trainer.fit(module)
    assert (callback.calls, module.callback.calls) == (1, 1)
    assert list(tmp_path.rglob("metrics.csv"))


def test_searches_that_are_refused() -> None:
    def tuner(**more: Any) -> Tuner:
        return Tuner(quiet_trainer("auto", 1, max_epochs=1, **more))

    unknown: Any = "train"
    module = _Limited((0,), batch_size=3)
    with pytest.raises(ValueError, match="method must be one of fit, validate, test, predict, got 'train'"):
        tuner().scale_batch_size(module, method=unknown)
    with pytest.raises(ValueError, match="mode must be 'power' or 'binsearch', got 'linear'"):
        tuner().scale_batch_size(module, mode="linear")
    with pytest.raises(ValueError, match="margin must be >= 0 and < 1, got 1"):
        tuner().scale_batch_size(module, margin=1)
    with pytest.raises(ValueError, match="init_val must be >= 1, got 0"):
        tuner().scale_batch_size(module, init_val=0)
    with pytest.raises(ValueError, match="steps_per_trial must be >= 1, got 0"):
        tuner().scale_batch_size(module, steps_per_trial=0)
    with pytest.raises(ValueError, match="cannot change the batch size of loaders that exist"):
        tuner().scale_batch_size(module, _loader(2))
    with pytest.raises(ValueError, match="Neither the module nor a data module has 'size' as an attribute"):
        tuner().scale_batch_size(module, batch_arg_name="size")
    with pytest.raises(RuntimeError, match="Of the batch sizes 2, 1 none has fitted"):
        tuner().scale_batch_size(module)
    assert module.batch_size == 3
    assert tuner(fast_dev_run=True).scale_batch_size(module) is None
    ready = tuner()
    module.limits = (8,)
    ready.trainer.fit(module)
    with pytest.raises(RuntimeError, match="needs a Trainer that has not run"):
        ready.scale_batch_size(module)


def _fail(strategy: str) -> str:
    class Bad(_Limited):
        def use_memory(self, section: str, batch_idx: int) -> None:
            if self.batch_size == 4 and self.global_rank == 1:
                raise ValueError("the batch is bad")

    module = Bad((8, 8), batch_size=3)
    with pytest.raises(Exception, match="the batch is bad") as caught:
        Tuner(quiet_trainer(STRATEGIES[strategy](), 2, max_epochs=1)).scale_batch_size(module)
    assert module.batch_size == 3
    return str(caught.value)


@pytest.mark.exhaustive
def test_any_other_error_of_one_process_ends_the_search() -> None:
    first, second = run_on_ranks(2, _fail, "fsdp2", group_timeout_s=1800)
    assert "Process 1 failed" in first
    assert second.startswith("the batch is bad")


def _find_over_nccl() -> tuple[str, int]:
    module = _Limited((8, 4), batch_size=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_size, "backends_by_device", lambda group: {"cpu": "gloo", "cuda": "nccl"})
        with pytest.raises(RuntimeError, match="collectives of nccl") as caught:
            Tuner(quiet_trainer(STRATEGIES["fsdp2"](), 2, max_epochs=1)).scale_batch_size(module)
    return str(caught.value), module.batch_size


@pytest.mark.exhaustive
def test_over_nccl_all_processes_end_with_the_largest_size_that_fitted() -> None:
    for message, size in run_on_ranks(2, _find_over_nccl, group_timeout_s=1800):
        assert "A process has run out of memory with a batch size of 8" in message
        assert message.endswith("The largest batch size that has fitted is 4.")
        assert size == 3


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from lightning.pytorch import LightningModule, Trainer
from accelight.strategies import Tuner

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.batch_size = nn.Linear(8, 1), 1

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1 and len(batch) > 4:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(64, 8), self.batch_size)

module = Module()
settings = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(strategy="accel_fsdp2", accelerator="cpu", devices=2, max_epochs=1, **settings)
found = Tuner(trainer).scale_batch_size(module)
trainer.fit(module)
print(f"rank {trainer.global_rank} finds {found} and trains {trainer.global_step} steps", flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_sizes_are_found_under_launchers(launcher: Any) -> None:
    ended = run_script(SCRIPT, launcher=launcher, timeout_s=90)
    for rank in (0, 1):  # two processes may print on one line
        assert f"rank {rank} finds 4 and trains 8 steps" in ended.output
    assert ended.output.count("Batch size 4 fits; trying 8.") == 1  # one process logs


def test_trials_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _find(4)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Batch size")]
    assert lines == ["Batch size 2 fits; trying 4.", "Batch size 4 fits; trying 8.", "Batch size 8 does not fit."]
