"""The wrappers around a real engine, in a loop written by hand on two processes; a plain loop is the oracle."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from accelight.strategies.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from tests.ranks import run_on_ranks

ACCUMULATE = 3
NUM_MICRO_BATCHES = 7  # the last window has one
CLIP = 0.4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": CLIP,
    "zero_allow_untested_optimizer": True,
    "steps_per_print": float("inf"),
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1,
                                                      "warmup_num_steps": 2, "total_num_steps": 4}},
}  # fmt: skip


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batches(rank: int | None) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro-batches; None for those of both."""
    generator = torch.Generator().manual_seed(2)
    every = [(torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(7)]
    return every if rank is None else [(x[rank::2], y[rank::2]) for x, y in every]


def is_boundary(index: int) -> bool:
    return (index + 1) % ACCUMULATE == 0 or index == NUM_MICRO_BATCHES - 1


def train_wrapped(stage: int) -> dict[str, Any]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    net = model()
    config = {**CONFIG, "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000}}
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    raw, raw_optimizer, _, raw_scheduler = deepspeed.initialize(
        model=net, optimizer=inner, config=config, dist_init_required=False
    )
    engine = DeepSpeedEngineWrapper(raw)
    optimizer = DeepSpeedOptimizerWrapper(raw_optimizer)
    scheduler = DeepSpeedSchedulerWrapper(raw_scheduler, optimizer)
    found: dict[str, Any] = {"norms": [engine.get_global_grad_norm()], "rates": [], "skipped": []}
    for index, (x, y) in enumerate(batches(dist.get_rank())):
        loss = functional.mse_loss(engine.engine(x), y)
        engine.backward(loss, sync_gradients=is_boundary(index))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if is_boundary(index):
            found["norms"].append(engine.get_global_grad_norm())
            found["rates"].append(scheduler.get_last_lr()[0])
            found["skipped"].append(optimizer.step_was_skipped)
    found["steps"] = raw.global_steps
    found["groups"] = len(optimizer.param_groups)
    assert scheduler.state_dict() == raw_scheduler.state_dict()
    optimizer.load_state_dict([optimizer.state_dict()] * 2 if stage else optimizer.state_dict())  # type: ignore[arg-type]
    with deepspeed.zero.GatheredParameters(list(raw.module.parameters()), enabled=stage == 3):
        found["weights"] = {name: tensor.detach().clone() for name, tensor in raw.module.named_parameters()}
    raw.destroy()
    return found


def train_plain(rates: list[float]) -> dict[str, Any]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    norms, steps = [], 0
    for index, (x, y) in enumerate(batches(None)):
        (functional.mse_loss(net(x), y) / ACCUMULATE).backward()
        if is_boundary(index):
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), CLIP).item())
            optimizer.param_groups[0]["lr"] = ([0.01, *rates])[steps]
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return {"weights": {name: tensor.detach() for name, tensor in net.named_parameters()}, "norms": norms}


def overflow() -> list[Any]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    net = model()
    config = {**CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    config["bf16"] = {"enabled": True, "check_grad_overflow": True}  # DeepSpeed refuses fp16 on most CPUs
    raw, raw_optimizer, _, raw_scheduler = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), config=config, dist_init_required=False
    )
    engine, optimizer = DeepSpeedEngineWrapper(raw), DeepSpeedOptimizerWrapper(raw_optimizer)
    scheduler = DeepSpeedSchedulerWrapper(raw_scheduler, [optimizer])
    found = []
    for factor in (1.0, float("inf"), 1.0):
        x, y = batches(dist.get_rank())[0]
        engine.backward(functional.mse_loss(raw(x.bfloat16()).float(), y) * factor)
        scheduler.step()
        found.append((optimizer.step_was_skipped, scheduler.last_batch_iteration))
    raw.destroy()
    return found


def train_all() -> tuple[dict[int, dict[str, Any]], list[Any]]:
    return {stage: train_wrapped(stage) for stage in range(4)}, overflow()


@pytest.fixture(scope="module")
def trained() -> list[tuple[dict[int, dict[str, Any]], list[Any]]]:
    return run_on_ranks(2, train_all, timeout_s=180)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_by_hand_trains_as_a_plain_one(stage: int, trained: Any) -> None:
    for by_stage, _ in trained:
        found = by_stage[stage]
        expected = train_plain(found["rates"])
        assert found["steps"] == len(found["rates"]) == 3
        assert found["rates"][0] != found["rates"][1]
        assert found["skipped"] == [False] * 3
        assert found["norms"][0] is None
        if stage:  # DeepSpeed keeps no norm at stage 0 in fp32
            assert found["norms"][1:] == pytest.approx(expected["norms"], rel=1e-5)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_a_skipped_step_is_visible_and_holds_the_schedule_back(trained: Any) -> None:
    for _, found in trained:
        assert found == [(False, 0), (True, 0), (False, 1)]


class WithModes(torch.optim.SGD):
    """As schedule-free optimizers, whose weights in training are not those to evaluate."""

    mode = "neither"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


class AsDeepSpeedWrapsIt:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize("wrapped", [False, True])
def test_modes_reach_the_users_optimizer(wrapped: bool) -> None:
    inner = WithModes([nn.Parameter(torch.ones(1))], lr=0.1)
    wrapper = DeepSpeedOptimizerWrapper(AsDeepSpeedWrapsIt(inner) if wrapped else inner)
    wrapper.train()
    assert inner.mode == "train"
    wrapper.eval()
    assert inner.mode == "eval"
    without = DeepSpeedOptimizerWrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    without.train()
    without.eval()


def test_what_the_wrappers_hand_on() -> None:
    parameter = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([parameter], lr=0.5)
    wrapper = DeepSpeedOptimizerWrapper(inner)
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert (wrapper.state, wrapper.param_groups, wrapper.defaults) == (inner.state, inner.param_groups, inner.defaults)
    assert wrapper.state_dict() == inner.state_dict()
    wrapper.load_state_dict(inner.state_dict())
    wrapper.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    parameter.grad = torch.ones(2)
    wrapper.step()
    wrapper.zero_grad()
    assert parameter.grad.tolist() == parameter.tolist() == [1, 1]
    assert not wrapper.step_was_skipped
    assert repr(wrapper) == "DeepSpeedOptimizerWrapper(SGD)"
    with pytest.raises(
        ValueError, match="DeepSpeed does not accept a closure: run backward through DeepSpeedEngineWrapper"
    ):
        wrapper.step(lambda: 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
    scheduler = DeepSpeedSchedulerWrapper(schedule, wrapper)
    scheduler.step()
    assert (scheduler.optimizers, scheduler.last_epoch, scheduler.get_last_lr()) == ([wrapper], 0, [0.5, 0.5])
    with pytest.raises(AttributeError, match="no_such"):
        scheduler.no_such  # noqa: B018
