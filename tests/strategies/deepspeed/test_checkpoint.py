"""Saving and resuming with DeepSpeed: the next loss is the same, on another number of ranks, too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accelight.state import PartialState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy
from accelight.strategies.deepspeed import universal
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, trainer_for, whole_weights
from tests.strategies.oracle import (
    BATCH_SIZE,
    Case,
    Outcome,
    TinyModule,
    assert_same,
    dataset,
    quiet_trainer,
    rank_loader,
    strategy_named,
    train_plain,
)

CASES = {stage: Case(accumulate=3, clip_norm=0.1, optimizer="adamw" if stage % 2 else "sgd") for stage in range(4)}


class WithBuffer(TinyModule):
    """Its buffer counts the micro-batches: only a checkpoint can restore it."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: torch.Tensor

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)


class WithForeignObject(TinyModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = Path("anything")


def interrupted(stage: int, folder: Path) -> tuple[Outcome, float, list[str]]:
    """Train two epochs with a new Trainer, module and engine for the second, and validate in between."""
    case, outcome, config = CASES[stage], Outcome(), ds_config(stage)
    path = folder / f"stage{stage}"
    first = trainer_for(case, config, max_epochs=1)
    first.strategy.load_universal = True  # type: ignore[attr-defined] # which evaluation does not need
    first.fit(WithBuffer(case, outcome), rank_loader(2))
    first.validate(first.lightning_module, rank_loader(2), verbose=False)  # with the same engine
    first.save_checkpoint(path)
    files = sorted(file.name for file in path.rglob("*.pt"))
    evaluated: list[Any] = []
    trained: Any = first.lightning_module
    evaluated += first.validate(trained, rank_loader(2), ckpt_path=str(path), verbose=False)  # with the same engine
    for trainer in (first, quiet_trainer(AccelDeepSpeedStrategy(hf_ds_config=config), 2)):  # its own engine, a new one
        module = WithBuffer(case, Outcome())
        evaluated += trainer.validate(module, rank_loader(2), ckpt_path=str(path), verbose=False)
        if trainer is first:
            reset_state()
    reset_state()
    second, module = trainer_for(case, config), WithBuffer(case, outcome)
    second.fit(module, rank_loader(2), ckpt_path=str(path))
    outcome.weights, outcome.global_step = whole_weights(module), second.global_step
    reset_state()
    assert evaluated == [pytest.approx(evaluated[0], rel=1e-6)] * 3
    return outcome, float(module.seen), files


def interrupt_all(folder: Path) -> list[Any]:
    return [interrupted(stage, folder) for stage in CASES]


def test_resumes_with_the_same_next_loss(tmp_path: Path) -> None:
    for (stage, case), (found, seen, files) in zip(
        CASES.items(), run_on_ranks(2, interrupt_all, tmp_path, timeout_s=200)[0], strict=True
    ):
        expected = train_plain(case, 2)
        assert_same(found, expected)
        assert seen == 14
        assert len(files) == {0: 1, 1: 3, 2: 3, 3: 4}[stage]  # every rank its own shards


# ---------------------------------------------------------------------- other numbers of processes
def go_on(case: Case, configs: list[dict[str, Any]], epoch: int, folder: Path) -> list[tuple[Outcome, float]]:
    """Train one epoch more, every rank on the same batches: the number of ranks changes nothing then."""
    found = []
    for number, config in enumerate(configs):
        outcome, path = Outcome(), folder / str(number)
        strategy = AccelDeepSpeedStrategy(hf_ds_config=config, load_universal=True)
        trainer = quiet_trainer(
            strategy,
            PartialState().num_processes,
            max_epochs=epoch,
            accumulate_grad_batches=case.accumulate,
            gradient_clip_val=case.clip_norm,
            use_distributed_sampler=False,
        )
        module = WithBuffer(case, outcome)
        freeze_bias(module.model)
        if epoch > 1:  # only the checkpoint has its value
            torch.nn.init.constant_(module.model.head.bias, 7.0)
        trainer.fit(
            module, DataLoader(dataset(1), BATCH_SIZE), ckpt_path=str(path / str(epoch - 1)) if epoch > 1 else None
        )
        trainer.save_checkpoint(path / str(epoch))
        found.append((outcome, float(module.seen)))
        reset_state()
    return found


def freeze_more(case: Case, folder: Path) -> str:
    """Go on with a parameter frozen that was trained when the checkpoint was saved."""
    module = WithBuffer(case, Outcome())
    freeze_bias(module.model)
    module.model.head.weight.requires_grad_(False)
    strategy = AccelDeepSpeedStrategy(hf_ds_config=ds_config(3), load_universal=True)
    trainer = quiet_trainer(strategy, PartialState().num_processes, max_epochs=3, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="frozen") as caught:
        trainer.fit(module, DataLoader(dataset(1), BATCH_SIZE), ckpt_path=str(folder / "0" / "2"))
    return str(caught.value)


def freeze_bias(model: Any) -> None:
    model.head.bias.requires_grad_(False)


@pytest.mark.exhaustive
def test_universal_checkpoints_go_to_other_numbers_of_processes(tmp_path: Path) -> None:
    case = Case(accumulate=3, clip_norm=0.1, optimizer="adamw", epochs=3)
    configs = [ds_config(stage) for stage in (3, 2)]  # the other one goes to one process alone: each conversion is slow
    runs = [
        run_on_ranks(world_size, go_on, case, configs if epoch < 3 else configs[:1], epoch, tmp_path, timeout_s=200)[0]
        for epoch, world_size in enumerate((2, 1, 3), start=1)
    ]
    expected = train_plain(case, 1, freeze_bias).losses
    for number in (0, 1):
        mine = [run[number] for run in runs if number < len(run)]
        losses = [loss for outcome, _ in mine for loss in outcome.losses]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[: len(losses)]), rtol=1e-5, atol=1e-6)
        assert mine[-1][1] == 7 * len(mine)
    for error in run_on_ranks(3, freeze_more, case, tmp_path):
        assert "head.weight is frozen, but was not when" in error


