"""Modules and strategies among the hyperparameters: saved as in plain Lightning, or refused by name."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Block, Case, Outcome, TinyModule, quiet_trainer, rank_loader

VERSIONS = pytest.mark.parametrize("version", [1, 2])
KINDS = pytest.mark.parametrize("kind", ["full", "sharded"])


class Remembering(nn.MSELoss):
    """As metrics do, keeps the last loss, with its graph and the hooks that are put on it."""

    def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
        self.last = super().forward(found, wanted)
        return self.last


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
        return (self.weight * (found - wanted).abs()).mean()


class WithLoss(TinyModule):
    def __init__(
        self, loss: nn.Module, metrics: list[nn.Module], strategy: Any = None, callbacks: list[Callback] | None = None
    ) -> None:
        super().__init__(Case(epochs=1), Outcome())
        self.save_hyperparameters()
        self.loss, self.metrics = loss, nn.ModuleList(metrics)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self.model(batch[0])
        return self.loss(found, batch[1]) + sum(metric(found, batch[1]) for metric in self.metrics)


def hook(module: nn.Module, args: Any, output: Tensor) -> None:
    """A user's own."""


def strategy_for(version: int, kind: str, **more: Any) -> Any:
    # The loss is a unit of its own, too.
    more = {"auto_wrap_policy": {Block, nn.L1Loss}, "timeout": timedelta(minutes=2), **more}
    return AccelFSDPStrategy(fsdp_version=version, state_dict_type=kind, **more)


def fit_and_save(path: str, strategy: Any, loss: nn.Module, metrics: list[nn.Module]) -> WithLoss:
    callback: Any = Callback()
    module = WithLoss(loss, metrics, strategy, [callback])
    trainer = quiet_trainer(strategy, 2, max_epochs=1, limit_train_batches=2, callbacks=[callback])
    trainer.fit(module, rank_loader(2))
    trainer.save_checkpoint(path)
    assert vars(callback)["log"] == module.log  # the Trainer's doing
    return module


def hyperparameters_of(path: str) -> Any:
    file = Path(path)
    return torch.load(file / "meta.pt" if file.is_dir() else file, weights_only=False)["hyper_parameters"]


def save_losses(folder: str, version: int, kind: str) -> dict[str, Any]:
    loss, path = Remembering(), f"{folder}/saved"
    loss.register_forward_hook(hook)
    module = fit_and_save(path, strategy_for(version, kind), loss, [nn.L1Loss()])
    assert type(module.hparams["loss"]) is Remembering
    assert loss.last.requires_grad
    saved = hyperparameters_of(path)
    assert type(saved["strategy"]) is AccelFSDPStrategy
    assert saved["strategy"].fsdp_plugin.fsdp_version == version
    assert [vars(each) for each in saved["callbacks"]] == [{}]
    again = quiet_trainer(strategy_for(version, kind), 2, max_epochs=2)
    again.fit(WithLoss(nn.MSELoss(), [nn.L1Loss()]), rank_loader(2), ckpt_path=path, weights_only=False)
    if kind == "full":
        loaded = WithLoss.load_from_checkpoint(path, weights_only=False)
        assert type(loaded.loss) is Remembering
        assert type(loaded.hparams["metrics"][0]) is nn.L1Loss
        assert list(loaded.state_dict()) == list(WithLoss(nn.MSELoss(), []).state_dict())
    return {
        "vars": sorted(set(vars(saved["metrics"][0])) ^ set(vars(nn.L1Loss()))),
        "classes": [type(saved["loss"]), type(saved["metrics"][0])],
        "hooks": [one.__name__ for one in saved["loss"]._forward_hooks.values()],
        "last": (saved["loss"].last - loss.last).abs().item(),
        "value": saved["loss"](torch.ones(2), torch.zeros(2)).item(),
    }


@VERSIONS
@KINDS
def test_losses_among_the_hyperparameters(tmp_path: Path, version: int, kind: str) -> None:
    found = run_on_ranks(2, save_losses, str(tmp_path), version, kind)[0]
    assert found == {"vars": [], "classes": [Remembering, nn.L1Loss], "hooks": ["hook"], "last": 0.0, "value": 1.0}


