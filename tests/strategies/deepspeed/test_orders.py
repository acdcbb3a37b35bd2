"""Fits in any order of events, against plain Lightning on one device that gets the batches of both ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional

from accelight.state import PartialState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy
from accelight.strategies.deepspeed import DummyOptim
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, whole_weights
from tests.strategies.oracle import quiet_trainer

NUM_BATCHES = 6
NUM_RANKS = 2


@dataclass(frozen=True)
class Fit:
    """One fit of a script."""

    start: str = "same"
    """The module: ``"same"`` as before, ``"fresh"``, or one of them from the last checkpoint (``"... checkpoint"``)."""
    accumulate: int = 1
    clip: float | None = None
    optimizer: str = "sgd"
    """Or the object that an earlier fit has used (``"kept"``)."""
    trains: str = "all"
    manual: str = ""
    """Where manual optimization zeroes gradients: ``"first"`` or ``"last"``, and what else it does."""
    unused: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Batches, and the ranks that leave the layer ``branch`` out there."""
    beside: tuple[int, ...] = ()
    """Batches whose loss is not the model's."""
    events: tuple[tuple[str, int, str], ...] = ()
    """Hook, batch, what happens."""
    validate_every: int | None = None
    averaged: bool = False
    """Whether validation sees other weights, as with an exponential average."""
    epochs: int = 2
    from_forward: bool = False
    """Whether ``training_step`` calls ``self(x)``."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.branch, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, with_branch: bool = True) -> Tensor:
        hidden = torch.tanh(self.embed(x))
        return self.head(hidden + torch.tanh(self.branch(hidden)) if with_branch else hidden)


class Module(LightningModule):
    def __init__(self, rank: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.rank, self.plan = Net(), rank, Fit()

    def forward(self, x: Tensor, with_branch: bool = True) -> Tensor:
        return self.net(x, with_branch)

    def loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        without = dict(self.plan.unused).get(batch_idx, ())
        inputs, targets = batch
        model = self if self.plan.from_forward else self.net
        return torch.stack(
            [
                functional.mse_loss(model(inputs[place], rank not in without).float(), targets[place])
                for place, rank in enumerate(range(NUM_RANKS) if self.rank is None else [self.rank])
            ]
        ).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.present_batch, plan = batch_idx, self.plan
        if batch_idx in plan.beside:
            return torch.zeros((), requires_grad=True)
        if not plan.manual:
            return self.loss(batch, batch_idx)
        optimizer: Any = self.optimizers()
        size = 2 if "every 2" in plan.manual else 1
        if "dropping" in plan.manual:
            self.manual_backward(self.loss(batch, batch_idx))
        if plan.manual.startswith("first") and batch_idx % size == 0:
            optimizer.zero_grad()
        loss = self.loss(batch, batch_idx) / size
        if "twice" in plan.manual:
            self.manual_backward(0.5 * loss, retain_graph=True)
            loss = 0.5 * loss
        self.manual_backward(loss)
        if (batch_idx + 1) % size == 0:
            if "clipping" in plan.manual:
                self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            if plan.manual.startswith("last"):
                optimizer.zero_grad()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.plan.optimizer != "kept":
            self.optimizer = self.new_optimizer()
        return self.optimizer

    def new_optimizer(self) -> torch.optim.Optimizer:
        matrices = [each for each in self.net.parameters() if each.ndim > 1]  # also where stage 3 has partitioned them
        parameters: Any = {
            "all": self.parameters(),
            "part": [*self.net.branch.parameters(), *self.net.head.parameters()],
            "groups": [
                {"params": [each for each in self.net.parameters() if each.ndim == 1], "lr": 0.05, "weight_decay": 0.0},
                {"params": matrices},
            ],
        }[self.plan.trains]
        if self.plan.optimizer == "adamw":  # a large eps: else it steps on the sign of gradients that are nearly 0
            return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)
        if self.plan.optimizer == "adagrad":  # has state from the start
            return torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1)
        decay = 0.1 if self.plan.optimizer == "decay" else 0.0
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=decay)


class PlannedError(Exception):
    pass


class Batches:
    """Neither a list, which Lightning would take for several loaders, nor a loader, whose sampler it would change."""

    def __init__(self, rank: int | None) -> None:
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(NUM_BATCHES, NUM_RANKS, 2, 5, generator=generator)
        targets = torch.randn(NUM_BATCHES, NUM_RANKS, 2, 3, generator=generator)
        ranks = slice(None) if rank is None else slice(rank, rank + 1)
        self.batches = [[inputs[i, ranks], targets[i, ranks]] for i in range(NUM_BATCHES)]

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.batches)


@contextlib.contextmanager
def open_weights(module: nn.Module) -> Iterator[None]:
    """Let weights be changed in this context, also where stage 3 has partitioned them."""
    partitioned = any(hasattr(each, "ds_id") for each in module.parameters())
    with contextlib.ExitStack() as stack:
        if partitioned:
            import deepspeed  # in the processes alone

            stack.enter_context(deepspeed.zero.GatheredParameters([*module.parameters()], modifier_rank=0))
        stack.enter_context(torch.no_grad())
        yield


class Events(Callback):
    def __init__(self, script: Script, plan: Fit) -> None:
        self.script, self.plan = script, plan

    def at(self, hook: str, trainer: Trainer, module: LightningModule, batch_idx: int = 0) -> None:
        for where, when, what in self.plan.events:
            if (where, when) == (hook, batch_idx):
                self.do(what, trainer, module)

    def do(self, what: str, trainer: Trainer, module: LightningModule) -> None:
        if what == "save":
            self.script.save(trainer)
        elif what == "sample":
            with torch.no_grad():
                module(torch.ones(2, 5))
        elif what == "stop":
            trainer.should_stop = True
        elif what == "raise":
            raise PlannedError
        elif what == "clamp":
            with open_weights(module):
                for parameter in module.parameters():
                    parameter.clamp_(-0.2, 0.2)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.at("on_train_start", trainer, pl_module)

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> int | None:
        self.at("on_train_batch_start", trainer, pl_module, batch_idx)
        return -1 if ("on_train_batch_start", batch_idx, "skip") in self.plan.events else None

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self.at("on_after_backward", trainer, pl_module, pl_module.present_batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.at("on_train_batch_end", trainer, pl_module, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.at("on_train_epoch_end", trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.averaged:
            with open_weights(pl_module):
                self.backup = [each.detach().clone() for each in pl_module.parameters()]
                for parameter in pl_module.parameters():
                    parameter.mul_(0.5)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.averaged:
            with open_weights(pl_module):
                for parameter, value in zip(pl_module.parameters(), self.backup, strict=True):
                    parameter.copy_(value)


class Script:
    """Runs fits one after the other.

    Args:
        make_strategy: Called for each fit; None trains on one device.
        folder: For checkpoints.
    """

    def __init__(self, make_strategy: Callable[[], Any] | None, folder: Path) -> None:
        self.make_strategy, self.folder, self.num_saved = make_strategy, folder, 0
        self.rank = None if make_strategy is None else PartialState().process_index

    def save(self, trainer: Trainer) -> None:
        self.num_saved += 1
        trainer.save_checkpoint(self.folder / str(self.num_saved))

    def run(self, plans: list[Fit]) -> list[tuple[int, dict[str, Tensor]]]:
        module, found, epochs = Module(self.rank), [], 0
        for plan in plans:
            if plan.start.startswith("fresh"):
                module = Module(self.rank)
            path = self.folder / str(self.num_saved) if plan.start.endswith("checkpoint") else None
            module.plan, module.automatic_optimization = plan, not plan.manual
            automatic = {"accumulate_grad_batches": plan.accumulate, "gradient_clip_val": plan.clip}
            trainer = quiet_trainer(
                "auto" if self.make_strategy is None else self.make_strategy(),
                1 if self.make_strategy is None else NUM_RANKS,
                max_epochs=plan.epochs + (epochs if path else 0),
                val_check_interval=plan.validate_every,
                callbacks=[Events(self, plan)],
                **({} if plan.manual else automatic),
            )
            if self.make_strategy is None:
                module.zero_grad()  # a fit begins without gradients
            batches = Batches(self.rank)
            with contextlib.suppress(PlannedError):
                trainer.fit(module, batches, batches if plan.validate_every else None, ckpt_path=path)
            epochs = trainer.current_epoch
            found.append((trainer.global_step, self.weights(module)))
        with torch.no_grad():
            module(torch.ones(1, 5))  # in plain code, after everything
        return found

    def weights(self, module: LightningModule) -> dict[str, Tensor]:
        if self.make_strategy is not None:
            return whole_weights(module)
        return {name: each.detach().clone() for name, each in module.named_parameters()}


def deepspeed_strategy(stage: int, **more: Any) -> AccelDeepSpeedStrategy:
    config = {"train_micro_batch_size_per_gpu": 2, **ds_config(stage), **more.pop("config", {})}
    return AccelDeepSpeedStrategy(hf_ds_config=config, **more)


def run_deepspeed(stage: int, plans: list[Fit], folder: Path, more: dict[str, Any]) -> Any:
    return Script(lambda: deepspeed_strategy(stage, **more), folder / "ranks").run(plans)


def check(stage: int, plans: list[Fit], folder: Path, **more: Any) -> None:
    """Compare the weights after each fit with plain Lightning's."""
    expected = Script(None, folder / "plain").run(plans)
    for found in run_on_ranks(NUM_RANKS, run_deepspeed, stage, plans, folder, more, timeout_s=60):
        for number, ((steps, weights), (steps_expected, weights_expected)) in enumerate(
            zip(found, expected, strict=True)
        ):
            assert steps == steps_expected, f"fit {number}"
            for name, weight in weights_expected.items():
                torch.testing.assert_close(
                    weights[name], weight, rtol=0, atol=1e-5, msg=f"fit {number}, {name}:\n{weights[name]}\n{weight}"
                )


