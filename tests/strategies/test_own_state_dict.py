"""A ``state_dict()`` of the LightningModule that the user has written has its say in saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

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
