"""Element-wise optimizers step on the local tensors of DTensors; outside of the step nothing differs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from accelight.strategies.optimizers.classes import try_on_pieces
from accelight.strategies.optimizers.local_steps import LocalShardStep, can_step_locally
from accelight.strategies.upstream.patches import Patches
from tests.ranks import run_on_ranks

TORCHS = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop"]
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}


class Renewing(Optimizer):
    """Keeps a new momentum with each step, counts in an int and in a tensor of one element, and for all together."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        everything: Any = self.state
        everything["steps"] = everything.get("steps", 0) + 1
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = everything[one]
                state["count"] = state.get("count", 0) + 1
                state["seen"] = state.get("seen", torch.zeros(1)) + 1
                state["momentum"] = state["momentum"] * 0.9 + one.grad if "momentum" in state else one.grad.clone()
                if state["count"] == 3:
                    state["late"] = one.grad.abs()
                one.sub_(state["momentum"], alpha=group["lr"])
        return loss


def make(name: str, parameters: Any, **options: Any) -> Optimizer:
    kind: Any = Renewing if name == "Renewing" else getattr(torch.optim, name)
    optimizer: Optimizer = kind(parameters, lr=0.05, **OPTIONS.get(name, {}), **options)
    return optimizer


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3))


def sharded(*mesh: int) -> Any:
    return fully_shard(model(), mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :]))


def attached(optimizer: Optimizer) -> Optimizer:
    assert can_step_locally(optimizer)
    LocalShardStep(optimizer, try_on_pieces(optimizer).unlike_parameters).attach(Patches("user code"))
    return optimizer


def train(module: nn.Module, optimizer: Optimizer, steps: range, *, freezes: bool = True) -> None:
    """Step; every other time without a gradient of the second layer."""
    for step in steps:
        optimizer.zero_grad()
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        module(batch).square().sum().backward()
        if step % 2 and freezes:
            next(iter(module.children())).zero_grad()
        optimizer.step()


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, Tensor) else value