BRANCHING = ((0, (0, 1)), (1, (1,)), (2, (0,)), (4, (0, 1)))
ALIKE = tuple((batch, (0, 1)) for batch in (0, 2, 3))
SCRIPTS: dict[str, list[Fit]] = {
    "fit after fit": [Fit(), Fit(optimizer="adamw"), Fit(trains="groups", optimizer="decay")],
    "fit after a stop in mid-window": [
        Fit(accumulate=3, events=(("on_train_batch_end", 3, "stop"),)),
        Fit(accumulate=2),
    ],
    "fit after an exception": [Fit(accumulate=2, events=(("on_after_backward", 2, "raise"),)), Fit(accumulate=3)],
    "a window that Lightning drops": [Fit(accumulate=3, events=(("on_train_batch_start", 4, "skip"),)), Fit()],
    "short windows": [Fit(accumulate=4, clip=0.2)],
    "from checkpoints": [
        Fit(accumulate=2, clip=0.05, events=(("on_train_batch_end", 3, "save"),)),
        Fit("same checkpoint", accumulate=2, clip=0.2, events=(("on_train_epoch_end", 0, "save"),)),
        Fit("fresh checkpoint", accumulate=3),
    ],
    "saves everywhere": [
        Fit(
            accumulate=3,
            optimizer="adamw",
            events=tuple(
                (hook, batch, "save")
                for hook, batch in (
                    ("on_train_start", 0),
                    ("on_after_backward", 1),
                    ("on_after_backward", 2),
                    ("on_train_batch_end", 4),
                )
            ),
        ),
        Fit("fresh checkpoint", accumulate=3, optimizer="adamw"),
    ],
    "saved before the first step": [
        Fit(optimizer="decay", events=(("on_train_start", 0, "save"),)),
        Fit("fresh checkpoint", optimizer="decay"),
    ],
    "sampling and averages": [
        Fit(
            accumulate=3,
            validate_every=2,
            averaged=True,
            from_forward=True,
            events=tuple(
                (hook, batch, "sample")
                for hook, batch in (("on_train_batch_start", 1), ("on_after_backward", 2), ("on_train_batch_end", 4))
            ),
        )
    ],
    "weights changed in hooks": [
        Fit(accumulate=2, events=(("on_train_batch_end", 2, "clamp"), ("on_train_batch_start", 4, "clamp")))
    ],
    "a layer unused in some batches": [Fit(optimizer="decay", unused=ALIKE), Fit(optimizer="adamw", unused=ALIKE)],
    "a loss beside": [Fit(optimizer="decay", beside=(0, 1, 2, 4), accumulate=2), Fit(beside=(0, 3))],
    "an optimizer that goes on": [
        Fit(optimizer="adamw", trains="groups", unused=ALIKE, epochs=1),
        Fit(optimizer="kept", events=(("on_train_batch_end", 3, "raise"),)),
        Fit(optimizer="kept", accumulate=2),
    ],
    "groups of Adagrad": [Fit(optimizer="adagrad", trains="groups"), Fit(optimizer="kept")],
    "counts of steps in a checkpoint": [
        Fit(optimizer="adamw", unused=ALIKE, events=(("on_train_batch_end", 4, "save"),)),
        Fit("fresh checkpoint", optimizer="adamw"),
    ],
    "a part is trained": [
        Fit(),
        Fit(trains="part", optimizer="decay", clip=0.1, events=(("on_train_batch_end", 5, "save"),)),
        Fit("fresh checkpoint", trains="part", optimizer="decay"),
    ],
    "manual, zeroing first": [Fit(manual="first"), Fit(manual="first every 2", validate_every=5)],
    "manual, zeroing last": [Fit(manual="last"), Fit(manual="last every 2")],
    "manual, dropping": [Fit(manual="first dropping")],
    "manual, clipping": [Fit(manual="first clipping")],
    "manual, twice through a graph": [Fit(manual="first twice")],
}


