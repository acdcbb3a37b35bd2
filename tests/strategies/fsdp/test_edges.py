"""What users' hooks and steps do with a sharded model: right, as one process has it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from tests.ranks import run_on_ranks
from tests.strategies.fsdp.edges import (
    ALL_KINDS,
    ORIGINAL_PARAMETERS,
    Fit,
    ManualModule,
    Place,
    UserModule,
    assert_as_one_process,
    assert_refused,
    sgd,
)

LIMIT = 0.05
IN_WINDOWS: dict[str, Any] = {"accumulate_grad_batches": 3}
HALF: dict[str, Any] = {"precision": "bf16-mixed"}


# ---------------------------------------------------------------------- the user's own clipping
class ClipsInHook(UserModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(clip_grad_norm_(self.parameters(), LIMIT).item())


class ClipsWhereLightningDoes(UserModule):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(clip_grad_norm_(self.parameters(), LIMIT, error_if_nonfinite=True).item())


class ClipsManually(ManualModule):
    def before_step(self) -> None:
        self.seen.append(clip_grad_norm_(self.parameters(), LIMIT).item())


class ClipsSecond(ManualModule):
    def before_step(self) -> None:
        self.seen.append(clip_grad_norm_(self.second.parameters(), LIMIT).item())


class ClipsInTwoSteps(UserModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = get_total_norm([one.grad for one in self.parameters() if one.grad is not None], float("inf"))
        clip_grads_with_norm_(self.parameters(), LIMIT, norm)
        self.seen.append(norm.item())


class ClipsHead(UserModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(clip_grad_norm_(self.net.head.parameters(), LIMIT).item())


class ClipsValues(UserModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_value_(self.parameters(), LIMIT / 10)


class ClipsSomethingElse(UserModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.rank == 0:  # nobody else's business
            other = nn.Parameter(torch.ones(2))
            other.grad = torch.ones(2)
            clip_grad_norm_(other, LIMIT)


@pytest.mark.core("-fsdp1]", "-fsdp2")
@ALL_KINDS
@pytest.mark.parametrize(
    "module",
    [ClipsInHook, ClipsWhereLightningDoes, ClipsManually, ClipsInTwoSteps, ClipsValues, ClipsSomethingElse],
    ids=lambda module: module.__name__,
)
def test_torchs_clipping_sees_the_whole(kind: str, module: type[UserModule]) -> None:
    assert_as_one_process(Fit(module), kind)


@ORIGINAL_PARAMETERS
def test_torchs_clipping_of_a_part(kind: str) -> None:
    assert_as_one_process(Fit(ClipsHead, settings=IN_WINDOWS), kind)


@ALL_KINDS
def test_torchs_clipping_of_ignored_modules(kind: str) -> None:
    assert_as_one_process(Fit(ClipsInHook), kind, ignored_modules=r"net\.branch")
    assert_as_one_process(Fit(ClipsValues), kind, ignored_modules=r"net\.branch")
    assert_as_one_process(Fit(ClipsManually), kind, ignored_modules="second")
    assert_as_one_process(Fit(ClipsSecond), kind, ignored_modules="second")


def test_clipping_a_part_of_a_flat_unit_is_refused() -> None:
    assert_refused(Fit(ClipsHead), "fsdp1_flat", "There are no gradients to clip", "use_orig_params=True")


class Fails(UserModule):
    def on_train_batch_end(self, *args: Any) -> None:
        raise KeyError("the user's own")


def _norm_afterwards(failing: bool) -> float:
    place = Place(None, torch.distributed.get_rank(), "fsdp1")  # type: ignore[arg-type]
    try:
        Fit(Fails if failing else UserModule)(place)
    except KeyError:
        assert failing
    lonely = nn.Parameter(torch.ones(4))
    lonely.grad = torch.ones(4)
    clip_grad_norm_([lonely] if torch.distributed.get_rank() == 0 else [], 1.0)
    return float(torch.linalg.vector_norm(lonely.grad))


@pytest.mark.parametrize("failing", [False, True])
def test_torchs_clipping_is_torchs_again_after_a_fit(failing: bool) -> None:
    alone, others = run_on_ranks(2, _norm_afterwards, failing)
    assert alone == pytest.approx(1.0, abs=1e-5)
    assert others == pytest.approx(2.0)


# ---------------------------------------------------------------------- gradients of gradients
class Penalty(UserModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        embedded = self.net.emb(batch[0])
        [gradient] = torch.autograd.grad(self.net.blocks[0](embedded).sum(), embedded, create_graph=True)
        return self.loss(batch) + gradient.square().sum()


class PenaltyOfRoot(UserModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = torch.ones(4, 5, requires_grad=True)
        [gradient] = torch.autograd.grad(self.net.head(x.tanh()).tanh().sum(), x, create_graph=True)
        return self.loss(batch) + gradient.square().sum()


class ManualPenalty(ManualModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = torch.ones(4, 5, requires_grad=True)
        [gradient] = torch.autograd.grad(self.net.blocks[0](x).tanh().sum(), x, create_graph=True)
        self.manual_backward(self.loss(batch) + gradient.square().sum())


class CreatesGraph(ManualModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch), create_graph=True)


@ALL_KINDS
@pytest.mark.parametrize("module", [Penalty, ManualPenalty, CreatesGraph], ids=lambda module: module.__name__)
def test_gradient_penalties_are_refused(kind: str, module: type[UserModule]) -> None:
    assert_refused(Fit(module), kind, "RuntimeError", "create_graph=True (a gradient penalty)")


@ALL_KINDS
def test_gradient_penalties_within_the_roots_unit(kind: str) -> None:
    assert_as_one_process(Fit(PenaltyOfRoot), kind)


class PenaltyOnce(Penalty):
    refuses = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.refuses else self.loss(batch)


def _fit_after_a_refusal(place: Place) -> tuple[Trainer, UserModule]:
    module = PenaltyOnce(place.rank)
    if place.rank is not None:
        with pytest.raises(RuntimeError, match="gradient penalty"):
            place.trainer().fit(module, place.loader(2))
    module.refuses = False
    trainer = place.trainer(**IN_WINDOWS)
    trainer.fit(module, place.loader(4))
    return trainer, module


@ALL_KINDS
def test_a_refused_module_trains_on(kind: str) -> None:
    assert_as_one_process(_fit_after_a_refusal, kind)


# ---------------------------------------------------------------------- several backwards of one graph
class TwoBackwards(ManualModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(self.loss([batch[0].flip(1), batch[1]]))
        self.manual_backward(loss * 0.3, retain_graph=True)
        optimizer.step()


class SharedGraph(ManualModule):
    """The critic's phase goes through the generator's graph, which the generator's phase needs again."""

    def configure_optimizers(self) -> Any:
        return [sgd(self.net.parameters(), 0.05), sgd(self.second.parameters(), 0.05)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        generator, critic = optimizers
        made = self.net(batch[0])
        for optimizer, wanted in ((critic, 0.0), (generator, 1.0)):
            self.toggle_optimizer(optimizer)
            loss = (self.second(made) - wanted).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=optimizer is critic)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@pytest.mark.core("TwoBackwards-fsdp2", "SharedGraph-fsdp1]")
