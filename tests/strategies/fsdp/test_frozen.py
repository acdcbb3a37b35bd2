"""Parameters that are frozen and thawed, that a batch leaves out, or that no optimizer holds, within windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.nn import functional

from tests.strategies.fsdp.edges import (
    ALL_KINDS,
    KINDS,
    ORIGINAL_PARAMETERS,
    Fit,
    Place,
    UserModule,
    assert_as_one_process,
    assert_refused,
    sgd,
)

FIRST, SECOND, HEAD, LAYER = "net.blocks.0", "net.blocks.1", "net.head", "net.blocks.0.linear"
KEPT: dict[str, Any] = {"reshard_during_accumulation": False}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "kept": dict.fromkeys(KINDS, KEPT),
    "kept_after_forward": {
        "fsdp2": {"reshard_after_forward": False},
        "fsdp1": {"sharding_strategy": "SHARD_GRAD_OP"},
        "fsdp1_flat": {"sharding_strategy": "SHARD_GRAD_OP"},
    },
    "recomputed": {kind: {"activation_checkpointing": True} for kind in KINDS},
    "one_unit": {kind: {"auto_wrap_policy": "no_wrap"} for kind in KINDS},
}


class Freezes(UserModule):
    """Sets ``requires_grad`` of modules when a hook comes by in certain batches."""

    hook = "on_train_batch_start"
    at_first: tuple[str, ...] = ()
    plan: dict[int, tuple[tuple[str, bool], ...]] = {}  # noqa: RUF012 (subclasses set it)

    def build(self) -> None:
        for name in self.at_first:
            self.get_submodule(name).requires_grad_(False)

    def _follow(self, hook: str) -> None:
        if hook == self.hook:
            progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
            for name, is_trained in self.plan.get(progress.current.ready - 1, ()):
                self.get_submodule(name).requires_grad_(is_trained)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._follow("on_train_batch_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._follow("on_before_zero_grad")

    def on_after_backward(self) -> None:
        self._follow("on_after_backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self._follow("on_train_batch_end")


class Units(Freezes):
    at_first = (SECOND,)
    plan = {1: ((FIRST, False), (SECOND, True)), 4: ((FIRST, True),), 6: ((SECOND, False),)}  # noqa: RUF012


class Parts(Freezes):
    plan = {1: ((HEAD, False), (LAYER, False)), 4: ((HEAD, True),), 5: ((LAYER, True), (SECOND, False))}  # noqa: RUF012


def _module(base: type[Freezes], hook: str) -> type[UserModule]:
    name = f"{base.__name__}_{hook}"
    globals()[name] = type(name, (base,), {"hook": hook, "__module__": __name__})
    return globals()[name]


HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_train_batch_end")
UNITS, PARTS = ([_module(base, hook) for hook in HOOKS] for base in (Units, Parts))


@pytest.mark.core("on_after_backward-3", "on_before_zero_grad-3")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("module", UNITS, ids=lambda module: module.__name__)
@ALL_KINDS
def test_units_are_frozen_and_thawed(kind: str, module: type[UserModule], accumulate: int) -> None:
    assert_as_one_process(Fit(module, 9, settings={"accumulate_grad_batches": accumulate}), kind)


@pytest.mark.core("on_after_backward-3", "on_before_zero_grad-3")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("module", PARTS, ids=lambda module: module.__name__)
@ORIGINAL_PARAMETERS
def test_parts_of_units_are_frozen_and_thawed(kind: str, module: type[UserModule], accumulate: int) -> None:
    assert_as_one_process(Fit(module, 9, settings={"accumulate_grad_batches": accumulate}), kind)


def test_freezing_a_part_of_a_flat_unit_is_refused() -> None:
    assert_refused(Fit(PARTS[0]), "fsdp1_flat", "requires_grad_(False) of this Linear would have no effect")


@pytest.mark.core("fsdp2-policy0", "fsdp1-policy1")
@pytest.mark.parametrize("policy", [{"param_dtype": "fp32", "reduce_dtype": "bf16"}, {"param_dtype": "bf16"}, None])
@ALL_KINDS
def test_units_that_were_frozen_at_first_are_reduced_in_half_precision(kind: str, policy: Any) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, **({} if policy else {"precision": "bf16-mixed"})}
    options = {"mixed_precision_policy": policy} if policy else {}
    assert_as_one_process(Fit(UNITS[2], 9, settings=settings), kind, atol=5e-3, **options)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.blocks[0], pl_module.net.emb])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            module = pl_module.net.blocks[0] if epoch == 1 else pl_module.net.emb
            self.unfreeze_and_add_param_group(module, optimizer, 0.05, 1.0)


class Tuned(UserModule):
    def configure_optimizers(self) -> Any:
        return sgd([parameter for parameter in self.parameters() if parameter.requires_grad])


def _tune_and_resume(place: Place) -> tuple[Trainer, UserModule]:
    first = place.trainer(max_epochs=2, callbacks=[Finetuning()], accumulate_grad_batches=3)
    first.fit(Tuned(place.rank), place.loader(4))
    first.save_checkpoint(place.folder / "tuned.ckpt")
    module, trainer = Tuned(place.rank), place.trainer(max_epochs=4, callbacks=[Finetuning()])
    trainer.fit(module, place.loader(4), ckpt_path=place.folder / "tuned.ckpt")
    return trainer, module


@pytest.mark.parametrize("form", ["full_state_dict", "sharded_state_dict"])
@ORIGINAL_PARAMETERS
def test_finetuning_callback(kind: str, form: str) -> None:
    assert_as_one_process(_tune_and_resume, kind, state_dict_type=form)


class AddsGroup(UserModule):
    """Saves right after it gave the optimizer parameters that were frozen."""

    path: Any = None

    def build(self) -> None:
        self.net.blocks[0].requires_grad_(False)
        self.net.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return sgd([parameter for parameter in self.parameters() if parameter.requires_grad])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            added = [*self.net.blocks[0].parameters(), *self.net.head.parameters()]
            for parameter in added:
                parameter.requires_grad_(True)
            optimizer: Any = self.optimizers()
            optimizer.optimizer.add_param_group({"params": added, "lr": 0.05})
            self.trainer.save_checkpoint(self.path)


class Grouped(UserModule):
    """What resumes from it."""

    def configure_optimizers(self) -> Any:
        added = [*self.net.blocks[0].parameters(), *self.net.head.parameters()]
        known = {id(parameter) for parameter in added}
        optimizer = sgd([parameter for parameter in self.parameters() if id(parameter) not in known])
        optimizer.add_param_group({"params": added, "lr": 0.05})
        return optimizer


def _add_group_and_resume(place: Place) -> tuple[Trainer, UserModule]:
    first = AddsGroup(place.rank)
    first.path = place.folder / "added.ckpt"
    place.trainer().fit(first, place.loader(4))
    module, trainer = Grouped(place.rank), place.trainer(max_epochs=2)
    trainer.fit(module, place.loader(4), ckpt_path=first.path)
    return trainer, module


class OverPart(UserModule):
    def configure_optimizers(self) -> Any:
        blocks = self.net.blocks
        return sgd([*self.net.head.parameters(), blocks[0].linear.weight, blocks[1].norm.bias])


def _resume_over_part(place: Place) -> tuple[Trainer, UserModule]:
    first, _ = Fit(OverPart)(place)
    first.save_checkpoint(place.folder / "part.ckpt")
    module, trainer = OverPart(place.rank), place.trainer(max_epochs=2)
    trainer.fit(module, place.loader(4), ckpt_path=place.folder / "part.ckpt")
    return trainer, module


@pytest.mark.core("fsdp2-_add_group_and_resume-full", "_resume_over_part-sharded")
@pytest.mark.parametrize("form", ["full_state_dict", "sharded_state_dict"])
@pytest.mark.parametrize("script", [_add_group_and_resume, _resume_over_part])
@ORIGINAL_PARAMETERS
def test_saves_of_optimizers_over_parts(kind: str, script: Any, form: str) -> None:
    assert_as_one_process(script, kind, state_dict_type=form)


class Clamps(UserModule):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class Samples(UserModule):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.seen.append(self.sample().item())


class LeavesUnitOut(UserModule):
    """Of the last batch of each window."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = self.net.blocks[0](self.net.emb(batch[0]))
        if batch_idx % 3 != 2:
            x = self.net.blocks[1](x)
        return functional.mse_loss(self.net.head(x + self.net.branch(x)), batch[1])


@pytest.mark.core("fsdp2-Samples", "fsdp1-Clamps")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "module", [OverPart, Clamps, Samples, LeavesUnitOut, UNITS[2], PARTS[3]], ids=lambda module: module.__name__
)
@ORIGINAL_PARAMETERS
def test_ways_to_gather_change_nothing(kind: str, module: type[UserModule], option: str) -> None:
    fit = Fit(module, 9, settings={"accumulate_grad_batches": 3})
    assert_as_one_process(fit, kind, **OPTIONS[option][kind])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("module", [Clamps, Samples], ids=lambda module: module.__name__)
def test_ways_to_gather_flat_parameters_change_nothing(module: type[UserModule], option: str) -> None:
    fit = Fit(module, 7, settings={"accumulate_grad_batches": 3})
    assert_as_one_process(fit, "fsdp1_flat", **OPTIONS[option]["fsdp1_flat"])
