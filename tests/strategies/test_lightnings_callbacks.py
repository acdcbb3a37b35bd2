"""Callbacks and tuners of Lightning's with every engine: as with ddp or one process, or refused by name."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import whole_weights
from tests.strategies.oracle import Case, Outcome, TinyModule, dataset, quiet_trainer, rank_loader, strategy_named

ENGINES = pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2", "zero3"])
FSDP = pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
EVERYWHERE: dict[str, Callable[[], Callback]] = {
    "none": Callback,
    "DeviceStatsMonitor": DeviceStatsMonitor,
    "EarlyStopping": lambda: EarlyStopping("val_loss", patience=1),
    "LearningRateMonitor": LearningRateMonitor,
    "ModelSummary": ModelSummary,
    "RichModelSummary": RichModelSummary,
    "ThroughputMonitor": lambda: ThroughputMonitor(batch_size_fn=len, window_size=2),
    "Timer": lambda: Timer(timedelta(hours=1)),
}
WITH_FSDP: dict[str, Callable[[], Callback]] = {
    **EVERYWHERE,
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({1: 2}),
}
REFUSED: dict[str, tuple[Callable[[], Callback], str]] = {
    "BatchSizeFinder": (BatchSizeFinder, "BatchSizeFinder lets each process .*Tuner"),
    "EMAWeightAveraging": (EMAWeightAveraging, "EMAWeightAveraging .*ShardedEMA"),
    "ModelPruning": (lambda: ModelPruning("l1_unstructured", amount=0.5), "ModelPruning replaces parameters"),
    "StochasticWeightAveraging": (lambda: StochasticWeightAveraging(0.01), "SWA does not currently support sharded"),
}
REFUSED_WITH_ZERO: dict[str, tuple[Callable[[], Callback], str]] = {
    **REFUSED,
    "BackboneFinetuning": (BackboneFinetuning, "Finetuning callback does not support .* DeepSpeed"),
    "GradientAccumulationScheduler": (
        lambda: GradientAccumulationScheduler({1: 2}),
        "does not support `accumulate_grad_batches` changing between epochs",
    ),
    "LearningRateFinder": (LearningRateFinder, r"LearningRateFinder \(Tuner.lr_find, too\) attaches a schedule"),
}


class Tuned(TinyModule):
    def __init__(self) -> None:
        super().__init__(Case(epochs=1), Outcome())
        self.lr, self.batch_size = 0.1, 2

    @property
    def backbone(self) -> Any:
        """What `BackboneFinetuning` looks for."""
        return self.model.blocks

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=self.lr, momentum=0.9)


def trainer_for(strategy: str, world_size: int, callbacks: list[Callback], **more: Any) -> Any:
    folder = tempfile.mkdtemp()
    chosen = strategy if strategy in ("ddp", "auto") else strategy_named(strategy)
    settings: dict[str, Any] = {"max_epochs": 2, "default_root_dir": folder, "log_every_n_steps": 2, **more}
    return quiet_trainer(chosen, world_size, callbacks=callbacks, **settings)


def weights_of(strategy: str, trainer: Any, module: Any) -> dict[str, Tensor]:
    if strategy.startswith("zero"):
        return whole_weights(module)
    state = trainer.strategy.lightning_module_state_dict()
    full = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    return {name.removeprefix("model."): tensor.clone() for name, tensor in full.items()}


def assert_close(found: Any, expected: Any) -> None:
    """Compare what rank 0 has: full weights are nowhere else."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def train_with(strategy: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        module, logger = Tuned(), CSVLogger(tempfile.mkdtemp())
        trainer = trainer_for(strategy, 2, [WITH_FSDP[name]()], logger=logger)
        trainer.fit(module, rank_loader(2), rank_loader(2))
        found[name] = trainer.global_step, weights_of(strategy, trainer, module)
    return found


@pytest.mark.core("fsdp2")
@ENGINES
def test_callbacks_that_work_as_with_ddp(strategy: str) -> None:
    names = list(EVERYWHERE if strategy.startswith("zero") else WITH_FSDP)
    expected = run_on_ranks(2, train_with, "ddp", names)[0]
    assert_close(run_on_ranks(2, train_with, strategy, names)[0], expected)


def finetune(strategy: str) -> dict[str, Tensor]:
    module = Tuned()
    callback = BackboneFinetuning(1, backbone_initial_lr=0.01, verbose=False)
    trainer = trainer_for(strategy, 2 if strategy != "auto" else 1, [callback])
    trainer.fit(module, rank_loader(2) if strategy != "auto" else global_batches())
    return weights_of(strategy, trainer, module)


def global_batches() -> DataLoader[Any]:
    """The batches of both ranks in one."""
    data = dataset(2)
    return DataLoader(data, batch_size=4)


@FSDP
def test_finetuning_as_in_one_process(strategy: str) -> None:
    expected = finetune("auto")  # not ddp's: it does not reduce what was frozen when it was made
    assert_close(run_on_ranks(2, finetune, strategy)[0], expected)


def find_rate(strategy: str, by_callback: bool) -> tuple[list[float], float, dict[str, Tensor]]:
    module = Tuned()
    finder = LearningRateFinder(num_training_steps=15, min_lr=1e-4, max_lr=0.5)
    trainer = trainer_for(strategy, 2, [finder] if by_callback else [], max_epochs=1)
    if by_callback:
        trainer.fit(module, rank_loader(2))
        found: Any = finder.optimal_lr
    else:
        found = Tuner(trainer).lr_find(module, rank_loader(2), num_training=15, min_lr=1e-4, max_lr=0.5)
        trainer.fit(module, rank_loader(2))
    return found.results["loss"], module.lr, weights_of(strategy, trainer, module)


@FSDP
@pytest.mark.parametrize("by_callback", [True, False])
def test_the_rate_is_found_as_with_ddp_and_weights_are_restored(strategy: str, by_callback: bool) -> None:
    ddp = run_on_ranks(2, find_rate, "ddp", by_callback)[0]
    assert_close(run_on_ranks(2, find_rate, strategy, by_callback)[0], ddp)


def refuse(strategy: str, names: list[str]) -> dict[str, str]:
    messages = {}
    for name in names:
        trainer, module = trainer_for(strategy, 2, [REFUSED_WITH_ZERO[name][0]()]), Tuned()
        with pytest.raises(Exception) as caught:  # noqa: PT011 (the messages are compared)
            trainer.fit(module, rank_loader(2))
        assert trainer.global_step == 0
        messages[name] = str(caught.value)
    return messages


@ENGINES
def test_callbacks_that_are_refused_by_name(strategy: str) -> None:
    expected = REFUSED_WITH_ZERO if strategy.startswith("zero") else REFUSED
    for messages in run_on_ranks(2, refuse, strategy, list(expected)):
        for name, (_, message) in expected.items():
            assert re.search(message, messages[name]), messages[name]


def tune(strategy: str) -> tuple[str, str]:
    with pytest.raises(ValueError, match="schedule") as rate:
        Tuner(trainer_for(strategy, 2, [])).lr_find(Tuned(), rank_loader(2))
    with pytest.raises(ValueError, match="batch size") as batch_size:
        Tuner(trainer_for(strategy, 2, [])).scale_batch_size(Tuned(), rank_loader(2))
    return str(rate.value), str(batch_size.value)


def test_tuners_with_zero_are_refused_by_name() -> None:
    for rate, batch_size in run_on_ranks(2, tune, "zero2"):
        assert "Find the rate with FSDP or on one process" in rate
        assert "batch size is currently not supported with distributed strategies" in batch_size
