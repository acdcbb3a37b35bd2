"""Weights that the user's code changes, in the module or through the optimizer, against plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from accelight.checkpoint import load_state_dict
from accelight.state import PartialState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, full_state_dict
from accelight.strategies.sharded_tensors.user_code import library_code
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, whole_weights
from tests.strategies.oracle import quiet_trainer

STEPS, PER_RANK = 5, 3


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self.second(torch.tanh(self.first(batch[0]))), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(self.training_step(batch, batch_idx).item())

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def shrink(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            assert group["params"]
            for parameter in group["params"]:
                parameter.mul_(0.9)


class BeforeStep(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.shrink()


class AfterBatch(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        self.shrink()


class Both(BeforeStep):
    """One after the other."""

    def on_train_batch_end(self, *_: Any) -> None:
        import deepspeed

        parameter = self.second.weight
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.clamp_(-0.2, 0.2)
        else:
            parameter.data.clamp_(-0.2, 0.2)


class BothAtOnce(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.shrink()
        with torch.no_grad():
            self.second.weight.mul_(0.5)


class BothAtOnceUnseen(BothAtOnce):
    """As code of a library does it, which runs under no mode."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with library_code():
            super().on_before_optimizer_step(optimizer)


class Averaging(SGD):
    """Has the weights to train and their mean, as schedule-free optimizers do."""

    trains = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert self.trains
        loss = super().step(closure)
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            self.state[parameter].setdefault("mean", parameter.clone()).lerp_(parameter, 0.5)
        return loss

    def train(self) -> None:
        self.swap(True)

    def eval(self) -> None:
        self.swap(False)

    @torch.no_grad()
    def swap(self, trains: bool) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            if self.trains != trains and "mean" in self.state[parameter]:
                other = self.state[parameter]["mean"].clone()
                self.state[parameter]["mean"].copy_(parameter)
                parameter.copy_(other)
        self.trains = trains


class InTwoModes(Module):
    def configure_optimizers(self) -> Optimizer:
        return Averaging(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].train()  # type: ignore[attr-defined]

    def on_validation_epoch_start(self) -> None:
        self.trainer.optimizers[0].eval()  # type: ignore[attr-defined]


class InnerModes(InTwoModes):
    """Its optimizer is called past DeepSpeed's, which then cannot know."""

    def on_validation_epoch_start(self) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        getattr(optimizer, "optimizer", optimizer).eval()


