"""Parameters stay who they are: attributes, references, ids and hooks, as under ddp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer

STEPS = 3


class Keeper:
    """Holds parameters outside of any module."""

    def __init__(self, parameters: Any) -> None:
        self.kept = list(parameters)


class Marked(nn.Parameter):
    pass


class Module(LightningModule):
    """A module whose code keeps parameters in many ways, and hooks some of them."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        first: Any = self.net[0]
        last: Any = self.net[2]
        first.weight.no_decay = True
        self.slow = {id(parameter) for parameter in first.parameters()}
        self.as_list, self.as_tuple = [last.weight], (last.bias, [first.bias])
        self.by_name = {"first": {"weight": first.weight}}
        self.as_keys = {last.weight: 0.5, last.bias: 0.25}
        self.as_set = {first.weight}
        self.ref = [first.weight]
        if kind == "class":
            last.weight = Marked(last.weight.detach())
        if kind == "object":
            self.keeper = Keeper(self.net.parameters())
        if kind == "post":
            first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        if kind == "hooks":
            first.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            last.weight.register_hook(lambda gradient: gradient * torch.arange(3.0)[:, None])
            self.removed = last.bias.register_hook(lambda gradient: gradient * 0)

    def on_train_start(self) -> None:
        if self.kind == "hooks":
            first: Any = self.net[0]
            first.bias.register_hook(lambda gradient: gradient * 3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "hooks" and batch_idx == 1:
            self.removed.remove()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        first, last = self.net[0], self.net[2]
        assert self.as_list[0] is last.weight
        assert self.as_tuple[0] is last.bias
        assert self.as_tuple[1][0] is first.bias
        assert self.by_name["first"]["weight"] is first.weight
        assert [self.as_keys[each] for each in (last.weight, last.bias)] == [0.5, 0.25]
        assert first.weight in self.as_set
        slow = [each for each in self.parameters() if id(each) in self.slow]
        fast = [each for each in self.parameters() if id(each) not in self.slow]
        assert [len(slow), len(fast)] == [2, 2]
        decay = [0.0 if getattr(each, "no_decay", False) else 0.3 for each in slow]
        groups = [{"params": [each], "weight_decay": one} for each, one in zip(slow, decay, strict=True)]
        return torch.optim.SGD([*groups, {"params": fast, "lr": 0.2}], lr=0.05, momentum=0.9)


def _batches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, 2, 2, 4, generator=generator), torch.randn(STEPS, 2, 2, 3, generator=generator)


def _plain(kind: str) -> dict[str, Tensor]:
    """Train as ddp does: each half of a batch has a backward of its own, whose hooks see it alone."""
    module = Module(kind)
    optimizer = module.configure_optimizers()
    module.on_train_start()
    for step, (x, y) in enumerate(zip(*_batches(), strict=True)):
        module.on_train_batch_start(None, step)
        optimizer.zero_grad()
        for half in range(2):
            module.training_step([x[half], y[half]], step).backward()
        for parameter in module.parameters():
            parameter.grad = parameter.grad / 2 if parameter.grad is not None else None
        optimizer.step()
    return module.state_dict()


def _fit(options: dict[str, Any], kind: str) -> dict[str, Tensor]:
    strategy, module = AccelFSDPStrategy(state_dict_type="full_state_dict", **options), Module(kind)
    x, y = (part[:, dist.get_rank()].flatten(0, 1) for part in _batches())
    trainer = quiet_trainer(strategy, 2, max_steps=STEPS, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=2))
    return {name: tensor.clone() for name, tensor in strategy.lightning_module_state_dict().items()}


ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1},
    "fsdp2": {"fsdp_version": 2},
    "fsdp2-units": {"fsdp_version": 2, "auto_wrap_policy": {nn.Linear}},
    "fsdp1-no-shard": {"fsdp_version": 1, "sharding_strategy": "NO_SHARD"},
}


@pytest.mark.core("fsdp1-", "fsdp2-")
@pytest.mark.parametrize("kind", ["", "hooks"])
@pytest.mark.parametrize("engine", ENGINES)
def test_code_that_keeps_parameters_trains_them(engine: str, kind: str) -> None:
    found = run_on_ranks(2, _fit, ENGINES[engine], kind)[0]
    for name, tensor in _plain(kind).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def _refused(options: dict[str, Any], kind: str) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        _fit(options, kind)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"fsdp_version": 2}, "object", "Keeper.kept holds original parameters ('net.0.weight'"),
        ({"fsdp_version": 2}, "class", "net.2.weight: the class Marked is lost"),
        (
            {"fsdp_version": 2},
            "post",
            "net.0.weight: register_post_accumulate_grad_hook() would never run on a gradient",
        ),
        (
            {"fsdp_version": 1},
            "post",
            "net.0.weight: register_post_accumulate_grad_hook() would never run on a gradient",
        ),
        (
            {"fsdp_version": 1, "use_orig_params": False},
            "hooks",
            "net.0.weight: register_hook() on a part of a flat parameter never runs. Set use_orig_params=True",
        ),
    ],
)
def test_what_would_be_lost_is_refused(options: dict[str, Any], kind: str, message: str) -> None:
    for found in run_on_ranks(2, _refused, options, kind):
        assert message in found


def test_parameters_are_freed_though_somebody_asks() -> None:
    """What the strategy notes about parameters keeps none of them alive."""
    from accelight.strategies.fsdp.sharded_model import References

    layer = nn.Linear(2, 2)
    references = References(layer, kept=())
    weak = [torch.utils.weak.TensorWeakRef(parameter) for parameter in layer.parameters()]
    for name in ("weight", "bias"):
        setattr(layer, name, nn.Parameter(torch.zeros_like(getattr(layer, name))))
    assert [one() for one in weak] == [None, None]
    references.switch(layer)
