"""`ReplicaCheck(recompute=True)` finds a layer that a process computes wrong once, and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from accelight.callbacks import ReplicaCheck
from accelight.callbacks.second_computation import SecondComputation
from accelight.state import reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import full_weights, quiet_trainer, rank_loader

ENGINES = ["ddp", "fsdp1", "fsdp2", "zero2", "zero3"]


def strategy_called(name: str) -> Any:
    if name.startswith("zero"):
        return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": {"stage": int(name[4])}})
    if name.startswith("fsdp"):
        form: Any = {"auto_wrap_policy": {nn.Linear}, "state_dict_type": "full_state_dict"}
        return AccelFSDPStrategy(fsdp_version=int(name[4]), **form)
    return name


class Wrong(nn.Linear):
    """Flips the last bit of one result, once."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.is_due = [False]

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if not self.is_due[0]:
            return found
        self.is_due[0] = False
        flipped = found.detach().clone()
        flipped.view(torch.int32)[0, 0] ^= 1
        return found + (flipped - found.detach())


class Net(LightningModule):
    """With statistics, random numbers, and a change in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.wrong = Wrong(8, 8)
        self.is_due = self.wrong.is_due
        layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), self.wrong]
        self.model = nn.Sequential(*layers, nn.Linear(8, 3))
        self.weights: dict[str, Tensor] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self) -> None:
        self.weights = full_weights(self.trainer.strategy)


class GoesWrong(Callback):
    """In the third step."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.is_due[0] = trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1


def fit(name: str, check: Callback, *others: Callback, **options: Any) -> Net:
    module, size = Net(), dist.get_world_size()
    strategy = strategy_called(name) if size > 1 else "auto"
    trainer = quiet_trainer(strategy, size, max_epochs=2, callbacks=[*others, check], **options)
    try:
        trainer.fit(module, rank_loader(size))
    finally:
        reset_state()
    return module


def go_wrong(name: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        fit(name, ReplicaCheck(every_n_steps=3, recompute=True), GoesWrong())
    return str(caught.value)


@pytest.mark.core("ddp-2", "fsdp2-2", "zero3-2", "ddp-1")
@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in ENGINES), ("ddp", 1)])
def test_a_wrong_result_is_found_on_all_processes(name: str, size: int) -> None:
    for message in run_on_ranks(size, go_wrong, name, timeout_s=100):
        assert "ReplicaCheck: before step 3 a second computation of 1 layers had other results." in message
        assert f"  layer wrong on process {size - 1} on " in message
        assert "not all copies are equal" not in message
        assert "Resume from a checkpoint" in message


def compare_fits(name: str, accumulate: int) -> None:
    check = ReplicaCheck(every_n_steps=1, recompute=True)
    options = {"accumulate_grad_batches": accumulate}
    twice, once = fit(name, check, **options), fit(name, ReplicaCheck(every_n_steps=1), **options)
    assert check.num_differences == 0
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in [twice.wrong] if name == "ddp")
    assert twice.trainer.callback_metrics["loss_epoch"] == once.trainer.callback_metrics["loss_epoch"]
    for key, weight in once.weights.items():
        assert torch.equal(weight, twice.weights[key]), key


@pytest.mark.core("1-fsdp1", "2-ddp")
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_the_same_to_the_last_bit(accumulate: int, name: str) -> None:
    run_on_ranks(2, compare_fits, name, accumulate, timeout_s=100)


class Drifts(nn.Linear):
    """Gives another result each time, as kernels do that add in any order."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x) + 1e-6 * self.num_calls


def test_layers_that_differ_at_first_are_left_out() -> None:
    model, second = nn.Sequential(Drifts(3, 3), Wrong(3, 3)), SecondComputation()
    steady: Any = model[1]
    found = []
    for is_wrong in (False, False, True):
        second.begin(model, torch.device("cpu"))
        steady.is_due[0] = is_wrong
        model(torch.ones(2, 3))
        found.append(second.end())
    assert found == [[], [], ["1"]]


class Replaces(nn.Module):
    """Gives itself a new buffer in each forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean().detach()
        return x * self.weight


def test_buffers_that_a_forward_replaces_are_those_of_one_forward() -> None:
    model, second = nn.Sequential(Replaces()), SecondComputation()
    for _ in range(2):
        second.begin(model, torch.device("cpu"))
        model(torch.ones(2, 3))
        second.end()
    assert model.state_dict()["0.mean"] == 0.75


def test_attention_and_what_is_not_called() -> None:
    attention, second = nn.MultiheadAttention(8, 2, dropout=0.5), SecondComputation()
    for _ in range(2):
        second.begin(attention, torch.device("cpu"))
        x = torch.ones(3, 1, 8)
        attention(x, x, x)
        assert second.end() == []


def test_arguments() -> None:
    with pytest.raises(ValueError, match="recompute must be a bool, got 'yes'"):
        ReplicaCheck(recompute="yes")  # type: ignore[arg-type]