@pytest.mark.core(
    "fit after a stop in mid-window-3",
    "from checkpoints-3",
    "zeroing last-3",
    "drops-2",
    "manual, dropping-1",
    "Adagrad-2",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_trains_as_plain_lightning(name: str, stage: int, tmp_path: Path) -> None:
    check(stage, SCRIPTS[name], tmp_path)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_use_different_layers(stage: int, tmp_path: Path) -> None:
    plans = [
        Fit(optimizer="decay", unused=BRANCHING, accumulate=2),
        Fit(optimizer="adamw", unused=BRANCHING),
        Fit(manual="last every 2", unused=BRANCHING),
    ]
    check(stage, plans, tmp_path, **({"find_unused_parameters": True} if stage == 3 else {}))


# ---------------------------------------------------------------------- engines after engines
def change_strategies(stages: list[int], plans: list[Fit], folder: Path) -> Any:
    order = iter(stages)
    return Script(lambda: deepspeed_strategy(next(order)), folder).run(plans)


@pytest.mark.core("kept")
@pytest.mark.parametrize("optimizer", ["sgd", "kept"])
def test_each_fit_may_have_another_stage(optimizer: str, tmp_path: Path) -> None:
    stages = [3, 2, 3, 1, 0, 2]
    plans = [Fit(optimizer="decay"), *[Fit(accumulate=2, optimizer=optimizer) for _ in stages[1:]]]
    expected = Script(None, tmp_path).run(plans)
    found = run_on_ranks(NUM_RANKS, change_strategies, stages, plans, tmp_path)[0]
    for (_, weights), (_, weights_expected) in zip(found, expected, strict=True):
        for name, weight in weights_expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)


