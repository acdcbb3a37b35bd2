"""`AccelDeepSpeedStrategy` in the Trainer's loops: windows, evaluation, manual optimization, schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from accelight.state import GradientState, PartialState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, DeepSpeedPlugin
from accelight.strategies.deepspeed.ds_config import DeepSpeedSettings, HfDeepSpeedConfig
from accelight.strategies.deepspeed.optimizers import for_offload
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, train_deepspeed, trainer_for, whole_weights
from tests.strategies.oracle import (
    BATCH_SIZE,
    Case,
    Outcome,
    TinyModule,
    assert_same,
    build_optimizer,
    dataset,
    rank_loader,
    train_plain,
)

STAGES = (0, 1, 2, 3)


# ---------------------------------------------------------------------- windows
class WithEvaluation(TinyModule):
    """Validates in the middle of windows, and notes what `GradientState` says meanwhile."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.rates: list[float] = []
        self.synced: list[bool] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.synced.append(GradientState().sync_gradients)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.case.optimizer, self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self.counted = schedule
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def evaluate_everywhere() -> dict[int, tuple[Outcome, list[bool], int, int, float, int]]:
    found = {}
    for stage in STAGES:
        case, outcome = Case(accumulate=2, epochs=1), Outcome()
        # Validates after batches 3 and 6: the first inside a window of two.
        trainer = trainer_for(case, ds_config(stage), val_check_interval=3, num_sanity_val_steps=1)
        module, loader = WithEvaluation(case, outcome), rank_loader(2)
        trainer.fit(module, loader, rank_loader(2, batch_size=3))
        outcome.weights, outcome.global_step = whole_weights(module), trainer.global_step
        outcome.grad_norms.clear()
        steps, engine = module.counted.last_epoch, trainer.strategy.deepspeed_engine  # type: ignore[attr-defined]
        [metrics] = trainer.validate(module, loader, verbose=False)
        trainer.test(module, loader, verbose=False)
        predictions: Any = trainer.predict(module, loader)
        found[stage] = (outcome, module.synced, steps, engine.global_steps, metrics["val_loss"], len(predictions))
        reset_state()
    return found


def test_seven_batches_with_accumulation_two_are_four_steps() -> None:
    """Evaluation inside a window disturbs neither the window nor the weights; fit, validate, test and predict work."""
    expected = train_plain(Case(accumulate=2, epochs=1), 2)
    for outcome, synced, scheduled, engine_steps, _, num_predictions in run_on_ranks(
        2, evaluate_everywhere, timeout_s=180
    )[0].values():
        assert outcome.global_step == engine_steps == scheduled == 4
        assert synced == [False, True, False, True, False, True, True]
        assert_same(outcome, expected)
        assert num_predictions == 7


class Unsized(IterableDataset[tuple[Tensor, ...]]):
    """This rank's share of the data, without a length: nobody knows that the last window will be short."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        data, state = dataset(2), PartialState()
        yield from (data[i] for i in range(state.process_index, len(data), state.num_processes))


def train_unsized(cases: list[tuple[int, dict[str, Any], Case]]) -> list[Outcome]:
    return [
        train_deepspeed(case, {**ds_config(stage), **more}, DataLoader(Unsized(), BATCH_SIZE))
        for stage, more, case in cases
    ]


def test_a_last_window_that_nobody_knew_to_be_short() -> None:
    """Its gradients are scaled when it ends: in every stage, in fp32 and in bf16, wherever DeepSpeed keeps them."""
    fp32, bf16 = Case(accumulate=3, clip_norm=0.1), Case(accumulate=3, clip_norm=0.1, precision="bf16-mixed")
    grads_in_fp32: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
    cases: list[tuple[int, dict[str, Any], Case]] = [(stage, {}, fp32) for stage in STAGES]
    cases += [(stage, {}, bf16) for stage in STAGES] + [(1, grads_in_fp32, bf16)]
    outcomes = run_on_ranks(2, train_unsized, cases, timeout_s=180)[0]
    expected = train_plain(fp32, 2)
    for (_, _, case), found in zip(cases, outcomes, strict=True):
        if case.precision == "32-true":
            assert_same(found, expected)
        else:  # 8 bits of mantissa; a window not scaled would have a third of the norm
            torch.testing.assert_close(
                torch.tensor(found.grad_norms), torch.tensor(expected.grad_norms), rtol=0.1, atol=0
            )
            assert found.global_step == expected.global_step


# ---------------------------------------------------------------------- manual optimization
class Manual(TinyModule):
    """Accumulates by hand: two micro-batches each step."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [
            build_optimizer("sgd", self.model.embed.parameters()),
            build_optimizer("sgd", self.model.head.parameters()),
        ]


