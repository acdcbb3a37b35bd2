"""``state_dict_config`` and ``optim_state_dict_config``: where full state dicts are, and what has no effect."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp

from accelight.strategies import AccelFSDPStrategy, FullyShardedDataParallelPlugin
from accelight.strategies.common import config as spelling
from accelight.strategies.fsdp.checkpoint.state_dict import state_dict_options
from accelight.strategies.fsdp.settings import FullState
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModel, TinyModule, quiet_trainer, rank_loader

_NUM_PARAMETERS = len(list(TinyModel().parameters()))


def _sizes(engine: str, weights_on_all: bool, optimizer_on_all: bool) -> tuple[int, int, bool]:
    """Return how many weights and states of parameters this rank is given, and whether they are whole."""
    strategy = AccelFSDPStrategy(
        state_dict_type="full_state_dict",
        state_dict_config=fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=not weights_on_all),
        optim_state_dict_config=fsdp.FullOptimStateDictConfig(rank0_only=not optimizer_on_all),
        **ENGINES[engine],
    )
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_steps=1)
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(dist.get_world_size()))
    weights: dict[str, Any] = strategy.lightning_module_state_dict()
    states = strategy.optimizer_state(trainer.optimizers[0]).get("state", {})
    expected = TinyModel().state_dict()
    whole = all(value.shape == expected[name.removeprefix("model.")].shape for name, value in weights.items())
    return len(weights), len(states), whole


@pytest.mark.parametrize("engine", ENGINES)
def test_rank0_only_is_what_each_config_says(engine: str) -> None:
    both = _NUM_PARAMETERS, _NUM_PARAMETERS, True
    assert run_on_ranks(2, _sizes, engine, True, False) == [both, (_NUM_PARAMETERS, 0, True)]
    assert run_on_ranks(2, _sizes, engine, False, True) == [both, (0, _NUM_PARAMETERS, True)]


@pytest.mark.parametrize("version", [1, 2])
def test_offload_to_cpu_reaches_the_engine(version: int) -> None:
    """Seen on a GPU below; on the CPU there is nowhere else to be."""
    config = fsdp.FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    settings = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="full_state_dict", state_dict_config=config
    ).settings()
    assert settings.full_weights == FullState(offload_to_cpu=False)
    assert settings.full_optimizer == FullState()


@pytest.mark.parametrize(
    ("version", "kind", "field", "config"),
    [
        (1, "sharded_state_dict", "state_dict_config", fsdp.ShardedStateDictConfig(_use_dtensor=True)),
        (2, "sharded_state_dict", "optim_state_dict_config", fsdp.ShardedOptimStateDictConfig(_use_dtensor=True)),
        (1, "local_state_dict", "state_dict_config", fsdp.LocalStateDictConfig(offload_to_cpu=True)),
    ],
)
def test_what_has_no_effect_warns_once(
    version: int, kind: str, field: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spelling, "_warned", set())
    given: dict[str, Any] = {"fsdp_version": version, "state_dict_type": kind, field: config}
    with pytest.warns(UserWarning, match=f"{field}=.* has no effect with state_dict_type={kind}"):
        plugin = FullyShardedDataParallelPlugin(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.settings()


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("offload", [True, False])
def test_offload_to_cpu_moves_full_weights(engine: str, offload: bool) -> None:
    assert run_on_ranks(1, _device_of_weights, engine, offload, init_group=False) == ["cpu" if offload else "cuda"]


def _device_of_weights(engine: str, offload: bool) -> str:
    strategy = AccelFSDPStrategy(
        state_dict_type="full_state_dict",
        state_dict_config=fsdp.FullStateDictConfig(offload_to_cpu=offload, rank0_only=True),
        **ENGINES[engine],
    )
    trainer = quiet_trainer(strategy, 1, accelerator="gpu", max_steps=1)
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(1))
    [device] = {value.device.type for value in strategy.lightning_module_state_dict().values()}
    return str(device)


@pytest.mark.parametrize(
    ("rank0_only", "device", "expected"), [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)]
)
def test_full_tensors_are_gathered_to_host_memory_one_by_one(rank0_only: bool, device: str, expected: bool) -> None:
    options = state_dict_options(FullState(rank0_only=rank0_only), torch.device(device))
    assert (options.full_state_dict, options.cpu_offload) == (True, expected)
