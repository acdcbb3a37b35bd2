"""`load_from_checkpoint`: what Lightning's own does with a file, for folders too."""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec import filesystem
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from accelight.checkpoint import CheckpointError, load_state_dict
from accelight.strategies import AccelFSDPStrategy, load_from_checkpoint
from tests.ranks import run_on_ranks
from tests.strategies.oracle import dataset, quiet_trainer, rank_loader, strategy_named


class Sized(LightningModule):
    """Its width is a hyperparameter; its last layer is tied."""

    seen: Tensor

    def __init__(self, width: int, rate: float = 0.1, note: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
        self.again = self.last
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        return (self.again(self.first(batch[0])) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), self.hparams["rate"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["words"] = "kept"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["words"] == "kept"
        assert "first.weight" in checkpoint["state_dict"]


def _save(engine: str, folder: str, note: Any = None) -> dict[str, Tensor]:
    """Return the weights that one process trains to."""
    torch.manual_seed(0)
    strategy: Any
    if engine.startswith("zero"):
        strategy = strategy_named(engine)
    else:
        strategy = AccelFSDPStrategy(fsdp_version=int(engine[-1]), state_dict_type="sharded_state_dict")
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=1)
    module = Sized(8, rate=0.05, note=note)
    trainer.fit(module, rank_loader(dist.get_world_size()))
    trainer.save_checkpoint(f"{folder}/saved")
    if engine == "zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    weights = strategy.lightning_module_state_dict() if engine.startswith("fsdp") else module.state_dict()
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each.clone()) for name, each in weights.items()
    }


@pytest.mark.core("fsdp2", "zero3")
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero2", "zero3"])
def test_a_folder_becomes_a_module(engine: str, tmp_path: Path) -> None:
    trained = run_on_ranks(2, _save, engine, str(tmp_path))[0]
    module = load_from_checkpoint(Sized, tmp_path / "saved", rate=0.5)
    assert (module.hparams["width"], module.hparams["rate"]) == (8, 0.5)
    assert module.again.weight is module.last.weight
    found, loaded = module.state_dict(), load_state_dict(tmp_path / "saved")
    assert set(found) == set(loaded) == {*trained}
    for name, tensor in trained.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(loaded[name], tensor)
    with pytest.raises(RuntimeError, match=r"size mismatch for first.weight"):
        load_from_checkpoint(Sized, tmp_path / "saved", width=4)


@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_other_objects_are_read_where_one_trusts_the_folder(engine: str, tmp_path: Path) -> None:
    run_on_ranks(1, _save, engine, str(tmp_path), PurePosixPath("an/object"))
    with pytest.raises((pickle.UnpicklingError, RuntimeError), match="PurePosixPath"):
        load_from_checkpoint(Sized, tmp_path / "saved")
    module = load_from_checkpoint(Sized, tmp_path / "saved", weights_only=False)
    assert module.hparams["note"] == PurePosixPath("an/object")


class _Old(Sized):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.callbacks = checkpoint["callbacks"]


def _check_old(file: Path) -> None:
    """Lightning migrates what its old versions saved, also behind a URL."""
    saved = torch.load(file)
    del saved["callbacks"], saved["loops"]
    saved |= {"pytorch-lightning_version": "0.9.0", "checkpoint_callback_best_model_path": "best"}
    store = filesystem("memory")
    with file.with_name("old.ckpt").open("wb") as stream, store.open("old/one.ckpt", "wb") as other:
        torch.save(saved, stream)
        torch.save(saved, other)
    try:
        modules = [load_from_checkpoint(_Old, url) for url in (file.with_name("old.ckpt"), "memory://old/one.ckpt")]
    finally:
        store.rm("old", recursive=True)
    assert "best" in str(modules[0].callbacks)
    assert modules[1].callbacks == modules[0].callbacks


def test_files_and_what_is_no_checkpoint(tmp_path: Path) -> None:
    trainer = quiet_trainer("auto", 1, max_steps=1)
    module = Sized(8)
    trainer.fit(module, DataLoader(dataset(1), batch_size=2))
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    loaded = load_from_checkpoint(Sized, tmp_path / "file.ckpt", rate=0.5)
    assert loaded.hparams["rate"] == 0.5
    assert torch.equal(loaded.first.weight, module.first.weight)
    _check_old(tmp_path / "file.ckpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="No checkpoint in"):
        load_from_checkpoint(Sized, tmp_path / "empty")