def train_by_hand() -> tuple[list[Outcome], str]:
    outcomes = []
    for stage in STAGES:
        case, outcome = Case(), Outcome()
        trainer = trainer_for(case, ds_config(stage), max_epochs=1, limit_train_batches=6)
        module = Manual(case, outcome)
        trainer.fit(module, rank_loader(2))
        outcome.weights, outcome.global_step = whole_weights(module), trainer.global_step
        outcomes.append(outcome)
        reset_state()
    with pytest.raises(ValueError, match="2 optimizers") as caught:
        trainer_for(Case(), ds_config(2)).fit(TwoOptimizers(Case(), Outcome()), rank_loader(2))
    return outcomes, str(caught.value)


def test_manual_optimization() -> None:
    """With one optimizer, ``step()`` ends the window; several are refused with the way out."""
    outcomes, error = run_on_ranks(2, train_by_hand, timeout_s=120)[0]
    plain = train_plain(Case(accumulate=2, epochs=1), 2)
    for outcome in outcomes:
        assert outcome.global_step == 3
        torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(plain.losses[:6]), rtol=1e-5, atol=1e-6)
    assert "prepare_model" in error


# ---------------------------------------------------------------------- overflow, offloaded Adam
class Overflowing(TinyModule):
    """Its second micro-batch has gradients that are not finite; the schedule halves the rate at each step."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.noted: list[tuple[bool, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.model(batch[0]).float(), batch[1].float())
        return loss * float("inf") if batch_idx == 1 else loss

    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.noted.append((strategy.step_was_skipped, self.trainer.optimizers[0].param_groups[0]["lr"]))

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer("sgd", self.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def overflow() -> list[Any]:
    found = []
    for stage in STAGES:
        config = {**ds_config(stage), "bf16": {"enabled": True, "check_grad_overflow": True}}
        module = Overflowing(Case(), Outcome())
        trainer = trainer_for(Case(), config, max_epochs=1, limit_train_batches=4)
        trainer.fit(module, rank_loader(2))
        found.append(module.noted)
        reset_state()
    return found


def test_overflowing_steps_are_skipped_and_hold_schedules_back() -> None:
    """In bf16 that the config alone asks for: DeepSpeed has no fp16 on most CPUs."""
    for noted in run_on_ranks(2, overflow, timeout_s=120)[0]:
        assert noted == [(False, 0.05), (True, 0.05), (False, 0.025), (False, 0.0125)]


def train_offloaded_adam(case: Case) -> list[Outcome]:
    everything = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return [
        train_deepspeed(case, ds_config(2, offload_optimizer={"device": "cpu"})),
        train_deepspeed(case, ds_config(3, **everything)),
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adamw", "decoupled_adam"])
def test_offloaded_adam_is_deepspeeds_own(optimizer: str) -> None:
    """The long limit is for compiling it, once on a machine."""
    case = Case(accumulate=3, clip_norm=0.1, optimizer=optimizer)
    for outcome in run_on_ranks(2, train_offloaded_adam, case, timeout_s=280)[0]:
        assert_same(outcome, train_plain(case, 2))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"decoupled_weight_decay": True}])
def test_options_that_deepspeeds_adam_lacks_are_refused(options: dict[str, Any]) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], **each} for each in ({}, options)]
    settings = DeepSpeedSettings.of(HfDeepSpeedConfig(ds_config(2, offload_optimizer={"device": "cpu"})))
    with pytest.raises(ValueError, match=r"neither amsgrad, maximize, nor groups.* Remove them, stop offloading"):
        for_offload(torch.optim.Adam(groups), settings)


# ---------------------------------------------------------------------- names, arguments
@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "parameters"),
    [
        ("accel_deepspeed", 2, "none", "none"),
        ("accel_deepspeed_stage_1", 1, "none", "none"),
        ("accel_deepspeed_stage_2", 2, "none", "none"),
        ("accel_deepspeed_stage_2_offload", 2, "cpu", "none"),
        ("accel_deepspeed_stage_3", 3, "none", "none"),
        ("accel_deepspeed_stage_3_offload", 3, "cpu", "cpu"),
        ("accel_deepspeed_stage_3_offload_nvme", 3, "nvme", "nvme"),
    ],
)
def test_registered_names(name: str, stage: int, optimizer: str, parameters: str) -> None:
    strategy: Any = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, AccelDeepSpeedStrategy)
    plugin = strategy.deepspeed_plugin
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.offload_param_device) == (
        stage,
        optimizer,
        parameters,
    )


def test_a_plugin_excludes_its_fields() -> None:
    with pytest.raises(ValueError, match="deepspeed_plugin and also zero_stage"):
        AccelDeepSpeedStrategy(DeepSpeedPlugin(), zero_stage=3)
    with pytest.raises(TypeError, match="must be a DeepSpeedPlugin"):
        AccelDeepSpeedStrategy({"one": 1})  # type: ignore[dict-item]
    with pytest.raises(RuntimeError, match="setup"):
        _ = AccelDeepSpeedStrategy().deepspeed_engine