def result(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return weights and states, full, with the types that states have."""
    found = {name: full(one) for name, one in module.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        values = state.items() if isinstance(state, dict) else [("", state)]
        found.update({f"{number} {key} {type(value).__name__}": full(value) for key, value in values})
    return found


def differences(results: list[dict[str, Any]], tolerance: float = 0.0) -> list[str]:
    one, other = results
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [
        name
        for name, value in one.items()
        if not torch.allclose(torch.as_tensor(value), torch.as_tensor(other[name]), rtol=tolerance, atol=tolerance)
    ]


# ------------------------------------------------------------------------------------------------


def _against_dtensors(name: str, options: dict[str, Any], mesh: tuple[int, ...], tolerance: float) -> list[str]:
    found = []
    for is_local in (False, True):
        module = sharded(*mesh)
        optimizer = make(name, module.parameters(), **options)
        if is_local:
            attached(optimizer)
        train(module, optimizer, range(6))
        found.append(result(module, optimizer))
    return differences(found, tolerance)


@pytest.mark.core("SGD", "AdamW", "Renewing")
@pytest.mark.parametrize("name", [*TORCHS, "Renewing"])
def test_weights_and_states_are_those_of_steps_on_dtensors(name: str) -> None:
    """Bit for bit where torch takes the same way."""
    options = {} if name == "Renewing" else {"foreach": False}
    assert run_on_ranks(2, _against_dtensors, name, options, (2,), 0.0) == [[], []]


@pytest.mark.core("default")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["default", "foreach", "fused"])
def test_fused_and_foreach_steps(options: dict[str, Any]) -> None:
    """By default the step is a fused one, whose rounding differs."""
    assert run_on_ranks(2, _against_dtensors, "AdamW", options, (2,), 1e-6) == [[], []]


@pytest.mark.exhaustive
def test_model_copies_and_uneven_shards() -> None:
    assert run_on_ranks(4, _against_dtensors, "AdamW", {"foreach": False}, (2, 2), 0.0) == [[]] * 4


def _tensor_parallel() -> list[str]:
    found = []
    for is_local in (False, True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module: Any = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 5), nn.Linear(5, 3))
        torch.manual_seed(3)
        for one in module.parameters():
            nn.init.normal_(one)
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
        optimizer = make("SGD", module.parameters(), foreach=False)
        if is_local:
            attached(optimizer)
        train(module, optimizer, range(3))
        found.append(result(module, optimizer))
    return differences(found)


def test_tensor_parallel_shards() -> None:
    assert run_on_ranks(4, _tensor_parallel) == [[]] * 4


# ------------------------------------------------------------------------------------------------
# What users do between steps.


def _replace_state(module: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"] * 0.5


def _change_state(module: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)


def _drop_state(module: nn.Module, optimizer: Optimizer) -> None:
    del optimizer.state[next(module.parameters())]


def _clear_states(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def _load_state(module: nn.Module, optimizer: Optimizer) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer, range(20, 22))
    optimizer.load_state_dict(saved)


def _change_options(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.01, momentum=0.5)


def _move_to_a_second_group(module: nn.Module, optimizer: Optimizer) -> None:
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.02})


def _convert(module: nn.Module, optimizer: Optimizer) -> None:
    """Replaces the memory of each shard."""
    module.double()
    module.float()


CHANGES: list[Callable[[nn.Module, Optimizer], None]] = [
    *(_replace_state, _change_state, _drop_state, _clear_states),
    *(_load_state, _change_options, _move_to_a_second_group, _convert),
]


def _after_change(number: int) -> list[str]:
    found = []
    for is_local in (False, True):
        module: Any = sharded(2) if is_local else model()
        optimizer = make("SGD", module.parameters(), foreach=False)
        if is_local:
            attached(optimizer)
        train(module, optimizer, range(3))
        CHANGES[number](module, optimizer)
        train(module, optimizer, range(3, 6))
        found.append({name: full(one) for name, one in module.named_parameters()})
    return differences(found, 1e-5)


@pytest.mark.core("replace_state", "load_state", "convert")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_changes_between_steps_are_those_of_one_process(change: Callable[..., None]) -> None:
    assert run_on_ranks(2, _after_change, CHANGES.index(change)) == [[], []]


def _seen_by_hooks_and_closures() -> list[Any]:
    module = sharded(2)
    optimizer = attached(make("SGD", module.parameters()))
    seen: list[Any] = []

    def look(*_: Any) -> None:
        held = optimizer.param_groups[0]["params"]
        states = [value for state in optimizer.state.values() for value in state.values()]
        seen.append(
            (
                all(isinstance(one, DTensor) and isinstance(one.grad, DTensor | None) for one in held),
                held[0] is next(module.parameters()),
                len(states),
                all(isinstance(one, DTensor) for one in states),
                optimizer.param_groups[0]["fused"],
            )
        )

    def closure() -> Tensor:
        look()
        optimizer.zero_grad()
        loss: Tensor = module(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for _ in range(2):
        loss = optimizer.step(closure)  # type: ignore[arg-type]
    assert loss is not None
    return seen


def test_hooks_and_closures_see_dtensors() -> None:
    plain = (True, True, 0, True, None)
    stepped = (True, True, 5, True, None)
    for seen in run_on_ranks(2, _seen_by_hooks_and_closures):
        assert seen == [plain, plain, stepped, stepped, stepped, stepped]


class _Perturbed(torch.optim.SGD):
    """Evaluates its closure at other weights, too; the step fails when asked to."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        held = [one for group in self.param_groups for one in group["params"]]
        for one in held:
            one.mul_(1.01)
        evaluate()
        for one in held:
            one.div_(1.01)
        super().step()
        if self.fails:
            raise KeyError("in the step")
        return loss


def _with_closures() -> tuple[list[str], bool]:
    found: list[dict[str, Any]] = []
    for is_local in (False, True):
        module: Any = sharded(2) if is_local else model()
        optimizer = _Perturbed(module.parameters(), lr=0.01, momentum=0.9)
        if is_local:
            LocalShardStep(optimizer).attach(Patches("user code"))

        def closure(module: nn.Module = module, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(torch.ones(2, 5)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        found.append({name: full(one) for name, one in module.named_parameters()})
    optimizer.fails = True
    with pytest.raises(KeyError, match="in the step"):
        optimizer.step(closure)
    held = [*optimizer.param_groups[0]["params"], *optimizer.state]
    return differences(found, 1e-6), all(isinstance(one, DTensor) for one in held)


def test_a_closure_that_runs_twice_and_a_step_that_raises() -> None:
    assert run_on_ranks(2, _with_closures) == [([], True)] * 2


def test_optimizers_with_tensors_elsewhere_and_steps_of_users_stay_as_they_are() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert can_step_locally(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert can_step_locally(optimizer)
    optimizer.best = [next(module.parameters())]  # type: ignore[attr-defined]
    assert not can_step_locally(optimizer)
    del optimizer.best  # type: ignore[attr-defined]
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign]
    assert not can_step_locally(optimizer)


def test_a_state_that_the_step_cannot_see_stays_and_so_do_the_others() -> None:
    assert run_on_ranks(2, _with_a_list_as_state) == [True, True]


def _with_a_list_as_state() -> bool:
    module = sharded(2)
    optimizer = attached(make("SGD", module.parameters()))
    train(module, optimizer, range(2), freezes=False)
    first, *others = list(optimizer.state)
    optimizer.state[others[0]] = [1]
    before = dict(optimizer.state)
    with pytest.raises(AttributeError, match="items"):
        train(module, optimizer, range(1))
    held = optimizer.param_groups[0]["params"]
    return optimizer.state == before and all(isinstance(one, DTensor) for one in (first, *held))


def _compiled() -> list[str]:
    found = []
    for is_compiled in (False, True):
        module = sharded(2)
        optimizer: Any = attached(make("AdamW", module.parameters(), foreach=False))
        if is_compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        train(module, optimizer, range(3))
        found.append(result(module, optimizer))
    return differences(found, 1e-5)  # compiled code rounds elsewhere


@pytest.mark.exhaustive
def test_a_step_that_is_compiled() -> None:
    assert run_on_ranks(2, _compiled) == [[], []]


def _warned_by_schedules() -> tuple[list[str], list[str]]:
    found = []
    for steps_first in (True, False):
        module = sharded(1)
        optimizer = make("SGD", module.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        attached(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if steps_first:
                train(module, optimizer, range(1))
            schedule.step()
        found.append([str(each.message) for each in caught if "optimizer.step()" in str(each.message)])
    return found[0], found[1]


def test_a_schedule_warns_of_an_optimizer_that_has_not_stepped_alone() -> None:
    [(of_stepped, of_others)] = run_on_ranks(1, _warned_by_schedules)
    assert not of_stepped
    [warning] = of_others
    assert "Detected call of `lr_scheduler.step()` before `optimizer.step()`" in warning