@ALL_KINDS
@pytest.mark.parametrize("module", [TwoBackwards, SharedGraph], ids=lambda module: module.__name__)
def test_several_backwards_of_one_graph(kind: str, module: type[UserModule]) -> None:
    assert_as_one_process(Fit(module), kind)
    assert_as_one_process(Fit(module, settings=HALF), kind, atol=5e-3)


# ---------------------------------------------------------------------- optimizers
class ByElement(torch.optim.Optimizer):
    """One that nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
        return loss


class NormedSGD(torch.optim.SGD):
    """Its name and its base say nothing of the norms that it takes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1e-6)
        super().step()
        return loss


class With(UserModule):
    name = ""

    def configure_optimizers(self) -> Any:
        kind: Any = globals().get(self.name) or getattr(torch.optim, self.name)
        if self.name == "Muon":  # it wants matrices alone, and computes in bf16: to fp32 here, to compare it
            torch.Tensor.bfloat16 = torch.Tensor.clone  # type: ignore[method-assign]
            return kind([one for one in self.parameters() if one.ndim == 2], lr=0.02)
        return kind(self.parameters(), **({"lr": 0.01} if self.name in ("NAdam", "RAdam") else {}))


for _name in ("NAdam", "RAdam", "Adagrad", "ASGD", "Rprop", "Adafactor", "Muon", "LBFGS", "ByElement", "NormedSGD"):
    globals()[f"With{_name}"] = type(f"With{_name}", (With,), {"name": _name, "__module__": __name__})