class Frozen(Module):
    """The optimizer is given a frozen weight, too, which has no gradient to clip."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.seen.append(float(nn.utils.clip_grad_norm_(self.first.weight, 0.01)))
        self.first.weight.grad = None


class FrozenInGroups(Frozen):
    def on_train_batch_end(self, *_: Any) -> None:
        self.shrink()


class FrozenWithGradient(Frozen):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.first.weight.grad = torch.ones(5, 4)


class FrozenInModes(Frozen, InTwoModes):
    """The optimizer changes what it averages alone."""


class OneLossIsNan(Module):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 2 else 1.0)


def train(
    kind: type[Module], strategy: Any, rank: int | None, precision: Any = "32-true"
) -> tuple[dict[str, Tensor], list[float]]:
    generator = torch.Generator().manual_seed(1)
    batches, targets = (torch.randn(STEPS, 2, PER_RANK, size, generator=generator) for size in (4, 3))
    mine = slice(None) if rank is None else slice(rank, rank + 1)
    data = TensorDataset(batches[:, mine].reshape(-1, 4), targets[:, mine].reshape(-1, 3))
    loader = DataLoader(data, PER_RANK * (2 if rank is None else 1))
    validation = DataLoader(TensorDataset(batches[0].reshape(-1, 4), targets[0].reshape(-1, 3)), 2 * PER_RANK)
    module = kind()
    world_size = 1 if rank is None else 2
    trainer = quiet_trainer(strategy, world_size, max_epochs=2, use_distributed_sampler=False, precision=precision)
    trainer.fit(module, loader, validation)
    if rank is None:
        return {name: one.detach().clone() for name, one in module.named_parameters()}, module.seen
    return whole_weights(module), module.seen


def sharded(kind: type[Module], stage: int, precision: str = "32-true") -> Any:
    strategy = AccelDeepSpeedStrategy(hf_ds_config=ds_config(stage))
    try:
        return train(kind, strategy, PartialState().process_index, precision)
    except RuntimeError as error:
        return str(error)
    finally:
        reset_state()


@pytest.mark.core("2-BeforeStep", "3-AfterBatch", "3-InTwoModes", "1-Both", "3-BothAtOnce", "2-Frozen")
@pytest.mark.parametrize(
    "kind",
    [BeforeStep, AfterBatch, Both, BothAtOnce, InTwoModes, InnerModes, Frozen, FrozenInModes],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_either_side_follows_the_other(kind: type[Module], stage: int) -> None:
    weights, seen = train(kind, "auto", None)
    for found, seen_there in run_on_ranks(2, sharded, kind, stage):
        for name, wanted in weights.items():
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-5)
        assert seen_there == pytest.approx(seen, abs=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_half_precision(stage: int) -> None:
    """What is undone would differ by several tenths; what bf16 rounds differs by hundredths."""
    weights, _ = train(Both, "auto", None)
    for found, _ in run_on_ranks(2, sharded, Both, stage, "bf16-mixed"):
        for name, wanted in weights.items():
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=0.02)


def test_both_sides_at_once_are_refused_where_nobody_sees_them() -> None:
    for found in run_on_ranks(2, sharded, BothAtOnceUnseen, 2):
        assert "second.weight was changed in the module, and the weights of optimizer.param_groups" in found


@pytest.mark.core("3-FrozenInGroups", "2-FrozenWithGradient")
@pytest.mark.parametrize(
    ("kind", "words"),
    [(FrozenInGroups, "which held frozen parameters (first.weight)"), (FrozenWithGradient, "first.weight, which was")],
    ids=["FrozenInGroups", "FrozenWithGradient"],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_changes_that_frozen_parameters_would_miss_are_refused(kind: type[Module], words: str, stage: int) -> None:
    for found in run_on_ranks(2, sharded, kind, stage):
        assert words in found


@pytest.mark.core("2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_not_finite_is_stepped_on_in_fp32(stage: int) -> None:
    """As ddp does it: whoever looks for NaN finds it."""
    for weights, _ in run_on_ranks(2, sharded, OneLossIsNan, stage):
        assert all(bool(one.isnan().all()) for one in weights.values())


class SavedInMidWindow(Module):
    """Changes a weight in a step, and saves before an optimizer step has followed."""

    folder: Path
    expected: dict[str, Tensor]
    seen_after: dict[str, Tensor]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            with torch.no_grad():
                self.second.bias.data.add_(0.5)
                self.first.weight.data.mul_(0.5)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.expected = full_state_dict(self.trainer.strategy, self)
            self.expected["second.bias"] += 0.5
            self.expected["first.weight"] *= 0.5

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.seen_after = full_state_dict(self.trainer.strategy, self)
            self.trainer.save_checkpoint(self.folder)


def _saved(folder: Path, persistent: int) -> list[dict[str, Tensor]]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": persistent}
    module = SavedInMidWindow()
    module.folder = folder
    strategy = AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": zero})
    trainer = quiet_trainer(strategy, 2, max_epochs=1, accumulate_grad_batches=2, use_distributed_sampler=False)
    data = TensorDataset(torch.ones(4 * PER_RANK, 4), torch.ones(4 * PER_RANK, 3))
    trainer.fit(module, DataLoader(data, PER_RANK))
    reset_state()
    return [module.expected, module.seen_after]


@pytest.mark.core("0")
@pytest.mark.parametrize("persistent", [0, 10**5])
def test_a_save_in_mid_window_has_what_the_step_before_it_changed(persistent: int, tmp_path: Path) -> None:
    (expected, seen), _ = run_on_ranks(2, _saved, tmp_path / "saved", persistent)
    saved = load_state_dict(tmp_path / "saved")
    for name, weight in expected.items():
        torch.testing.assert_close(seen[name], weight, rtol=0, atol=0)
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=0)


def _defaults() -> tuple[Any, bool]:
    found = []

    class Looking(Module):
        def on_train_start(self) -> None:
            optimizer: Any = self.optimizers()
            found.append((optimizer.defaults["momentum"], hasattr(optimizer, "train")))

    train(Looking, AccelDeepSpeedStrategy(hf_ds_config=ds_config(2)), PartialState().process_index)
    reset_state()
    return found[0]


def test_deepspeeds_optimizer_has_the_defaults_of_the_users() -> None:
    """Callbacks of Lightning's users read them (finetuning-scheduler)."""
    assert run_on_ranks(2, _defaults) == [(0.9, False)] * 2
