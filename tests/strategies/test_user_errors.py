"""What users stumble over: it works as in plain Lightning, or the error says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader, strategy_named


class Sampling(TinyModule):
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.inference_mode():
            self.sample = self.model(torch.ones(1, 5))
            torch.testing.assert_close(self(torch.ones(1, 5)), self.sample)


def call_after_fit(strategy: str) -> tuple[list[float], list[float]]:
    module = Sampling(Case(epochs=1), Outcome())
    trainer = quiet_trainer(strategy_named(strategy), 2, max_epochs=1)
    trainer.fit(module, rank_loader(2))
    return module.sample[0].tolist(), module.model(torch.ones(1, 5))[0].tolist()


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2", "zero3"])
def test_the_module_is_called_in_inference_mode_and_after_fit(strategy: str) -> None:
    for inside, after in run_on_ranks(2, call_after_fit, strategy):
        assert inside == pytest.approx(after)


def sample_in_half_precision(strategy: str, precision: Any = "bf16-mixed") -> torch.dtype:
    module = Sampling(Case(epochs=1), Outcome())
    trainer = quiet_trainer(strategy_named(strategy), 2, max_epochs=1, precision=precision)
    trainer.fit(module, rank_loader(2))
    return module.sample.dtype


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2", "zero3"])
def test_mixed_precision_in_the_users_inference_mode(strategy: str) -> None:
    assert run_on_ranks(2, sample_in_half_precision, strategy) == [torch.bfloat16] * 2


def resume(strategy: str, path: str) -> str:
    trainer = quiet_trainer(strategy_named(strategy), 2, max_epochs=1)
    with pytest.raises((ValueError, FileNotFoundError, RuntimeError)) as caught:
        trainer.fit(TinyModule(Case(epochs=1), Outcome()), rank_loader(2), ckpt_path=path)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2"])
def test_what_is_no_checkpoint(strategy: str, tmp_path: Path) -> None:
    text, folder = tmp_path / "text", tmp_path / "folder"
    text.write_text("no checkpoint\n" * 40)
    folder.mkdir()
    for path in (text, folder):
        for message in run_on_ranks(2, resume, strategy, str(path)):
            assert message.startswith(str(path))
            assert "trainer.save_checkpoint(" in message


def compute_in_half_precision() -> str:
    from deepspeed.accelerator import get_accelerator

    without_fp16 = mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=False)  # some have it
    with without_fp16, pytest.raises(ValueError, match="not compute in fp16 on this device") as caught:
        sample_in_half_precision("zero2", "16-mixed")
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device that computes in fp16")
def test_fp16_where_deepspeed_has_none() -> None:
    for message in run_on_ranks(2, compute_in_half_precision):
        assert "Use another Trainer(precision=...), 'bf16-mixed' or '32-true'" in message


def change_strategies(first: str, second: str) -> str:
    module = TinyModule(Case(epochs=1), Outcome())
    quiet_trainer(strategy_named(first), 2, max_epochs=1).fit(module, rank_loader(2))
    with pytest.raises(RuntimeError, match="already") as caught:
        quiet_trainer(strategy_named(second), 2, max_epochs=1).fit(module, rank_loader(2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("fsdp2", "zero2", "TinyModule is already sharded with FSDP, and DeepSpeed cannot use it"),
        ("zero3", "fsdp1", "TinyModule is already partitioned with DeepSpeed's stage 3, and FSDP cannot use it"),
    ],
)
def test_a_module_stays_with_the_strategy_that_sharded_it(first: str, second: str, expected: str) -> None:
    for message in run_on_ranks(2, change_strategies, first, second):
        assert message.startswith(expected)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_a_checkpoint_that_is_not_there(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "nothing.ckpt"
    for message in run_on_ranks(2, resume, strategy, str(path)):
        assert message.startswith(f"Checkpoint file not found: {path}")  # plain Lightning's words
        assert "trainer.save_checkpoint(" in message


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2"])
def test_saving_before_the_setup_is_told_as_that(strategy: str, tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy_named(strategy), 1)
    trainer.strategy.connect(TinyModule(Case(), Outcome()))
    with pytest.raises(RuntimeError, match="only after the strategy's setup"):
        trainer.save_checkpoint(tmp_path / "file.ckpt")


def misspell() -> str:
    config = ds_config(2, reduce_bucket_sise=5, overlap_comm="maybe")
    with pytest.raises(ValueError, match="DeepSpeed rejects this config") as caught:
        quiet_trainer(AccelDeepSpeedStrategy(hf_ds_config=config), 2, max_epochs=1).fit(
            TinyModule(Case(epochs=1), Outcome()), rank_loader(2)
        )
    return str(caught.value)


def test_keys_that_deepspeed_does_not_know() -> None:
    for message in run_on_ranks(2, misspell):
        _, *lines = message.splitlines()
        assert lines == [
            "- overlap_comm: 'maybe'. Input should be a valid boolean, unable to interpret input.",
            "- reduce_bucket_sise: there is no such key. Did you mean 'reduce_bucket_size'?",
        ]
