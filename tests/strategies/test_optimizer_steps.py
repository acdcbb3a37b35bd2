"""Steps that stand for an optimizer's own: on whole tensors, of which each rank has some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import SGD, Muon, Optimizer

from accelight.strategies.optimizers.steps import WholeTensorStep
from accelight.strategies.upstream.patches import Patches
from tests.ranks import run_on_ranks


def _model(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(5, 5, bias=number != 1) for number in range(layers)), nn.Linear(5, 2))


def _sharded(*mesh: int, layers: int = 3) -> nn.Module:
    model, names = _model(layers), ("replicate", "shard")[-len(mesh) :]
    return fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))  # type: ignore[return-value]


def _on_whole_tensors(optimizer: Optimizer, model: nn.Module) -> Patches:
    mesh = next(one.device_mesh for one in model.parameters() if isinstance(one, DTensor))
    patches = Patches("user code")
    group = mesh.get_group(mesh.ndim - 1)
    WholeTensorStep(optimizer, group, torch.device("cpu"), lambda _: None).attach(patches)
    return patches


def _loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(4, 5, generator=generator, dtype=next(model.parameters()).dtype)
    return model(batch).square().sum()


def _train(model: nn.Module, optimizer: Optimizer, steps: int = 4) -> dict[str, Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    return _full(model)


def _full(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.named_parameters()
    }


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.ndim == 2]


# ---------------------------------------------------------------------- whole tensors
class Moody(SGD):
    """Keeps a number, a flag, a word, a scalar tensor and a vector of each parameter, and a number of each group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for one in (one for one in group["params"] if one.grad is not None):
                state = self.state[one]
                if not state:
                    state.update(count=0, odd=False, word="even", norm=torch.zeros(()), rows=torch.zeros(one.shape[:1]))
                state["count"] += 2
                state["odd"] = not state["odd"]
                state["word"] = "odd" if state["odd"] else "even"
                state["norm"] = one.grad.norm()
                state["rows"] += one.grad.reshape(one.shape[0], -1).sum(1)
                one.sub_(0.01 * one.grad / (state["norm"] + state["count"]))
                if one.ndim > 1:
                    one.sub_(0.01 * state["rows"].unsqueeze(1))


def _moody(num_replicas: int) -> list[Any]:
    size = dist.get_world_size()
    model = _sharded(num_replicas, size // num_replicas) if num_replicas > 1 else _sharded(size)
    optimizer, reference = Moody(model.parameters(), lr=0.1), _model()
    _on_whole_tensors(optimizer, model)
    expected_optimizer = Moody(reference.parameters(), lr=0.1)
    expected, found = _train(reference, expected_optimizer), _train(model, optimizer)
    far = max(float((found[name] - one).abs().max()) for name, one in expected.items())
    states = []
    for one, plain in zip(model.parameters(), reference.parameters(), strict=True):
        state, wanted = optimizer.state[one], expected_optimizer.state[plain]
        assert isinstance(state["rows"], DTensor)
        far = max(far, float((state["rows"].full_tensor() - wanted["rows"]).abs().max()))
        far = max(far, abs(float(state["norm"]) - float(wanted["norm"])) / float(wanted["norm"]))
        states.append([state["count"], state["odd"], state["word"], wanted["count"], wanted["odd"], wanted["word"]])
    return [far, states, optimizer.param_groups[0]["calls"], set(optimizer.state) == set(model.parameters())]


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (3, 1), (4, 2)])
def test_every_kind_of_state_reaches_every_rank(num_ranks: int, num_replicas: int) -> None:
    for far, states, calls, complete in run_on_ranks(num_ranks, _moody, num_replicas):
        assert far < 1e-5  # FSDP2 sums gradients in another order
        assert all(state[:3] == state[3:] for state in states)
        assert calls == 4
        assert complete


def _counts(num_layers: int, whole: bool) -> int:
    model = _sharded(2, layers=num_layers)
    optimizer = Muon(_matrices(model), lr=0.01)
    if whole:
        _on_whole_tensors(optimizer, model)
    _train(model, optimizer, 2)
    _loss(model, 3).backward()
    with CommDebugMode() as counter:
        optimizer.step()
    return counter.get_total_counts()


@pytest.mark.parametrize("num_layers", [2, 6])
def test_collectives_of_a_step_on_whole_tensors_do_not_grow_with_the_model(num_layers: int) -> None:
    assert run_on_ranks(2, _counts, num_layers, True) == [3, 3]  # there, numbers, and back
    [on_dtensors, _] = run_on_ranks(2, _counts, num_layers, False)
    assert on_dtensors >= 13 * (num_layers + 1)


class Failing(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if any(one.shape[0] == 2 and one.ndim == 2 for group in self.param_groups for one in group["params"]):
            raise KeyError("kernel")


def _fails() -> list[Any]:
    model = _sharded(2)
    optimizer = Failing(model.parameters(), lr=0.1, momentum=0.9)
    _on_whole_tensors(optimizer, model)
    before = _full(model)
    _loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"Failing\.step") as raised:
        optimizer.step()
    after = _full(model)
    kept = all(torch.equal(before[name], one) for name, one in after.items())
    return [str(raised.value), kept, len(optimizer.state), len(optimizer.param_groups[0]["params"])]


def test_a_step_that_fails_on_one_rank_raises_on_all_and_changes_nothing() -> None:
    first, second = run_on_ranks(2, _fails)
    assert first == second
    assert "KeyError: 'kernel'" in first[0]
    assert first[0].count("rank") == 1
    assert first[1:3] == [True, 0]
    assert first[3] == len(list(_model().parameters()))


class Counting(Optimizer):
    """Keeps a state of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        states: Any = self.state
        number = states["all"]["number"] = states["all"].get("number", 0) + 1
        for one in (one for group in self.param_groups for one in group["params"]):
            one.sub_(one.grad / one.grad.norm() / number)


def _counts_steps() -> list[Any]:
    plain, model = _model(), _sharded(2)
    expected = _train(plain, Counting(plain.parameters()))
    optimizer: Any = Counting(model.parameters())
    _on_whole_tensors(optimizer, model)
    found = _train(model, optimizer)
    return [optimizer.state["all"], all(torch.allclose(found[name], one) for name, one in expected.items())]


def test_states_of_no_parameter_stay() -> None:
    assert run_on_ranks(2, _counts_steps) == [[{"number": 4}, True]] * 2


def _without_gradients() -> list[Any]:
    model = _sharded(2)
    optimizer = Muon(_matrices(model), lr=0.1)
    _on_whole_tensors(optimizer, model)
    with CommDebugMode() as counter:
        optimizer.step()
    _loss(model, 0).backward()
    left_out = _matrices(model)[0]
    left_out.grad, before = None, _full(model)
    optimizer.step()
    changed = [not torch.equal(one, before[name]) for name, one in _full(model).items() if one.ndim == 2]
    return [counter.get_total_counts(), changed, left_out in optimizer.state]


def test_parameters_without_gradients_stay_as_they_are() -> None:
    assert run_on_ranks(2, _without_gradients) == [[0, [False, True, True, True], False]] * 2
