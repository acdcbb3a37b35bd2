"""Optimizer state is restored as far as a checkpoint has it: parameters are frozen and unfrozen between runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint import state_dict as checkpointing
from accelight.strategies.sharded_tensors.user_code import library_code
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

BLOCK = "model.blocks.0."
KINDS = ["sharded_state_dict", "full_state_dict"]
NUM_STEPS = 7
"""Of an epoch."""


class Module(TinyModule):
    def __init__(self, optimizer: str, frozen: bool) -> None:
        super().__init__(Case(optimizer=optimizer), Outcome())
        self.model.blocks[0].requires_grad_(not frozen)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.case.optimizer == "plain_sgd":  # keeps no state
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return super().configure_optimizers()  # over frozen parameters, too


class Look(Callback):
    """Notes this rank's part of the optimizer's state, and how often each parameter was stepped, before training."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = trainer.optimizers[0].state
        for name, parameter in pl_module.named_parameters():
            if state.get(parameter):
                moment = state[parameter].get("exp_avg", torch.zeros(()))
                moment = moment.full_tensor() if hasattr(moment, "full_tensor") else moment
                with library_code():
                    norm = moment.norm().item()
                step = float(state[parameter].get("step", 0))
                self.found[name.replace("_fsdp_wrapped_module.", "")] = step, norm


def _fit(
    engine: str, kind: str, *, frozen: bool, save_to: str | None, resume_from: str | None, optimizer: str = "adamw"
) -> dict[str, tuple[float, float]]:
    look = Look()
    strategy = AccelFSDPStrategy(state_dict_type=kind, **ENGINES[engine])
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=2 if resume_from else 1, callbacks=[look])
    module = Module(optimizer, frozen)
    trainer.fit(module, rank_loader(dist.get_world_size()), ckpt_path=resume_from)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return look.found


def _change_frozen(
    engine: str, kind: str, path: str, frozen_before: bool
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    _fit(engine, kind, frozen=frozen_before, save_to=path, resume_from=None)
    same = _fit(engine, kind, frozen=frozen_before, save_to=None, resume_from=path)
    other = _fit(engine, kind, frozen=not frozen_before, save_to=f"{path}.again", resume_from=path)
    return same, other


@pytest.mark.core("fsdp2-full", "fsdp1_orig_params-sharded")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["fsdp1_orig_params", "fsdp2"])
def test_state_of_parameters_frozen_later_is_kept(engine: str, kind: str, tmp_path: Path) -> None:
    """Torch drops it silently, and a later unfreezing starts from nothing (pytorch/pytorch#192202)."""
    for same, other in run_on_ranks(2, _change_frozen, engine, kind, str(tmp_path / "checkpoint"), False):
        assert same == other
        assert {step for step, _ in same.values()} == {NUM_STEPS}
        assert any(name.startswith(BLOCK) for name in same)


@pytest.mark.core("fsdp1_orig_params-full", "fsdp2-sharded")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp1_orig_params", "fsdp2"])
def test_parameters_unfrozen_later_start_anew(engine: str, kind: str, tmp_path: Path) -> None:
    """The other half: torch finds keys missing in the checkpoint, and loads nothing (huggingface/accelerate#3971)."""
    path = str(tmp_path / "checkpoint")
    for same, other in run_on_ranks(2, _change_frozen, engine, kind, path, True):
        if engine == "fsdp1":
            continue  # flat parameters have no state of their own names; that the fit went on is what is shown
        assert {name: one for name, one in other.items() if not name.startswith(BLOCK)} == same
        assert not any(name.startswith(BLOCK) for name in other)


def _without_steps(engine: str, kind: str, path: str, names: list[str]) -> list[dict[str, tuple[float, float]]]:
    """Save without the steps of the named parameters (all: an empty list), and resume."""

    def strip(state: dict[str, Any]) -> dict[str, Any]:
        for group in state["param_groups"]:
            for key, name in zip(group["params"], group.get("param_names", group["params"]), strict=True):
                if not names or name in names:
                    state["state"][key].pop("step")
        return state

    def strip_sharded(key: str, weights: Any, states: list[dict[str, Any]]) -> dict[str, Any]:
        return original(key, weights, [strip(state) for state in states])

    original = checkpointing.sharded_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "sharded_state", strip_sharded)
        _fit(engine, kind, frozen=False, save_to=path, resume_from=None)
    if kind == "full_state_dict" and dist.get_rank() == 0:
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["optimizer_states"] = [strip(state) for state in checkpoint["optimizer_states"]]
        torch.save(checkpoint, path)
    dist.barrier()
    return [_fit(engine, kind, frozen=False, save_to=None, resume_from=path)]


@pytest.mark.core("all-fsdp2-full", "some-fsdp1-sharded", "some-fsdp2-sharded")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("names", [[], ["model.head.weight", f"{BLOCK}norm.bias"]], ids=["all", "some"])
def test_a_missing_step_is_that_of_the_others(engine: str, kind: str, names: list[str], tmp_path: Path) -> None:
    """Without it loading fails (huggingface/accelerate#3971), and with step 0 Adam's corrections would be wrong."""
    for [found] in run_on_ranks(2, _without_steps, engine, kind, str(tmp_path / "checkpoint"), names):
        assert {step for step, _ in found.values()} == {NUM_STEPS}


@pytest.mark.core("fsdp1_orig_params-full", "fsdp2-sharded")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_without_state_resumes(engine: str, kind: str, tmp_path: Path) -> None:
    """Torch 2.13 raises "Expected device to be set" for a whole state dict without tensors."""
    path = str(tmp_path / "checkpoint")
    for resume_from, save_to in ((None, path), (path, None)):
        run_on_ranks(2, _stateless, engine, kind, save_to, resume_from)


def _stateless(engine: str, kind: str, save_to: str | None, resume_from: str | None) -> None:
    _fit(engine, kind, frozen=False, save_to=save_to, resume_from=resume_from, optimizer="plain_sgd")
