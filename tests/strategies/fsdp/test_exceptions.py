"""Exceptions of the user's own, wherever they come from: they arrive, checkpoints are saved, and training goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from tests.strategies.fsdp.edges import ALL_KINDS, Place, UserModule, assert_as_one_process, assert_refused


class Own(Exception):  # noqa: N818 (the user calls it so)
    """The user's."""


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise Own("backward")


def _raise(*args: Any) -> None:
    raise Own("forward")


class Raises(UserModule):
    where = ""
    """``step``, after a ``forward``, ``within`` a forward, ``backward``, ``validation``; nowhere."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx != 2 or self.where in ("", "validation"):
            return self.loss(batch)
        if self.where == "within":
            with self.net.blocks[1].linear.register_forward_pre_hook(_raise):
                self.loss(batch)
        if self.where == "backward":
            x = self.net.blocks[0](self.net.emb(batch[0]))
            return self.net.head(self.net.blocks[1](RaisesInBackward.apply(x))).square().mean()
        if self.where == "forward":
            self.loss(batch)
        raise Own(self.where)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.where == "validation":
            raise Own(self.where)
        super().validation_step(batch, batch_idx)


def _raise_and_go_on(
    where: str, callback: str, resumes: bool, place: Place, kind: type[Raises] = Raises
) -> tuple[Trainer, UserModule]:
    saving: Any = (
        OnExceptionCheckpoint(place.folder / "saved", "saved")
        if callback == "OnExceptionCheckpoint"
        else ModelCheckpoint(place.folder / "saved", save_on_exception=True, every_n_epochs=99)
    )
    module = kind(place.rank)
    module.where = where
    trainer = place.trainer(callbacks=[saving], enable_checkpointing=True, accumulate_grad_batches=2)
    with pytest.raises(Own):
        trainer.fit(module, place.loader(4), place.loader(2))
    if place.rank is not None:
        dist.barrier()
    [saved] = (place.folder / "saved").iterdir()
    module.where = ""
    if resumes:
        module = kind(place.rank)
    trainer = place.trainer(accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(module, place.loader(4), place.loader(2), ckpt_path=saved if resumes else None)
    return trainer, module


class RaisesWithTwins(Raises):
    """A module that stands in two places, as adapters and tied layers do."""

    def build(self) -> None:
        self.net.blocks[1].again = self.net.blocks[1].linear


@pytest.mark.core("fsdp2-backward", "fsdp1-within", "fsdp1_flat-validation")
@pytest.mark.parametrize("where", ["step", "forward", "within", "backward", "validation"])
@ALL_KINDS
def test_exceptions_arrive_and_training_goes_on(kind: str, where: str) -> None:
    sharded: dict[str, Any] = {"state_dict_type": "sharded_state_dict"}
    assert_as_one_process(partial(_raise_and_go_on, where, "OnExceptionCheckpoint", False), kind, **sharded)
    assert_as_one_process(partial(_raise_and_go_on, where, "ModelCheckpoint", True), kind)


@pytest.mark.core("fsdp2-full", "fsdp1-sharded")
@pytest.mark.parametrize("form", ["full_state_dict", "sharded_state_dict"])
@ALL_KINDS
def test_a_module_in_two_places_is_resumed(kind: str, form: str) -> None:
    script = partial(_raise_and_go_on, "step", "ModelCheckpoint", True, kind=RaisesWithTwins)
    assert_as_one_process(script, kind, state_dict_type=form)


class Saves(UserModule):
    """Where nobody can."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.trainer.save_checkpoint("never.ckpt")


class SavesInValidation(UserModule):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.trainer.save_checkpoint("never.ckpt")


def _save_within(module: type[UserModule], place: Place) -> tuple[Trainer, UserModule]:
    trained, trainer = module(place.rank), place.trainer()
    trainer.fit(trained, place.loader(2), place.loader(2))
    return trainer, trained


@pytest.mark.parametrize("form", ["full_state_dict", "sharded_state_dict"])
@pytest.mark.parametrize("module", [Saves, SavesInValidation], ids=lambda module: module.__name__)
@ALL_KINDS
def test_a_save_within_a_step_is_refused(kind: str, module: type[UserModule], form: str) -> None:
    words = "The model cannot be saved or loaded while one of its steps runs"
    assert_refused(partial(_save_within, module), kind, words, state_dict_type=form)
