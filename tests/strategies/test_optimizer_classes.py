"""A few steps of an optimizer's class on small tensors: element by element, or not."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from accelight.strategies.optimizers.classes import try_on_dtensors, try_on_owners, try_on_pieces
from tests.ranks import run_on_ranks


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes or ((3, 4), (4,))]


class WithStep(SGD):
    """Does something to gradients, then what SGD does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.edit([one for group in self.param_groups for one in group["params"] if one.grad is not None])
        super().step()
        return loss

    def edit(self, held: list[Any]) -> None:
        raise NotImplementedError


class Normed(WithStep):
    def edit(self, held: list[Any]) -> None:
        for one in held:
            one.grad.div_(one.grad.norm() + 1e-6)


class Centralised(WithStep):
    def edit(self, held: list[Any]) -> None:
        for one in held:
            if one.ndim > 1:
                one.grad.sub_(one.grad.mean(dim=1, keepdim=True))


class GlobalNorm(WithStep):
    """Clips, and its limit is rarely reached."""

    def edit(self, held: list[Any]) -> None:
        nn.utils.clip_grad_norm_(held, 10.0)


class MatricesAlone(WithStep):
    def edit(self, held: list[Any]) -> None:
        for one in held:
            if one.ndim == 2:
                one.grad.mul_(2)


class EightBits(WithStep):
    """Rounds large gradients in blocks, each to 255 values up to its largest."""

    def edit(self, held: list[Any]) -> None:
        for one in held:
            local = one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad
            if local.numel() >= 4096:
                blocks = local.flatten().split(256)
                rounded = [torch.round(block / (top := block.abs().max() / 127)) * top for block in blocks]
                local.copy_(torch.cat(rounded).view_as(local))


class Sign(WithStep):
    def edit(self, held: list[Any]) -> None:
        for one in held:
            one.grad.sign_()


class Sharp(SGD):
    """Sharpness-aware: two gradients for each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        held = [one for group in self.param_groups for one in group["params"]]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        moves = [one.grad * (0.05 / norm) for one in held]
        for one, move in zip(held, moves, strict=True):
            one.add_(move)
        evaluate()
        for one, move in zip(held, moves, strict=True):
            one.sub_(move)
        super().step()
        return loss


class SignOfClosure(SGD):
    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        super().step()
        return loss


class Raising(SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyError("kernel")


class HoldingAModule(SGD):
    def __init__(self, held: Any, **options: Any) -> None:
        super().__init__(held, **options)
        self.model = nn.Linear(2, 2)


class Drawing(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(torch.randn_like(one) + random.random())


class Wrapping(Optimizer):
    """Moves halfway back every third step, as Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state
        self.slow: dict[Any, Any] = {}
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        for one in (one for group in self.param_groups for one in group["params"]):
            slow = self.slow.setdefault(one, one.clone())
            if self.count % 3 == 0:
                one.copy_(slow.lerp_(one, 0.5))
        return loss