def evaluate_between(stage: int) -> dict[str, Tensor]:
    """Fit, validate and predict with Trainers of their own, fit another module with the same layers."""
    module = Module(PartialState().process_index)
    batches = Batches(module.rank)
    quiet_trainer(deepspeed_strategy(stage), NUM_RANKS, max_epochs=1).fit(module, batches)
    quiet_trainer(deepspeed_strategy(stage), NUM_RANKS).validate(module, batches, verbose=False)
    other = Module(module.rank)
    other.net = module.net
    quiet_trainer(deepspeed_strategy(stage), NUM_RANKS, max_epochs=1).fit(other, batches)
    return whole_weights(other)


@pytest.mark.core("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_engines_end_whoever_made_them(stage: int, tmp_path: Path) -> None:
    expected = Script(None, tmp_path).run([Fit(epochs=1), Fit(epochs=1)])[-1][1]
    for found in run_on_ranks(NUM_RANKS, evaluate_between, stage):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)


def hold_parameters_in_some() -> list[int]:
    """Return the number of hooks on the module: after a fit, and after others of which some hold parameters."""

    def fit(module: Module, stage: int, **more: Any) -> int:
        trainer = quiet_trainer(deepspeed_strategy(stage, **more), NUM_RANKS, max_epochs=1)
        trainer.fit(module, Batches(module.rank))
        return len(module._forward_pre_hooks) + len(module._forward_hooks)

    rank = PartialState().process_index
    plain, module, holding = Module(rank), Module(rank), {"find_unused_parameters": True}
    expected = fit(plain, 3)
    quiet_trainer(deepspeed_strategy(3, **holding), NUM_RANKS).validate(module, Batches(rank), verbose=False)
    fit(module, 3, **holding)
    num_hooks = fit(module, 3)
    fit(module, 3, **holding)
    fit(module, 2)
    return [expected, num_hooks]