# ---------------------------------------------------------------------- what is refused, and 16-bit weights
def refuse(folder: Path) -> dict[str, str]:
    case, errors = Case(epochs=1, optimizer="adamw"), {}

    def attempt(name: str, stage: int, path: Path, **more: Any) -> None:
        trainer: Trainer = trainer_for(case, ds_config(stage), max_epochs=2)
        with pytest.raises((ValueError, RuntimeError, FileNotFoundError)) as caught:
            trainer.fit(WithForeignObject(case, Outcome()), rank_loader(1), ckpt_path=str(path), **more)
        errors[name] = str(caught.value)
        reset_state()

    trainer = trainer_for(case, ds_config(2))
    trainer.fit(WithForeignObject(case, Outcome()), rank_loader(1))
    trainer.save_checkpoint(folder / "here")
    reset_state()
    attempt("number", 2, folder / "elsewhere")
    attempt("stage", 3, folder / "here")
    attempt("absent", 2, folder / "nothing")
    attempt("foreign", 2, folder / "here")
    for universally in (False, True):
        strategy = AccelDeepSpeedStrategy(hf_ds_config=ds_config(2), load_universal=universally, weights_only=False)
        trusting = quiet_trainer(strategy, 1, max_epochs=2)
        trusting.fit(WithForeignObject(case, Outcome()), rank_loader(1), ckpt_path=str(folder / "here"))
        assert trusting.global_step == 14
        reset_state()
    return errors


def save_16bit(folder: Path) -> dict[str, torch.Tensor]:
    case, outcome = Case(epochs=1), Outcome()
    trainer = trainer_for(case, ds_config(3, stage3_gather_16bit_weights_on_model_save=True))
    module = WithBuffer(case, outcome)
    trainer.fit(module, rank_loader(2))
    trainer.save_checkpoint(folder / "elsewhere")
    return whole_weights(module)