ELEMENTWISE = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop", "Rprop"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_are_element_by_element(name: str) -> None:
    verdict = try_on_pieces(getattr(torch.optim, name)(parameters()))
    assert verdict.problem is None
    assert not verdict.needs_closure


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"momentum": 0.9, "foreach": True, "nesterov": True}),
        (torch.optim.NAdam, {"foreach": True, "decoupled_weight_decay": True}),
        (Sign, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_options_and_subclasses_that_are_right(kind: Any, options: dict[str, Any]) -> None:
    assert try_on_pieces(kind(parameters(), **options)).problem is None
    assert try_on_pieces(Wrapping(kind(parameters(), **options))).problem is None


@pytest.mark.parametrize(
    "kind", [Normed, Centralised, GlobalNorm, MatricesAlone, Sharp, Drawing, torch.optim.Adafactor]
)
def test_classes_that_look_further_than_an_element(kind: Any) -> None:
    problem = try_on_pieces(kind(parameters(), lr=0.1)).problem
    assert problem is not None
    assert "in a full parameter and in a flat part" in problem
    assert "in a full parameter" in (try_on_pieces(Wrapping(kind(parameters(), lr=0.1))).problem or "")


def test_large_tensors_are_tried_too() -> None:
    """Optimizers with states of 8 bits keep those of small tensors in full."""
    assert "a flat part of one" in str(try_on_pieces(EightBits(parameters(), lr=0.1)).problem)


def test_states_that_are_subclasses_of_tensors_are_not_sharded() -> None:
    class Coded(torch.Tensor):
        pass

    class Coding(WithStep):
        def edit(self, held: list[Any]) -> None:
            for one in held:
                code = torch.zeros_like(one)
                self.state[one]["code"] = code.as_subclass(Coded) if one.numel() >= 4096 else code

    found = try_on_owners(Coding(parameters(), lr=0.1), lambda one: one.shape, keeps_shapes=False)
    assert found.problem == "its state 'code' is a Coded, which cannot be sharded"
    assert try_on_owners(Normed(parameters(), lr=0.1), lambda one: one.shape, keeps_shapes=False).problem is None


def test_options_decide_whether_an_optimizer_is_refused() -> None:
    """A trust ratio that an option switches on, in one of the groups alone."""

    class Ratio(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for one in group["params"]:
                    ratio = one.norm() if group["weight_decay"] else 1.0
                    one.sub_(one.grad * group["lr"] * ratio)

    plain, decayed = {"params": parameters()}, {"params": parameters(), "weight_decay": 0.1}
    assert try_on_pieces(Ratio([plain], lr=0.1)).problem is None
    groups: list[Any] = [plain, decayed]
    assert try_on_pieces(Ratio(groups, lr=0.1)).problem is not None


def test_what_groups_keep_of_all_parameters_is_a_problem() -> None:
    """D-adaptation steps by it once it has grown."""

    class Adapting(WithStep):
        def edit(self, held: list[Any]) -> None:
            group = self.param_groups[0]
            group["d"] = group.get("d", 0.0) + float(sum(one.grad.square().sum() for one in held))

    assert "keep in the groups" in (try_on_pieces(Adapting(parameters(), lr=0.1)).problem or "")


def test_what_cannot_be_tried_is_a_problem() -> None:
    assert "KeyError: 'kernel'" in (try_on_pieces(Raising(parameters(), lr=0.1)).problem or "")
    assert "holds a module in model" in (try_on_pieces(HoldingAModule(parameters(), lr=0.1)).problem or "")
    closure = try_on_pieces(SignOfClosure(parameters(), lr=0.1))
    assert closure.problem is None
    assert closure.needs_closure


def test_the_trial_changes_no_state() -> None:
    held = parameters((2, 3), (3,))
    for one in held:
        one.grad = torch.ones_like(one)
    optimizer = Drawing(held, lr=0.1, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda step: step / 10)  # the first rate is 0
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    before = copy.deepcopy([one.detach() for one in held]), copy.deepcopy(optimizer.state_dict())
    states = torch.get_rng_state(), random.getstate()
    try_on_pieces(optimizer)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(torch.equal(one, old) for one, old in zip(held, before[0], strict=True))
    assert optimizer.state_dict() == before[1]
    assert not calls
    assert schedule.get_last_lr() == [0.0]
    assert "step" in optimizer.__dict__


def _on_mesh() -> list[str | None]:
    mesh = init_device_mesh("cpu", (2,))

    def trained(*rows: int) -> list[nn.Parameter]:
        return [nn.Parameter(distribute_tensor(torch.randn(each, 4), mesh, [Shard(0)])) for each in rows]

    class OfShards(WithStep):
        def edit(self, held: list[Any]) -> None:
            for one in held:
                local = one.grad.to_local() if hasattr(one.grad, "to_local") else one.grad
                local.div_(local.norm())

    class Flattening(WithStep):
        def edit(self, held: list[Any]) -> None:
            for one in held:
                one.grad.copy_((one.grad.flatten() * 1).view(one.shape))

    class OnOneRank(WithStep):
        def edit(self, held: list[Any]) -> None:
            if hasattr(held[0], "to_local") and torch.distributed.get_rank() == 1:
                raise KeyError("there")

    kinds = [Normed, Centralised, Sharp, Sign, torch.optim.Rprop, OfShards, OnOneRank]
    found = [try_on_dtensors(kind(trained(4), lr=0.1), mesh, [Shard(0)]).problem for kind in kinds]
    found += [try_on_dtensors(Flattening(trained(n), lr=0.1), mesh, [Shard(0)]).problem for n in (4, 3)]
    return [*found, try_on_dtensors(EightBits(trained(4), lr=0.1), mesh, [Shard(0)]).problem]


def test_dtensors() -> None:
    first, second = run_on_ranks(2, _on_mesh)
    assert first == second
    assert first[:4] == [None] * 4
    assert first[7] is None
    assert "fails on DTensors" in first[4]
    assert "different weights for DTensors" in first[5]
    assert "KeyError: 'there'" in first[6]
    assert "unevenly" in first[8]
    assert "different weights for DTensors" in first[9]