def test_no_engine_leaves_hooks_that_hold_parameters() -> None:
    for expected, found in run_on_ranks(NUM_RANKS, hold_parameters_in_some):
        assert found == expected


class Collecting(Module):
    """Python may look for garbage at any time: also when its last Trainer has gone and another engine is being made."""

    def setup(self, stage: str) -> None:
        gc.collect()


def keep_masters(stage: int) -> list[float]:
    """Fit twice in bf16 with steps that bf16 cannot hold: only fp32 weights remember them."""
    module, moved = Collecting(PartialState().process_index), []
    for _ in range(2):
        trainer = quiet_trainer(deepspeed_strategy(stage), NUM_RANKS, max_epochs=1, precision="bf16-mixed")
        trainer.fit(module, Batches(module.rank))
        zero: Any = trainer.strategy.deepspeed_engine.optimizer  # type: ignore[attr-defined]
        flat = (zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)[0]
        del trainer, zero
        moved.append(float((flat.detach() - flat.detach().bfloat16().float()).abs().max()))
        moved.append(flat.detach().clone())
        first = quiet_trainer(deepspeed_strategy(stage), NUM_RANKS, max_epochs=0, precision="bf16-mixed")
        first.fit(module, Batches(module.rank))  # trains nothing
        zero = first.strategy.deepspeed_engine.optimizer  # type: ignore[attr-defined]
        again = (zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)[0]
        moved[-1] = float((again.detach() - moved[-1]).abs().max())
    return moved


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_weights_survive_in_half_precision(stage: int) -> None:
    for more_than_bf16, lost, *_ in run_on_ranks(NUM_RANKS, keep_masters, stage):
        assert more_than_bf16 > 1e-5
        assert lost == 0


# ---------------------------------------------------------------------- what is refused, by name
class Unfreezing(Module):
    def __init__(self, rank: int | None) -> None:
        super().__init__(rank)
        self.net.branch.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net.branch.requires_grad_(True)


class AddingGroup(Unfreezing):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].add_param_group({"params": [*self.net.branch.parameters()]})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


