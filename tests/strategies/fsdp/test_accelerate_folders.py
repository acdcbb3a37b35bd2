"""Sharded folders of Accelerate's own functions resume under the Trainer, optimizer state included."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.storage import URL
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import (
    Block,
    Case,
    Outcome,
    TinyModule,
    build_model,
    build_optimizer,
    quiet_trainer,
    rank_loader,
    train_plain,
)

CASE = Case(optimizer="adamw")


class Bare(TinyModule):
    """Holds its layers itself, as the model that Accelerate had."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(case, outcome)
        self.embed, self.head, self.blocks = self.model.embed, self.model.head, self.model.blocks
        del self.model
        object.__setattr__(self, "model", self._run)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))


def save_with_accelerate(folder: str, version: int, use_dcp: bool = True) -> None:
    """Train an epoch in a plain loop, and save with Accelerate's functions."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    model: Any = build_model()
    if version == 1:
        policy: Any = lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block)  # noqa: E731
        model = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy
        )
    else:
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(CASE.optimizer, model.parameters())
    for inputs, targets in rank_loader(2):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    state = PartialState(cpu=True)
    try:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
        rank = torch.distributed.get_rank()
        accelerator = SimpleNamespace(process_index=rank, num_processes=2, is_fsdp2=version == 2)
        save_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    finally:
        state._reset_state()


def _resume(kind: type[TinyModule], engine: str, path: str) -> tuple[list[float], int]:
    outcome = Outcome()
    trainer = quiet_trainer(AccelFSDPStrategy(**ENGINES[engine]), torch.distributed.get_world_size(), max_epochs=1)
    trainer.fit(kind(CASE, outcome), rank_loader(2), ckpt_path=path)
    return outcome.losses, trainer.global_step


@pytest.mark.core("2-fsdp2-TinyModule", "1-fsdp1-TinyModule")
@pytest.mark.parametrize("kind", [TinyModule, Bare])
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_next_losses_are_those_that_accelerate_would_have_had(
    version: int, engine: str, kind: type[TinyModule], tmp_path: Path
) -> None:
    run_on_ranks(2, save_with_accelerate, str(tmp_path), version)
    given = tmp_path if kind is TinyModule else tmp_path / "pytorch_model_fsdp_0"
    losses, step = run_on_ranks(2, _resume, kind, engine, str(given))[0]
    expected = train_plain(CASE, 2).losses[7:]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert step == 7


@pytest.mark.core("TinyModule")
@pytest.mark.parametrize("kind", [TinyModule, Bare])
def test_they_are_resumed_from_a_store(kind: type[TinyModule], tmp_path: Path) -> None:
    run_on_ranks(2, save_with_accelerate, str(tmp_path), 2)
    url = f"{URL}{tmp_path}{'' if kind is TinyModule else '/pytorch_model_fsdp_0'}"
    losses, step = run_on_ranks(2, _resume, kind, "fsdp2", url)[0]
    expected = train_plain(CASE, 2).losses[7:]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert step == 7


def _save_with_accelight(path: str) -> dict[str, torch.Tensor]:
    strategy = AccelFSDPStrategy(**ENGINES["fsdp2"], state_dict_type="sharded_state_dict")
    trainer = quiet_trainer(strategy, 2, max_steps=2)
    trainer.fit(TinyModule(CASE, Outcome()), rank_loader(2))
    trainer.save_checkpoint(path)
    return {name: tensor.full_tensor() for name, tensor in strategy.lightning_module_state_dict().items()}


def test_weights_cross_to_accelerate_as_safetensors(tmp_path: Path) -> None:
    from accelerate import load_checkpoint_in_model

    weights = run_on_ranks(2, _save_with_accelight, str(tmp_path / "saved"))[0]
    merge_fsdp_weights(tmp_path / "saved", tmp_path / "out", strip_prefix="auto")
    model = build_model()
    load_checkpoint_in_model(model, tmp_path / "out", strict=True)
    assert len(weights) == len(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[f"model.{name}"])


def _tell(path: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        _resume(TinyModule, "fsdp2", path)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_does_not_resume_is_told(tmp_path: Path) -> None:
    run_on_ranks(2, save_with_accelerate, str(tmp_path / "by rank"), 2, False)
    for message in run_on_ranks(2, _tell, str(tmp_path / "by rank")):
        assert "holds pytorch_model_fsdp_0_rank0.bin, which Accelerate writes for" in message
        assert "use_dcp=False. Only SHARDED_STATE_DICT" in message
    run_on_ranks(2, save_with_accelerate, str(tmp_path / "sharded"), 2)
    os.rename(tmp_path / "sharded/pytorch_model_fsdp_0", tmp_path / "other")
    for message in run_on_ranks(2, _tell, str(tmp_path / "other")):
        assert "other has no meta.pt, which Lightning and accelight write next to the weights" in message
        assert "accelight merge-weights" in message