@pytest.mark.core("-fsdp1]", "-fsdp2")
@ALL_KINDS
@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adagrad", "ASGD", "Rprop", "ByElement"])
def test_optimizers_that_are_right(kind: str, name: str) -> None:
    assert_as_one_process(Fit(globals()[f"With{name}"]), kind)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("fsdp2", "LBFGS", "scalar products"),
        ("fsdp1", "LBFGS", "scalar products"),
        ("fsdp1", "Adafactor", "in a full parameter and in a flat part"),
        ("fsdp2", "Adafactor", "its step fails on DTensors"),
        ("fsdp1", "NormedSGD", "in a full parameter and in a flat part"),
    ],
)
def test_optimizers_that_are_refused(kind: str, name: str, words: str) -> None:
    assert_refused(Fit(globals()[f"With{name}"]), kind, name, words)


def _muon(place: Place) -> tuple[Trainer, UserModule]:
    bfloat16 = torch.Tensor.bfloat16
    try:
        return Fit(globals()["WithMuon"])(place)
    finally:
        torch.Tensor.bfloat16 = bfloat16  # type: ignore[method-assign]


def test_muon_on_fsdp2() -> None:
    assert_as_one_process(_muon, "fsdp2")


def test_subclasses_of_sgd_on_fsdp2() -> None:
    assert_as_one_process(Fit(globals()["WithNormedSGD"]), "fsdp2")


class NoOptimizer(UserModule):
    def configure_optimizers(self) -> Any:
        return None


@ALL_KINDS
def test_no_optimizer(kind: str) -> None:
    assert_as_one_process(Fit(NoOptimizer), kind)


# ---------------------------------------------------------------------- calls of the model
class OwnBackward(UserModule):
    """A backward in a hook, whose gradients are part of the next window."""

    def on_train_batch_end(self, *args: Any) -> None:
        loss = self.sample() * 0.1
        loss.backward()
        self.seen.append(loss.item())


class WeightsInHook(UserModule):
    def on_after_backward(self) -> None:
        loss: Any = 0.1 * sum(parameter.square().sum() for parameter in self.parameters())
        (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).backward()


