"""Weights of full checkpoints, as plain Lightning saves them, go on with every stage of ZeRO."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from accelight.checkpoint import merge_fsdp_weights
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, trainer_for, whole_weights
from tests.strategies.oracle import (
    Case,
    Outcome,
    TinyModule,
    assert_same,
    build_model,
    dataset,
    quiet_trainer,
    rank_loader,
    train_plain,
)

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Named(TinyModule):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.norm = nn.BatchNorm1d(3, affine=False)


def save_full(path: str) -> dict[str, Tensor]:
    module = Named(Case(epochs=1), Outcome())
    module.get_buffer("norm.running_mean").add_(3)
    trainer = quiet_trainer("auto", 1, max_epochs=1)
    trainer.fit(module, rank_loader(1))
    trainer.save_checkpoint(path)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    path = str(tmp_path_factory.mktemp("full") / "full.ckpt")
    return path, run_on_ranks(1, save_full, path)[0]


def go_on(path: str, stage: int) -> tuple[Outcome, Tensor]:
    case, outcome = Case(epochs=2), Outcome()
    module, trainer = Named(case, outcome), trainer_for(case, ds_config(stage))
    with pytest.warns(UserWarning, match="starts from scratch") if dist.get_rank() == 0 else nullcontext():
        trainer.fit(module, rank_loader(2), ckpt_path=path)
    outcome.weights, outcome.global_step = whole_weights(module), trainer.global_step
    outcome.grad_norms = []
    return outcome, module.norm.running_mean  # type: ignore[return-value]


@STAGES
def test_training_goes_on_with_the_weights(full: tuple[str, dict[str, Tensor]], stage: int) -> None:
    path, weights = full
    model = build_model()
    model.load_state_dict({n.removeprefix("model."): t for n, t in weights.items() if n.startswith("model.")})
    expected = train_plain(Case(epochs=1), 2, model=model)
    expected.global_step += 7  # of the first epoch
    for found, mean in run_on_ranks(2, go_on, path, stage):
        assert_same(found, expected)
        assert mean.tolist() == [3.0, 3.0, 3.0]


def save_again(path: str, folder: str, stage: int, precision: str) -> None:
    case = Case(epochs=1, precision=precision)
    trainer = trainer_for(case, ds_config(stage))
    trainer.fit(Named(case, Outcome()), rank_loader(2), ckpt_path=path)  # nothing is left to train
    trainer.save_checkpoint(folder)


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16-mixed"), (2, "32-true"), (3, "bf16-mixed")])
def test_fp32_weights_are_those_of_the_file(
    full: tuple[str, dict[str, Tensor]], tmp_path: Path, stage: int, precision: str
) -> None:
    run_on_ranks(2, save_again, full[0], str(tmp_path / "saved"), stage, precision)
    merge_fsdp_weights(tmp_path / "saved", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in full[1].items():
        if name.startswith("model."):
            assert torch.equal(merged[name], tensor), name


def evaluate(path: str, stage: int) -> float:
    trainer, module = trainer_for(Case(), ds_config(stage)), Named(Case(), Outcome())
    return float(trainer.validate(module, rank_loader(2), ckpt_path=path, verbose=False)[0]["val_loss"])


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_takes_them(full: tuple[str, dict[str, Tensor]], stage: int) -> None:
    path, weights = full
    model = build_model()
    model.load_state_dict({n.removeprefix("model."): t for n, t in weights.items() if n.startswith("model.")})
    inputs, targets = dataset(2).tensors
    expected = nn.functional.mse_loss(model(inputs), targets).item()
    assert run_on_ranks(2, evaluate, path, stage) == pytest.approx([expected, expected], rel=1e-5)


class Renamed(Named):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.extra = nn.Linear(2, 2)
        del self.norm
        self.model.head = nn.Linear(8, 4)


def refuse(path: str, stage: int, precision: str, kind: type[Named]) -> str:
    case = Case(precision=precision)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        trainer_for(case, ds_config(stage)).fit(kind(case, Outcome()), rank_loader(2), ckpt_path=path)
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_does_not_fit_is_listed(full: tuple[str, dict[str, Tensor]], stage: int) -> None:
    for message in run_on_ranks(2, refuse, full[0], stage, "32-true", Renamed):
        assert "extra.weight is missing." in message
        assert "norm.running_mean is not in the model." in message
        assert "model.head.weight has the shape (3, 8), and (4, 8) in the model." in message


def test_stage_0_in_half_precision_is_refused(full: tuple[str, dict[str, Tensor]]) -> None:
    for message in run_on_ranks(2, refuse, full[0], 0, "bf16-mixed", Named):
        assert "Use stage 1" in message
