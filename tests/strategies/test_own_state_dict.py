"""Users' code in saves: an overridden ``state_dict()`` has its say, and all that runs there sees whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, full_state_dict
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Block, Case, Outcome, TinyModule, quiet_trainer, rank_loader


class _Renamed(TinyModule):
    """Saves its last layer under another name, and the norm of a weight of another unit with it."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        named = {name.replace("model.head.", "model.tail."): value for name, value in state.items()}
        return {**named, "norm": next(self.model.blocks.parameters()).detach().norm()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        named = {name.replace("model.tail.", "model.head."): value for name, value in state_dict.items()}
        named.pop("norm", None)
        return super().load_state_dict(named, *args, **kwargs)


def _strategy(engine: str) -> Any:
    if engine == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if engine.startswith("zero"):
        return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": {"stage": int(engine[-1])}})
    name, form = engine.split("-")
    version: Any = int(name[-1])
    return AccelFSDPStrategy(fsdp_version=version, auto_wrap_policy={Block}, state_dict_type=f"{form}_state_dict")


def _train(engine: str, path: Path) -> list[dict[str, Tensor]]:
    """Train two epochs, then the second one again from the checkpoint of the first."""
    ends = []
    for ckpt_path, max_epochs in ((None, 1), (None, 2), (path, 2)):
        module = _Renamed(Case(), Outcome())
        trainer = quiet_trainer(_strategy(engine), 2, max_epochs=max_epochs, use_distributed_sampler=False)
        trainer.fit(module, rank_loader(2), ckpt_path=ckpt_path)
        if max_epochs == 1:
            trainer.save_checkpoint(path)
        else:
            state = full_state_dict(trainer.strategy, module)
            ends.append({name: value.detach().clone() for name, value in state.items()})
    return ends


def _saved(path: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of any form."""
    if path.is_dir():
        merge_fsdp_weights(path, path.with_name("merged"), safe_serialization=False)
        return torch.load(path.with_name("merged") / "pytorch_model.bin", weights_only=True)
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.core("fsdp2-sharded", "zero3")
@pytest.mark.parametrize(
    "engine", ["fsdp1-full", "fsdp1-sharded", "fsdp2-full", "fsdp2-sharded", "zero1", "zero2", "zero3"]
)
def test_it_renames_and_adds_entries_and_resumes(engine: str, tmp_path: Path) -> None:
    for whole, resumed in run_on_ranks(2, _train, engine, tmp_path / "saved.ckpt", timeout_s=120):
        for name, value in whole.items():
            assert torch.equal(resumed[name], value), name
    if engine.startswith("fsdp"):
        run_on_ranks(2, _train, "ddp", tmp_path / "ddp.ckpt")
        saved, under_ddp = _saved(tmp_path / "saved.ckpt"), _saved(tmp_path / "ddp.ckpt")
        torch.testing.assert_close(saved, under_ddp, rtol=0, atol=2e-6)  # sums over ranks in another order


class _Norms:
    """Norms of a weight that is a part of a unit, by where users' code read it."""

    def __init__(self) -> None:
        self.weight: Any = None
        self.seen: list[tuple[str, float]] = []

    def see(self, place: str) -> dict[str, Any]:
        self.seen.append((place, float(self.weight().detach().norm())))
        return {"seen": len(self.seen)}


class _StatefulLayer(nn.Linear):
    norms: _Norms

    def get_extra_state(self) -> Any:
        return self.norms.see("get_extra_state")

    def set_extra_state(self, state: Any) -> None:
        self.norms.see("set_extra_state")


class _SavedModule(TinyModule):
    def __init__(self, norms: _Norms) -> None:
        super().__init__(Case(), Outcome())
        block: Any = self.model.blocks[0]
        norms.weight, self.norms = lambda: next(block.parameters()), norms
        self.stateful = _StatefulLayer(1, 1, bias=False).requires_grad_(False)
        self.stateful.norms = norms

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["norms"] = self.norms.see("LightningModule.on_save_checkpoint")


class _SavedCallback(Callback):
    def __init__(self, norms: _Norms) -> None:
        self.norms = norms

    def state_dict(self) -> dict[str, Any]:
        return self.norms.see("Callback.state_dict")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.norms.see("Callback.on_save_checkpoint")


class _SavedData(LightningDataModule):
    def __init__(self, norms: _Norms) -> None:
        super().__init__()
        self.norms = norms

    def train_dataloader(self) -> Any:
        return rank_loader(2)

    def state_dict(self) -> dict[str, Any]:
        return self.norms.see("LightningDataModule.state_dict")


def _norms_in_saves(engine: str, path: Path) -> dict[str, set[float]]:
    """Save in a run, after it, after a second one, and resume; return what each place has seen, to five digits."""
    norms = _Norms()
    module, callback = _SavedModule(norms), _SavedCallback(norms)
    trainer = quiet_trainer(
        _strategy(engine),
        2,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[callback],
        enable_checkpointing=True,
        default_root_dir=path.parent,
    )
    trainer.fit(module, datamodule=_SavedData(norms))
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=_SavedData(norms), ckpt_path=path)
    trainer.save_checkpoint(path)
    assert "state_dict" not in vars(callback)
    found: dict[str, set[float]] = {}
    for place, norm in norms.seen:
        found.setdefault(place, set()).add(round(norm, 5))
    return found


@pytest.mark.core("fsdp2-sharded", "zero3")
@pytest.mark.parametrize(
    "engine", ["fsdp1-full", "fsdp1-sharded", "fsdp2-full", "fsdp2-sharded", "zero1", "zero2", "zero3"]
)
def test_what_runs_in_a_save_sees_whole_weights(engine: str, tmp_path: Path) -> None:
    under_ddp = run_on_ranks(2, _norms_in_saves, "ddp", tmp_path / "ddp.ckpt")
    assert len(under_ddp[0]) == 6
    for found, expected in zip(
        run_on_ranks(2, _norms_in_saves, engine, tmp_path / "saved.ckpt", timeout_s=120), under_ddp, strict=True
    ):
        assert found.keys() == expected.keys()
        for place, values in found.items():
            assert sorted(values) == pytest.approx(sorted(expected[place]), rel=1e-4), place  # sums in another order