def save_in_the_background(folder: str, version: int, kind: str) -> str:
    strategy, path = strategy_for(version, kind, async_save=True), f"{folder}/saved"
    module = WithLoss(nn.MSELoss(), [nn.L1Loss()], strategy)

    def save() -> None:
        module.trainer.save_checkpoint(path)

    module.on_train_batch_end = lambda *_: save()  # type: ignore[method-assign]
    quiet_trainer(strategy, 2, max_epochs=1, limit_train_batches=2).fit(module, rank_loader(2))
    return type(hyperparameters_of(path)["metrics"][0]).__name__


@VERSIONS
def test_losses_saved_in_the_background(tmp_path: Path, version: int) -> None:
    assert run_on_ranks(2, save_in_the_background, str(tmp_path), version, "full")[0] == "L1Loss"


def refuse(folder: str, version: int, kind: str, more: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="save_hyperparameters") as caught:
        fit_and_save(f"{folder}/saved", strategy_for(version, kind, **more), nn.MSELoss(), [Weighted()])
    return str(caught.value)


@pytest.mark.parametrize(("version", "more"), [(1, {}), (1, {"use_orig_params": False}), (2, {})])
@KINDS
def test_sharded_parameters_among_them_are_refused_by_name(
    tmp_path: Path, version: int, kind: str, more: dict[str, Any]
) -> None:
    for message in run_on_ranks(2, refuse, str(tmp_path), version, kind, more):
        assert message.startswith("hyper_parameters['metrics'][0] is saved in the checkpoint and holds parameters that")
        assert "Weighted" in message
        assert "ignored_modules" in message
    assert not (tmp_path / "saved").exists()


def keep_unsharded(folder: str, version: int, kind: str) -> bool:
    weighted, path = Weighted(), f"{folder}/saved"
    fit_and_save(path, strategy_for(version, kind, ignored_modules=[weighted]), nn.MSELoss(), [weighted])
    return bool(hyperparameters_of(path)["metrics"][0].weight.tolist() == weighted.weight.tolist())


@VERSIONS
@KINDS
def test_unsharded_parameters_among_them(tmp_path: Path, version: int, kind: str) -> None:
    assert run_on_ranks(2, keep_unsharded, str(tmp_path), version, kind)[0]


class Unpicklable(TinyModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = lambda: None


def save_what_cannot_be_pickled(folder: str, version: int, kind: str) -> str:
    trainer = quiet_trainer(strategy_for(version, kind), 2, max_epochs=1, limit_train_batches=1)
    trainer.fit(Unpicklable(Case(epochs=1), Outcome()), rank_loader(2))
    with pytest.raises(RuntimeError) as caught:
        trainer.save_checkpoint(f"{folder}/saved")
    return str(caught.value)


@pytest.mark.parametrize(("version", "kind"), [(1, "full"), (1, "sharded"), (1, "local_state_dict"), (2, "sharded")])
def test_what_cannot_be_pickled_is_an_error_on_all_processes(tmp_path: Path, version: int, kind: str) -> None:
    for message in run_on_ranks(2, save_what_cannot_be_pickled, str(tmp_path), version, kind):
        assert "saved failed" in message
        assert "lambda" in message
    assert not (tmp_path / "saved").exists()


def save_strategy_with_zero(folder: str) -> int:
    path = f"{folder}/saved"
    fit_and_save(path, AccelDeepSpeedStrategy(zero_stage=2), nn.MSELoss(), [nn.L1Loss()])
    [file] = Path(path).rglob("mp_rank_00_model_states.pt")
    saved = torch.load(file, weights_only=False)["hyper_parameters"]["strategy"]
    return int(saved.deepspeed_plugin.zero_stage)


def test_a_strategy_among_the_hyperparameters_with_zero(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_strategy_with_zero, str(tmp_path)) == [2, 2]


class Own(AccelFSDPStrategy):
    def __init__(self, number: int) -> None:
        super().__init__(fsdp_version=2)
        self.number = number


def test_copies_of_strategies_are_made_again() -> None:
    strategy = AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={Block})
    strategy.model = nn.Linear(1, 1)
    made = copy.deepcopy(strategy)
    policy: Any = made.fsdp_plugin.auto_wrap_policy
    assert (made.fsdp_plugin.fsdp_version, policy._module_classes) == (2, {Block})
    assert made.model is None
    own = copy.deepcopy(Own(3))
    assert (own.number, own.fsdp_plugin.fsdp_version) == (3, 2)