class Draft(UserModule):
    """A forward whose graph is dropped."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.sample()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return (self(batch[0]).float() - batch[1]).square().mean()


class ManualDraft(ManualModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.sample()
        super().training_step(batch, batch_idx)


@pytest.mark.core("OwnBackward-fsdp2", "Draft-fsdp1]")
@ALL_KINDS
@pytest.mark.parametrize("module", [OwnBackward, Draft, ManualDraft], ids=lambda module: module.__name__)
def test_forwards_with_gradients_in_hooks(kind: str, module: type[UserModule]) -> None:
    settings = IN_WINDOWS if module is not ManualDraft else {}
    assert_as_one_process(Fit(module, batches=7, settings=settings), kind, atol=3e-5)
    assert_as_one_process(Fit(module, settings=HALF), kind, atol=1e-2)


@ORIGINAL_PARAMETERS
def test_weights_with_gradients_in_hooks(kind: str) -> None:
    assert_as_one_process(Fit(WeightsInHook, batches=7, settings=IN_WINDOWS), kind)


class PastTheUnit(UserModule):
    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.net.blocks[0].linear(torch.ones(1, 5)).square().sum()


class NormOfWeight(UserModule):
    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + 0.1 * self.net.blocks[0].linear.weight.norm()


class ManualNormOfWeight(ManualModule):
    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + 0.1 * self.net.head.weight.norm()


class NormOfRootsWeight(UserModule):
    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + 0.1 * self.net.head.weight.norm()


@ALL_KINDS
@pytest.mark.parametrize("module", [PastTheUnit, NormOfWeight, ManualNormOfWeight], ids=lambda one: one.__name__)
def test_weights_used_past_their_unit(kind: str, module: type[UserModule]) -> None:
    if module is not PastTheUnit and kind != "fsdp1_flat":
        assert_as_one_process(Fit(module), kind)
        return
    words = "Sharded weights (DTensors) met plain tensors" if kind == "fsdp2" else "was used while it is sharded"
    assert_refused(Fit(module), kind, words)


@ALL_KINDS
def test_weights_of_the_roots_unit_may_be_read(kind: str) -> None:
    assert_as_one_process(Fit(NormOfRootsWeight, settings=IN_WINDOWS), kind)


def _use_after_fit(module: type[UserModule], place: Place) -> tuple[Trainer, UserModule]:
    trainer, trained = Fit(module)(place)
    trained.seen.append(trained.net.blocks[0].linear(torch.ones(2, 5)).sum().item())
    trained.seen.append(trained.sample().item())
    trained.sample().backward()
    trained.zero_grad()
    trainer.validate(trained, place.loader(2), verbose=False)
    again = place.trainer()
    again.fit(trained, place.loader(3))
    return again, trained


def _automatic_after_fit(place: Place) -> tuple[Trainer, UserModule]:
    return _use_after_fit(UserModule, place)


def _manual_after_fit(place: Place) -> tuple[Trainer, UserModule]:
    return _use_after_fit(ManualModule, place)


@pytest.mark.core("_automatic_after_fit-fsdp2", "_manual_after_fit-fsdp1]")
@ALL_KINDS
@pytest.mark.parametrize("script", [_automatic_after_fit, _manual_after_fit])
def test_the_module_is_used_after_a_fit(kind: str, script: Any) -> None:
    assert_as_one_process(script, kind)


class Predicts(UserModule):
    def predict_step(self, batch: list[Tensor]) -> None:
        x = self.net.blocks[1](self.net.blocks[0](self.net.emb.forward(batch[0])))
        self.see(self.net.head.forward(x).mean())


def _predict(place: Place) -> tuple[Trainer, UserModule]:
    trainer, module = Fit(Predicts)(place)
    trainer.predict(module, place.loader(2))
    return trainer, module


@ALL_KINDS
def test_parts_are_called_in_prediction(kind: str) -> None:
    assert_as_one_process(_predict, kind)


class WithExample(UserModule):
    def build(self) -> None:
        self.example_input_array = torch.arange(4)[None]


@ALL_KINDS
def test_example_input_array(kind: str) -> None:
    assert_as_one_process(Fit(WithExample, settings={"enable_model_summary": True}), kind)


class TakesIterator(UserModule):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@ALL_KINDS
def test_training_step_with_an_iterator(kind: str) -> None:
    assert_as_one_process(Fit(TakesIterator, batches=7, settings=IN_WINDOWS), kind)


# ---------------------------------------------------------------------- refused before anything trains
def _average_weights(place: Place) -> tuple[Trainer, UserModule]:
    return Fit(UserModule, settings={"callbacks": [EMAWeightAveraging()]})(place)


@ALL_KINDS
def test_weight_averaging_is_refused(kind: str) -> None:
    assert_refused(_average_weights, kind, "EMAWeightAveraging copies the model before it is sharded")


def test_copies_that_are_not_sharded_are_refused_with_fsdp1() -> None:
    options: dict[str, Any] = {"device_mesh": (2, 1), "sharding_strategy": "HYBRID_SHARD"}
    assert_refused(Fit(UserModule), "fsdp1", "would not reduce gradients", **options)


class Renormalises(UserModule):
    def build(self) -> None:
        self.more = nn.Embedding(4, 2, max_norm=1.0)


@ALL_KINDS
def test_modules_are_checked(kind: str) -> None:
    assert_refused(Fit(Renormalises), kind, "more: Embedding(max_norm=1) changes its weight in forward")