class Growing(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.added = nn.Linear(2, 2)
        self.trainer.optimizers[0].add_param_group({"params": [*self.net.added.parameters()]})


class FreezingLater(Module):
    def on_train_start(self) -> None:
        self.net.branch.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.branch.requires_grad_(batch_idx >= 2)


class ChangingInPlace(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net.head.weight.clamp_(-0.1, 0.1)


class ForgettingToZero(Module):
    def __init__(self, rank: int | None) -> None:
        super().__init__(rank)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, batch_idx))
        self.optimizers().step()  # type: ignore[union-attr]


class ClippingValues(ForgettingToZero):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, batch_idx))
        self.clip_gradients(self.optimizers(), 0.1, "value")  # type: ignore[arg-type]


class WholeMatrices(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters())


class NormedSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1e-6)
        super().step()


class OfClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


class Closing(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OfClosure(self.parameters(), lr=0.1)


class DividingByNorms(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NormedSGD(self.parameters(), lr=0.1)


class Sparse(Module):
    def __init__(self, rank: int | None) -> None:
        super().__init__(rank)
        self.rows = nn.Embedding(4, 2, sparse=True)


class OfAnotherModule(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)


class EmptyGroup(Module):
    """As where rules sort parameters into groups, and this model has none for one of them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": self.parameters()}]
        return torch.optim.SGD(groups, lr=0.1)


class FrozenGroup(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.net.branch.requires_grad_(False)
        others = [*self.net.embed.parameters(), *self.net.head.parameters()]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": self.net.branch.parameters()}]
        return torch.optim.SGD(groups, lr=0.1)


class FrozenDummyGroup(FrozenGroup):
    def configure_optimizers(self) -> Any:
        return DummyOptim(super().configure_optimizers().param_groups, lr=0.1)


class Branching(Module):
    def __init__(self, rank: int | None) -> None:
        super().__init__(rank)
        self.plan = Fit(unused=((3, (0,)),))


class BranchingAtOnce(Module):
    def __init__(self, rank: int | None) -> None:
        super().__init__(rank)
        self.plan = Fit(unused=((0, (0,)),))


def attempt(kind: type[Module], stage: int, config: dict[str, Any] | None = None) -> str:
    module = kind(PartialState().process_index)
    strategy = deepspeed_strategy(stage, config=config or {}, timeout=timedelta(seconds=3))
    trainer = quiet_trainer(strategy, NUM_RANKS, max_epochs=1)
    try:
        trainer.fit(module, Batches(module.rank))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Unfreezing, "RuntimeError: net.branch.weight, net.branch.bias was frozen when fit() started"),
        (AddingGroup, "RuntimeError: DeepSpeed's optimizer accepts no parameter group"),
        (Growing, "RuntimeError: DeepSpeed's optimizer accepts no parameter group"),
        (ForgettingToZero, "RuntimeError: manual_backward() followed optimizer.step() without zero_grad()"),
        (WholeMatrices, "ValueError: Adafactor cannot train with ZeRO stage"),
        (Closing, "ValueError: OfClosure steps only with a closure"),
        (DividingByNorms, "ValueError: NormedSGD cannot train with ZeRO stage"),
        (Sparse, "ValueError: DeepSpeed cannot train this Sparse:\nrows: Embedding(sparse=True) has sparse gradients"),
        (OfAnotherModule, "ValueError: SGD has 2 parameters that do not belong to OfAnotherModule"),
        (EmptyGroup, "ValueError: SGD: group 0 has no parameters"),
        (ClippingValues, "ValueError: DeepSpeed clips gradients by their norm only"),
    ],
)
def test_backwards_that_zero_cannot_train_are_refused(kind: type[Module], expected: str, stage: int) -> None:
    for found in run_on_ranks(NUM_RANKS, attempt, kind, stage):
        assert found.startswith(expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_of_frozen_parameters(stage: int) -> None:
    expected = "ValueError: SGD: group 1 has no parameters" if stage in (1, 2) else "trained"
    for found in run_on_ranks(NUM_RANKS, attempt, FrozenGroup, stage):
        assert found.startswith(expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_of_frozen_parameters_for_the_configs_optimizer(stage: int) -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}
    expected = "ValueError: DummyOptim: group 1 has no parameters" if stage in (1, 2) else "trained"
    for found in run_on_ranks(NUM_RANKS, attempt, FrozenDummyGroup, stage, config):
        assert found.startswith(expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_was_frozen_after_the_start_may_train_later(stage: int) -> None:
    assert run_on_ranks(NUM_RANKS, attempt, FreezingLater, stage) == ["trained"] * NUM_RANKS
    if stage == 0:
        assert run_on_ranks(NUM_RANKS, attempt, Unfreezing, stage) == ["trained"] * NUM_RANKS


@pytest.mark.parametrize("stage", [2, 3])
def test_changes_in_place_reach_what_trains(stage: int) -> None:
    assert run_on_ranks(NUM_RANKS, attempt, ChangingInPlace, stage) == ["trained"] * NUM_RANKS


@pytest.mark.core("BranchingAtOnce")
@pytest.mark.parametrize("kind", [BranchingAtOnce, Branching])
def test_stage_3_tells_of_ranks_that_use_different_layers(kind: type[Module]) -> None:
    """At once where nothing is recorded yet; later, from the rank that leaves the recorded order."""
    found = run_on_ranks(NUM_RANKS, attempt, kind, 3, group_timeout_s=8)
    told = [each for each in found if "find_unused_parameters=True" in each]
    assert told, found
    assert "net.head" in told[0]


class CrossingOver(Module):
    """Its ranks use two layers in different orders, in the last batch of a window of two."""

    def __init__(self, rank: int | None) -> None:
        super().__init__(rank)
        self.pair = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = self.pair[:: -1 if self.rank and batch_idx == 1 else 1]
        return super().loss([first(second(batch[0])), batch[1]], batch_idx)


def cross_over(stage: int, more: dict[str, Any]) -> int:
    module = CrossingOver(PartialState().process_index)
    trainer = quiet_trainer(deepspeed_strategy(stage, **more), NUM_RANKS, max_epochs=1, accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match="used the same parameters in different orders"):
        trainer.fit(module, Batches(module.rank))
    return trainer.global_step


@pytest.mark.parametrize(("stage", "more"), [(2, {}), (3, {"find_unused_parameters": True})])
def test_layers_in_different_orders_are_refused_before_the_step(stage: int, more: dict[str, Any]) -> None:
    assert run_on_ranks(NUM_RANKS, cross_over, stage, more) == [0] * NUM_RANKS


# ---------------------------------------------------------------------- folders
def save_over(folder: Path) -> list[str]:
    module = Module(PartialState().process_index)
    trainer = quiet_trainer(deepspeed_strategy(2), NUM_RANKS, max_epochs=1)
    trainer.fit(module, Batches(module.rank))
    errors = []
    for name in ("results", "checkpoint"):
        try:
            trainer.save_checkpoint(folder / name)
            trainer.save_checkpoint(folder / name)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    reset_state()
    return errors


def test_a_save_replaces_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine.txt").write_text("mine")
    for refused, replaced in run_on_ranks(NUM_RANKS, save_over, tmp_path):
        assert "results" in refused
        assert replaced == ""
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["mine.txt"]
    assert (tmp_path / "checkpoint" / "checkpoint").is_dir()


# ---------------------------------------------------------------------- layers of one name
def test_two_classes_of_one_name_are_both_leaf_modules() -> None:
    from deepspeed.utils import z3_leaf_module

    from accelight.strategies.deepspeed.plugin import set_leaf_modules

    def expert_class() -> type[nn.Module]:
        class Experts(nn.Linear):
            pass

        return Experts

    model = nn.Sequential(expert_class()(2, 2), expert_class()(2, 2), nn.Linear(2, 2))
    set_leaf_modules(model, ["Experts"])
    assert [z3_leaf_module(layer) for layer in model] == [True, True, False]
