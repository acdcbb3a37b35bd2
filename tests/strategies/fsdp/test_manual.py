"""Manual optimization with several optimizers, against the same loop in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.pairs import SETTINGS, Net
from tests.strategies.oracle import NUM_MICRO_BATCHES, dataset, quiet_trainer, rank_loader

LIMITS: dict[str, tuple[float, float]] = {"norm": (0.5, 0.2), "value": (0.05, 0.02)}


class Pair(nn.Module):
    """A generator and a critic; each phase's loss flows through both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.generator, self.critic = Net(5, 3), Net(3, 1)


def generator_loss(pair: Any, batch: list[Tensor]) -> Tensor:
    return -pair.critic(pair.generator(batch[0])).mean() + (pair.generator(batch[0]) - batch[1]).square().mean()


def critic_loss(pair: Any, batch: list[Tensor]) -> Tensor:
    return (pair.critic(pair.generator(batch[0])) + 1).square().mean() + (pair.critic(batch[1]) - 1).square().mean()


LOSSES: tuple[Callable[[Any, list[Tensor]], Tensor], ...] = (generator_loss, critic_loss)


def optimizers_of(pair: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (pair.generator, pair.critic)]


@dataclass
class Trace:
    losses: list[list[float]] = field(default_factory=lambda: [[], []])
    norms: list[list[float]] = field(default_factory=lambda: [[], []])
    weights: dict[str, Tensor] = field(default_factory=dict)
    num_states: list[int] = field(default_factory=list)
    """Parameters with a state, for each optimizer."""


class _HeadsInTurns(LightningModule):
    """Two heads of one optimizer, each used by every other micro-batch; the ranks reduce in the second alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.body, self.even, self.odd = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        head = self.odd if batch_idx % 2 else self.even
        return (head(self.body(batch[0])) - batch[1]).square().mean() / 2

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        is_last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(batch, batch_idx))
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _train_heads(version: int) -> dict[str, Tensor]:
    strategy, module = AccelFSDPStrategy(fsdp_version=version), _HeadsInTurns()
    quiet_trainer(strategy, 2, max_epochs=1).fit(module, rank_loader(2))
    return {name: one.clone() for name, one in strategy.full_state_dict(module).items()}


@pytest.mark.parametrize("version", [1, 2])
def test_a_part_that_the_last_micro_batch_does_not_use_keeps_its_gradients(version: int) -> None:
    module = _HeadsInTurns()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = (tensor.unflatten(0, (NUM_MICRO_BATCHES, -1)) for tensor in dataset(2).tensors)
    for batch_idx, batch in enumerate(zip(inputs, targets, strict=True)):
        module.loss(batch, batch_idx).backward()
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
    for found in run_on_ranks(2, _train_heads, version):
        torch.testing.assert_close(found, dict(module.state_dict()), rtol=1e-5, atol=1e-6)


class Adversarial(LightningModule):
    """The usual two phases; what one leaves in the other's gradients must not be there."""

    def __init__(self, clipping: Literal["norm", "value"], trace: Trace) -> None:
        super().__init__()
        self.automatic_optimization = False
        pair = Pair()
        self.generator, self.critic = pair.generator, pair.critic
        self.clipping, self.trace = clipping, trace

    def training_step(self, batch: list[Tensor]) -> None:
        strategy = cast("AccelFSDPStrategy", self.trainer.strategy)
        optimizers: Any = self.optimizers()
        for index, (loss_of, optimizer) in enumerate(zip(LOSSES, optimizers, strict=True)):
            self.toggle_optimizer(optimizer)
            loss = loss_of(self, batch)
            self.manual_backward(loss)
            with torch.no_grad():  # gathers weights that are about to change
                loss_of(self, batch)
            norm = strategy.clip_grad_norm(optimizer, math.inf)
            self.clip_gradients(optimizer, LIMITS[self.clipping][index], self.clipping)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.trace.norms[index].append(norm.item())
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self.trace.losses[index].append(mean.item() / dist.get_world_size())

    def configure_optimizers(self) -> Any:
        return optimizers_of(self), []


def train(options: dict[str, Any], clipping: Literal["norm", "value"], num_epochs: int) -> Trace:
    world_size, trace = dist.get_world_size(), Trace()
    strategy = AccelFSDPStrategy(state_dict_type="full_state_dict", **options)
    trainer = quiet_trainer(strategy, world_size, max_epochs=num_epochs)
    trainer.fit(Adversarial(clipping, trace), rank_loader(world_size))
    trace.weights = {name: tensor.clone() for name, tensor in strategy.lightning_module_state_dict().items()}
    trace.num_states = [len(strategy.optimizer_state(optimizer).get("state", {})) for optimizer in trainer.optimizers]
    return trace


def train_plain(clipping: str, num_epochs: int, world_size: int) -> Trace:
    pair, trace = Pair(), Trace()
    optimizers = optimizers_of(pair)
    inputs, targets = (tensor.unflatten(0, (NUM_MICRO_BATCHES, -1)) for tensor in dataset(world_size).tensors)
    for batch in [*zip(inputs, targets, strict=True)] * num_epochs:
        for index, (loss_of, optimizer) in enumerate(zip(LOSSES, optimizers, strict=True)):
            pair.zero_grad()
            loss = loss_of(pair, list(batch))
            loss.backward()
            parameters = optimizer.param_groups[0]["params"]
            trace.norms[index].append(nn.utils.clip_grad_norm_(parameters, math.inf).item())
            clip = nn.utils.clip_grad_norm_ if clipping == "norm" else nn.utils.clip_grad_value_
            clip(parameters, LIMITS[clipping][index])
            optimizer.step()
            trace.losses[index].append(loss.item())
    trace.weights = pair.state_dict()
    trace.num_states = [len(optimizer.state) for optimizer in optimizers]
    return trace


@pytest.mark.core("fsdp2-norm", "fsdp1-value")
@pytest.mark.parametrize("clipping", ["norm", "value"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_two_optimizers_train_as_in_one_process(setting: str, clipping: Literal["norm", "value"]) -> None:
    """Each clipped by its own parameters alone, what is toggled off left without gradients, nothing stale gathered."""
    found = run_on_ranks(2, train, SETTINGS[setting], clipping, 2)[0]
    expected = train_plain(clipping, 2, 2)
    for name in ("losses", "norms"):
        found_values, values = (torch.tensor(getattr(trace, name)) for trace in (found, expected))
        torch.testing.assert_close(found_values, values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.weights, dict(expected.weights), rtol=1e-5, atol=1e-6)
    assert found.num_states == expected.num_states