def save_stage2(folder: Path) -> None:
    train = trainer_for(Case(epochs=1), ds_config(2))
    train.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    train.save_checkpoint(folder / "elsewhere")


def test_16bit_weights_beside_the_shards(tmp_path: Path) -> None:
    expected = run_on_ranks(2, save_16bit, tmp_path)[0]
    found = load_file(tmp_path / "elsewhere" / "model.safetensors")
    assert sorted(found) == sorted([*(f"model.{name}" for name in expected), "seen"])
    for name, weight in expected.items():
        torch.testing.assert_close(found[f"model.{name}"], weight.bfloat16(), rtol=0, atol=0)


@pytest.mark.exhaustive
def test_the_state_of_sgd_has_no_universal_form(tmp_path: Path) -> None:
    run_on_ranks(2, save_stage2, tmp_path)
    with pytest.raises(ValueError, match=r"^DeepSpeed converts the states of Adam and AdamW"):
        universal.convert(tmp_path / "elsewhere", "checkpoint")
    assert not list((tmp_path / "elsewhere").glob("*universal*"))


def test_refused_checkpoints(tmp_path: Path) -> None:
    run_on_ranks(2, save_stage2, tmp_path)
    errors = run_on_ranks(1, refuse, tmp_path, timeout_s=120)[0]
    for name, expected in (
        ("number", "saved by 2 rank(s)"),
        ("number", "load_universal=True"),
        ("stage", "saved with ZeRO stage 1 or 2"),
        ("absent", "Checkpoint file not found"),
        ("foreign", "weights_only=False"),
        ("foreign", "pathlib"),
    ):
        assert expected in errors[name]


# ---------------------------------------------------------------------- random generators
class Noisy(LightningModule):
    """Losses tell every generator's state apart; the data are the same in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean() * random.random()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _noisy(stage: int, folder: str, resume_from: str | None) -> list[float]:
    rank = PartialState().process_index
    torch.manual_seed(0)
    module = Noisy()
    torch.manual_seed(10 * (resume_from is not None) + rank)
    random.seed(10 * (resume_from is not None) + rank)
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2)
    saves = {"callbacks": [saver], "enable_checkpointing": True} if resume_from is None else {}
    strategy = AccelDeepSpeedStrategy(hf_ds_config=ds_config(stage))
    trainer = quiet_trainer(strategy, 2, max_epochs=2, **saves)
    trainer.fit(module, DataLoader(cast("Any", torch.ones(10, 4)), 1), ckpt_path=resume_from)
    reset_state()
    return module.losses


@pytest.mark.core("2")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dropout_continues_as_it_would_have(tmp_path: Path, stage: int) -> None:
    whole = run_on_ranks(2, _noisy, stage, str(tmp_path), None)
    assert whole[0] != whole[1]
    name, num_left = "step=4.ckpt", 6
    for found, expected in zip(run_on_ranks(2, _noisy, stage, "", str(tmp_path / name)), whole, strict=True):
        assert found == pytest.approx(expected[-num_left:], rel=1e-6)


class _ReplacesWeights(TinyModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: torch.zeros_like(one) for name, one in checkpoint["state_dict"].items()}


def _save_replaced(folder: str) -> None:
    trainer = quiet_trainer(strategy_named("zero2"), 2, max_steps=1)
    trainer.fit(_ReplacesWeights(Case(), Outcome()), rank_loader(2))
    with pytest.raises((ValueError, RuntimeError), match=r"changes checkpoint\['state_dict'\] \(model\.embed\.weight"):
        trainer.save_checkpoint(f"{folder}/saved.ckpt")


def test_weights_that_a_hook_replaces_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    run_on_ranks(2, _save_replaced, str(tmp_path))
    assert not list(tmp_path.iterdir())
