"""Optimizer, schedule and everything that is ``"auto"``, from a DeepSpeed config under the Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from accelight.state import reset_state
from accelight.strategies import AccelDeepSpeedStrategy, DeepSpeedPlugin, DummyOptim, DummyScheduler
from accelight.strategies.deepspeed import HfDeepSpeedConfig
from accelight.strategies.deepspeed.ds_config import DeepSpeedSettings
from accelight.strategies.deepspeed.optimizers import prefer_torch_adam
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.auto_configs import EVERYTHING_AUTO
from tests.strategies.deepspeed.training import whole_weights
from tests.strategies.oracle import (
    BATCH_SIZE,
    Case,
    Outcome,
    TinyModule,
    build_model,
    dataset,
    quiet_trainer,
    rank_loader,
)

WORLD, ACCUMULATE, CLIP, WARMUP = 2, 3, 0.5, 2
STEPS = 6  # 7 micro-batches by 3 are 3 steps, over two epochs


class FromConfig(TinyModule):
    """``which`` says what ``configure_optimizers`` returns."""

    hidden_size = 8

    def __init__(self, outcome: Outcome, which: str = "dummies") -> None:
        super().__init__(Case(), outcome)
        self.which = which
        self.rates: list[float] = []
        """After each optimizer step."""
        self.used: list[float] = []
        """In each window."""
        self.overflow_at: int | None = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % ACCUMULATE == 0:
            self.used.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss * float("inf") if batch_idx == self.overflow_at else loss

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.rates) < self.trainer.global_step:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        if self.which == "nothing":
            return None
        real = torch.optim.AdamW(self.parameters(), lr=0.01)
        dummy = DummyOptim(self.parameters(), lr=0.01, weight_decay=0.1)
        if self.which == "dummies":
            return [dummy], [DummyScheduler(dummy, warmup_num_steps=WARMUP)]
        if self.which == "groups":
            rest = [each for name, each in self.named_parameters() if not name.startswith("model.embed")]
            return DummyOptim(
                [{"params": self.model.embed.parameters(), "lr": 0.02}, {"params": rest, "weight_decay": 0}], lr=0.01
            )
        if self.which == "late schedule":
            return [dummy], [DummyScheduler(dummy, lr_scheduler_callable=halve_each_step)]
        return {"real optimizer": real, "dummy": dummy}[self.which]


def halve_each_step(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def fit(plugin: DeepSpeedPlugin, module: FromConfig, **more: Any) -> dict[str, Any]:
    arguments = {"max_epochs": 2, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP, **more}
    trainer = quiet_trainer(AccelDeepSpeedStrategy(plugin), WORLD, **arguments)
    trainer.fit(module, rank_loader(WORLD))
    module.outcome.weights, module.outcome.global_step = whole_weights(module), trainer.global_step
    strategy = trainer.strategy
    assert isinstance(strategy, AccelDeepSpeedStrategy)
    reset_state()
    return {
        "outcome": module.outcome,
        "config": strategy.deepspeed_config,
        "rates": module.rates,
        "used": module.used,
        "precision": trainer.precision,
    }


class Skips(Callback):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.strategy.step_was_skipped)


def train_everything() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (2, 3):
        zero = {**EVERYTHING_AUTO["zero_optimization"], "stage": stage}
        plugin = DeepSpeedPlugin(hf_ds_config={**EVERYTHING_AUTO, "zero_optimization": zero})
        found[f"auto {stage}"] = fit(plugin, FromConfig(Outcome()))

    alone: dict[str, Any] = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": ACCUMULATE}
    alone["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    found["config alone"] = fit(
        DeepSpeedPlugin(hf_ds_config=alone), FromConfig(Outcome(), "nothing"), accumulate_grad_batches=1
    )
    groups = FromConfig(Outcome(), "groups")
    fit(DeepSpeedPlugin(hf_ds_config=alone), groups, max_epochs=0)
    found["groups"] = [(each["lr"], each["weight_decay"]) for each in groups.trainer.optimizers[0].param_groups]
    found["late"] = fit(DeepSpeedPlugin(hf_ds_config=alone), FromConfig(Outcome(), "late schedule"))

    # A plugin serves one Trainer after another, in another precision each time.
    plugin = DeepSpeedPlugin(hf_ds_config=EVERYTHING_AUTO)
    for precision in ("bf16-mixed", "32-true"):
        skips, module = Skips(), FromConfig(Outcome())
        module.overflow_at = 0 if precision == "bf16-mixed" else None
        more: dict[str, Any] = {"accumulate_grad_batches": 1, "limit_train_batches": 3, "max_epochs": 1}
        found[precision] = fit(plugin, module, precision=precision, callbacks=[skips], **more)
        found[precision]["skips"] = skips.seen

    both = {**alone, "scheduler": {"type": "WarmupLR", "params": {}}}
    for name, config, which in (
        ("both", alone, "real optimizer"),
        ("neither", {"zero_optimization": {"stage": 2}}, "nothing"),
        ("dummy alone", {"zero_optimization": {"stage": 2}}, "dummy"),
        ("two schedules", both, "late schedule"),
        ("two numbers", alone, "dummy"),
    ):
        number = 2 if name == "two numbers" else ACCUMULATE
        with pytest.raises(ValueError, match="config") as caught:
            fit(DeepSpeedPlugin(hf_ds_config=config), FromConfig(Outcome(), which), accumulate_grad_batches=number)
        found[name] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, train_everything, timeout_s=280)


def train_plain(rates: list[float]) -> dict[str, Tensor]:
    """Train in one process, each step at the given learning rate."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    tensors = dataset(WORLD).tensors
    size = WORLD * BATCH_SIZE
    batches = list(zip(*(tensor.split(size) for tensor in tensors), strict=True))
    windows = [batches[:3], batches[3:6], batches[6:]] * 2
    for window, rate in zip(windows, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for x, y in window:
            (torch.nn.functional.mse_loss(model(x), y) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_weights(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert found["outcome"].global_step == STEPS
    for name, weight in expected.items():
        torch.testing.assert_close(found["outcome"].weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_config_with_everything_auto_trains_unchanged(stage: int, trained: Any) -> None:
    for found in trained:
        config = found[f"auto {stage}"]["config"]
        assert "auto" not in str(config)
        assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, ACCUMULATE)
        assert (config["train_batch_size"], config["gradient_clipping"]) == (WORLD * 2 * ACCUMULATE, CLIP)
        params = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
        assert config["optimizer"]["params"] == {**params, "torch_adam": True}  # nothing is compiled for the CPU
        assert config["scheduler"]["params"] == {
            "warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": WARMUP, "total_num_steps": STEPS,
        }  # fmt: skip
        # DeepSpeed's schedules count steps from -1. It ends with the training, on two processes as on one.
        assert found[f"auto {stage}"]["rates"][-1] == pytest.approx(0.01 * (STEPS - 5) / (STEPS - WARMUP))
        assert_weights(found[f"auto {stage}"], train_plain(found[f"auto {stage}"]["used"]))


def test_an_optimizer_that_only_the_config_knows(trained: Any) -> None:
    for found in trained:
        config = found["config alone"]["config"]
        assert config["gradient_accumulation_steps"] == ACCUMULATE  # honoured: the Trainer had none
        assert_weights(found["config alone"], train_plain([0.01] * STEPS))


def test_groups_take_what_they_leave_open_from_the_config(trained: Any) -> None:
    assert [found["groups"] for found in trained] == [[(0.02, 0.1), (0.01, 0)]] * WORLD


def test_a_schedule_that_the_code_makes_once_there_is_an_optimizer(trained: Any) -> None:
    for found in trained:
        rates = [0.01 * 0.5**step for step in range(STEPS + 1)]
        assert found["late"]["rates"] == pytest.approx(rates[1:])
        assert_weights(found["late"], train_plain(rates[:-1]))


def test_a_plugin_serves_trainers_of_different_precision(trained: Any) -> None:
    for found in trained:
        assert found["bf16-mixed"]["config"]["bf16"]["enabled"] is True
        assert (found["32-true"]["config"]["bf16"]["enabled"], found["32-true"]["precision"]) == (False, "32-true")


def test_a_step_skipped_in_bf16_is_visible_and_holds_the_schedule_back(trained: Any) -> None:
    for found in trained:
        assert found["bf16-mixed"]["skips"] == [True, False, False]
        assert found["32-true"]["skips"] == [False, False, False]
        skipped, all_steps = found["bf16-mixed"]["rates"], found["32-true"]["rates"]
        assert skipped == pytest.approx([0.0, *all_steps[:2]])


def test_torch_adam_only_where_it_replaces_nothing() -> None:
    for params, zero, device, expected in (
        ({"lr": 1}, {}, "cpu", True),
        ({"lr": 1, "torch_adam": False}, {}, "cpu", False),
        ({"lr": 1, "bias_correction": False}, {}, "cpu", None),
        ({"lr": 1}, {}, "xpu", None),
        ({"lr": 1}, {"offload_optimizer": {"device": "cpu"}}, "cpu", None),
    ):
        config: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": zero}
        settings = DeepSpeedSettings.of(HfDeepSpeedConfig(config))
        preferred = prefer_torch_adam(settings, torch.device(device))
        assert preferred.optimizer_params.get("torch_adam") is expected
        assert settings.optimizer_params == params  # as it was
    nothing = DeepSpeedSettings.of(HfDeepSpeedConfig({}))
    assert prefer_torch_adam(nothing, torch.device("cpu")) == nothing


@pytest.mark.parametrize(("home", "expected"), [(None, True), ("/usr/local/cuda", None)])
def test_torch_adam_on_cuda_where_there_is_no_compiler(
    home: str | None, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", home)
    settings = DeepSpeedSettings.of(HfDeepSpeedConfig({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}))
    assert prefer_torch_adam(settings, torch.device("cuda")).optimizer_params.get("torch_adam") is expected


def test_every_wrong_mixture(trained: Any) -> None:
    for found in trained:
        assert found["both"].startswith(
            "Both the DeepSpeed config and configure_optimizers (AdamW) define an optimizer."
        )
        assert found["neither"].startswith(
            "Neither the DeepSpeed config nor configure_optimizers defines an optimizer."
        )
        assert found["dummy alone"].startswith(
            "configure_optimizers returns a DummyOptim, but the DeepSpeed config has no"
        )
        assert found["two schedules"].startswith(
            "Both the DeepSpeed config and DummyScheduler(lr_scheduler_callable=...)"
        )
        assert "- gradient_accumulation_steps: 3 in the DeepSpeed config, Trainer(" in found["two numbers"]
