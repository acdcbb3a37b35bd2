"""Strategies beside a process group that was there before them."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from accelight.state import InitProcessGroupKwargs, PartialState
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.common.grads import norm_of_parts, scale_gradients
from accelight.strategies.common.launch import SubprocessScriptLauncher, check_offload_backends
from tests.ranks import run_on_ranks
from tests.scripts import LAUNCHER_VARIABLES
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


def _fit(kind: str, options: dict[str, Any]) -> list[str]:
    PartialState(cpu=True, **InitProcessGroupKwargs(timeout=timedelta(minutes=7)).to_kwargs())
    strategy: Any = (AccelFSDPStrategy if kind == "fsdp" else AccelDeepSpeedStrategy)(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(strategy, 2, max_steps=1)
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    return [f"{one.message}" for one in caught if "existed before the Trainer" in f"{one.message}"]


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_arguments_that_come_too_late_are_told(kind: str) -> None:
    late: dict[str, Any] = {"timeout": timedelta(minutes=5), "process_group_backend": "cpu:gloo,cuda:nccl"}
    first, second = run_on_ranks(2, _fit, kind, late, init_group=False)
    assert len(first) == 1
    assert not second
    assert "timeout=0:05:00 (it has 0:07:00)" in first[0]
    assert "process_group_backend='cpu:gloo,cuda:nccl' (it has 'cpu:gloo" in first[0]
    assert run_on_ranks(2, _fit, kind, {"process_group_backend": "gloo"}, init_group=False) == [[], []]


def test_offload_needs_a_backend_for_the_cpu() -> None:
    check_offload_backends("cuda", {"cpu": "gloo", "cuda": "nccl"})
    check_offload_backends("cpu", {"cpu": "gloo"})
    with pytest.raises(ValueError, match="create the group with backend='cpu:gloo,cuda:nccl'"):
        check_offload_backends("cuda", {"cuda": "nccl"})


def test_a_part_without_tensors_is_reduced_where_the_others_reduce_theirs() -> None:
    norm = norm_of_parts({(None, ()): [torch.zeros(0)]}, 2.0, {(None, ()): torch.device("meta")})
    assert norm.device.type == "meta"


def test_gradients_of_any_dtype_are_scaled_by_a_tensor() -> None:
    gradients = [torch.full((3,), 2.0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    scale_gradients(gradients, torch.tensor(0.5, dtype=torch.float64))
    for gradient in gradients:
        assert torch.equal(gradient, torch.ones(3, dtype=gradient.dtype))


def _find_no_address(kind: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    if kind == "state":
        PartialState(cpu=True)
    else:
        strategy: Any = AccelFSDPStrategy() if kind == "fsdp" else AccelDeepSpeedStrategy()
        quiet_trainer(strategy, 1, max_steps=1).fit(TinyModule(Case(), Outcome()))


@pytest.mark.parametrize("kind", ["state", "fsdp", "deepspeed"])
def test_a_node_without_an_address_is_told_of_the_variable(kind: str) -> None:
    with pytest.raises(AssertionError, match=r"GLOO_SOCKET_IFNAME='nowhere0'.*set GLOO_SOCKET_IFNAME to the interface"):
        run_on_ranks(1, _find_no_address, kind, init_group=False)


_OF_LAUNCHERS = LAUNCHER_VARIABLES - {"MASTER_ADDR", "MASTER_PORT"}  # these do not say which process this is


def _variables_after_fits(kind: str) -> list[str]:
    loader = rank_loader(1)
    for name in _OF_LAUNCHERS:
        os.environ.pop(name, None)

    def trainer(devices: int) -> Trainer:
        strategy: Any = AccelFSDPStrategy(fsdp_version=2) if kind == "fsdp" else AccelDeepSpeedStrategy(zero_stage=2)
        return quiet_trainer(strategy, devices, max_steps=1)

    for _ in range(2):
        trainer(1).fit(TinyModule(Case(), Outcome()), loader)
    assert isinstance(trainer(2).strategy.launcher, SubprocessScriptLauncher)
    return [name for name in _OF_LAUNCHERS if name in os.environ]


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_a_fit_on_one_process_does_not_look_like_a_launcher(kind: str) -> None:
    """A later Trainer with two devices found LOCAL_RANK, started no process, and waited for the other."""
    assert run_on_ranks(1, _variables_after_fits, kind, init_group=False) == [[]]
