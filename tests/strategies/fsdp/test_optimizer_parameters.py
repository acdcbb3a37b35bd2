"""Optimizers made before sharding train the sharded parameters, or say that they cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp import fsdp2_switch_optimizer_parameters
from accelight.strategies.fsdp.sharded_model import map_parameters, parameters_by_name
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModel, TinyModule, build_model, quiet_trainer, rank_loader

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
}


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(3)]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for inputs, targets in _batches():  # every rank sees the whole batch: the mean gradient is the plain one
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _shard(model: TinyModel) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _train_switched(kind: str, by_address: bool) -> list[float]:
    model = build_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = parameters_by_name(model)
    _shard(model)
    mapping: Any = map_parameters(before, model)
    if by_address:
        mapping = {parameter.data_ptr(): sharded for parameter, sharded in mapping.items()}
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    fsdp2_switch_optimizer_parameters(optimizer, mapping)  # again: nothing to do
    return _train(model, optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("by_address", [False, True])
def test_a_switched_optimizer_trains_as_a_plain_one(kind: str, by_address: bool) -> None:
    """pytorch/pytorch#149205: without the switch the sharded weights stay as they are, and no error says so."""
    model = build_model()
    expected = _train(model, OPTIMIZERS[kind](model.parameters()))
    for losses in run_on_ranks(3, _train_switched, kind, by_address):
        assert losses == pytest.approx(expected, rel=1e-5)


def _switch_meta_and_frozen() -> None:
    with torch.device("meta"):
        model = TinyModel()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": model.blocks.parameters(), "weight_decay": 0.5}, {"params": model.head.parameters(), "lr": 3.0}]
    )
    groups = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    before = parameters_by_name(model)
    _shard(model)
    fsdp2_switch_optimizer_parameters(optimizer, map_parameters(before, model))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(isinstance(parameter, DTensor) for parameter in held)
    expected = [*model.blocks.parameters(), *model.head.parameters()]
    assert all(ours is theirs for ours, theirs in zip(held, expected, strict=True))
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups


def test_meta_parameters_are_told_apart_and_groups_keep_their_options() -> None:
    """pytorch/pytorch#107843: parameters, not addresses, say which sharded one belongs to which."""
    run_on_ranks(2, _switch_meta_and_frozen)


def test_an_unknown_parameter_is_named_and_nothing_changes() -> None:
    """pytorch/pytorch#149205: stale parameters never stay in an optimizer silently."""
    model, other = nn.Linear(2, 3), nn.Linear(4, 5)
    optimizer = torch.optim.SGD([*model.named_parameters(), ("stray", other.weight)], lr=1.0)
    before = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
    mapping = {parameter: nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()}
    with pytest.raises(KeyError, match=r"'stray' \(group 0, index 2, shape \(5, 4\)\) has no sharded parameter"):
        fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == before


def test_the_address_of_a_meta_tensor_maps_nothing() -> None:
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(KeyError, match="has no sharded parameter"):
        fsdp2_switch_optimizer_parameters(torch.optim.SGD([parameter], lr=1.0), {0: nn.Parameter(torch.zeros(2))})


def test_an_address_that_belongs_to_something_else_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    mapping = {parameter.data_ptr(): nn.Parameter(torch.zeros(3))}
    with pytest.raises(KeyError, match=r"mapped to a parameter of shape \(3,\)"):
        fsdp2_switch_optimizer_parameters(torch.optim.SGD([parameter], lr=1.0), mapping)


def test_two_parameters_never_become_one() -> None:
    first, target = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    second = nn.Parameter(first.data)  # the same memory
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    with pytest.raises(KeyError, match="same sharded parameter as another"):
        fsdp2_switch_optimizer_parameters(optimizer, {first.data_ptr(): target})


def test_state_of_another_shape_is_refused_and_nothing_changes() -> None:
    parameter, target = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter]["rows"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"'rows' \(shape \(7,\).*cannot be sharded"):
        fsdp2_switch_optimizer_parameters(optimizer, {parameter: target})
    assert optimizer.param_groups[0]["params"][0] is parameter


def _step_on_mixture(asked: dict[str, Any]) -> list[Any]:
    """Train with an ignored module; the ``foreach`` of the group before, within and after its steps."""
    seen: list[Any] = []

    class Module(TinyModule):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, **asked)
            optimizer.first = self.model.head.weight  # so that its step cannot be on local tensors
            seen.append(optimizer.param_groups[0]["foreach"])
            return optimizer

        def on_train_start(self) -> None:
            optimizer: Any = self.optimizers()
            optimizer.optimizer.register_step_pre_hook(lambda one, *_: seen.append(one.param_groups[0]["foreach"]))

        def on_train_end(self) -> None:
            optimizer: Any = self.optimizers()
            seen.append(optimizer.optimizer.param_groups[0]["foreach"])

    strategy = AccelFSDPStrategy(fsdp_version=2, ignored_modules=r"model\.head")
    quiet_trainer(strategy, 2, max_steps=1).fit(Module(Case(), Outcome()), rank_loader(2))
    return seen


def test_sharded_and_unsharded_parameters_step_one_by_one() -> None:
    """On CUDA torch's optimizers take all tensors of a group together, by themselves."""
    assert run_on_ranks(2, _step_on_mixture, {}, init_group=False) == [[None, False, None]] * 2


@pytest.mark.parametrize("asked", ["foreach", "fused"])
def test_steps_on_such_a_mixture_together_are_refused(asked: str) -> None:
    with pytest.raises(AssertionError, match=rf"SGD\({asked}=True\) cannot step on sharded and unsharded parameters"):
        run_on_ranks(2, _step_on_mixture, {asked: True}, init_group=False)
