"""Models that ``configure_model()`` cuts over ``self.device_mesh["tp"]``: they train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accelight.checkpoint import load_state_dict, merge_fsdp_weights
from accelight.strategies import AccelFSDPStrategy, ParallelismConfig, full_state_dict
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.cut_model import Block, Module, Net, loader, plain
from tests.strategies.oracle import quiet_trainer


class Parallelizes(Module):
    """Cuts itself; processes that nobody has seeded build different weights."""

    def __init__(self, seed: int = 3, mesh: str = "tp") -> None:
        super().__init__()
        self.seed, self.mesh = seed, mesh
        self.net: Any = None

    def configure_model(self) -> None:
        torch.manual_seed(self.seed)
        self.net = Net()
        for module in self.net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        mesh: Any = self.device_mesh
        if self.mesh == "own":
            mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tp"))
        parallelize_module(self.net, mesh["tp"], self.plan())

    def plan(self) -> dict[str, Any]:
        blocks: dict[str, Any] = {}
        for at in range(2):
            blocks |= {f"blocks.{at}.up": ColwiseParallel(), f"blocks.{at}.down": RowwiseParallel()}
        return {**blocks, "head": ColwiseParallel(output_layouts=Replicate())}


class _Uneven(Parallelizes):
    def plan(self) -> dict[str, Any]:
        return {"embed": RowwiseParallel(input_layouts=Replicate())}


def _strategy(tp: int = 2, **options: Any) -> AccelFSDPStrategy:
    config = ParallelismConfig(tp_size=tp, dp_replicate_size=options.pop("replicate", 1))
    return AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={Block}, parallelism_config=config, **options)


def train(options: dict[str, Any], seeds: bool, path: str) -> dict[str, Any]:
    strategy, size = _strategy(**options), dist.get_world_size()
    trainer = quiet_trainer(strategy, size, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.05)
    module = Parallelizes(seed=3 + dist.get_rank() * seeds)
    trainer.fit(module, loader(size // 2))
    trainer.save_checkpoint(path)
    weights = {name: one.clone() for name, one in full_state_dict(strategy, module).items()}
    assert strategy.engine.tensor_parallel is not None
    return {"weights": weights, "norms": module.norms, "styles": strategy.engine.tensor_parallel.styles}


CELLS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "shard2": (4, {}, True),
    "alone": (2, {}, True),
    "two copies": (4, {"replicate": 2}, True),
    "each its own": (4, {"sync_module_states": False}, False),
}


@pytest.mark.core("shard2")
@pytest.mark.parametrize("name", CELLS)
def test_it_trains_as_one_process(name: str, tmp_path: Path) -> None:
    num_ranks, options, seeds = CELLS[name]
    expected = plain(accumulate=2, clip=0.05)
    styles = {
        f"net.blocks.{at}.{name}": f"Shard(dim={dim})" for at in range(2) for name, dim in (("up", 0), ("down", 1))
    }
    for found in run_on_ranks(num_ranks, train, options, seeds, str(tmp_path / "saved")):
        torch.testing.assert_close(found["weights"], dict(expected["weights"]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-4, atol=1e-6)
        assert found["styles"] == {**styles, "net.head": "Shard(dim=0)"}
    merge_fsdp_weights(tmp_path / "saved", tmp_path / "merged")
    assert all(torch.equal(one, found["weights"][key]) for key, one in load_state_dict(tmp_path / "saved").items())


def first_weights(folder: str) -> dict[str, Tensor]:
    strategy = _strategy(pretrained_weights=folder)
    trainer = quiet_trainer(strategy, 4, max_epochs=1, limit_train_batches=0)
    module = Parallelizes(seed=dist.get_rank())
    trainer.fit(module, loader(2))
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


def test_first_weights_are_read_from_files(tmp_path: Path) -> None:
    given = {name: torch.randn_like(one) for name, one in Module().state_dict().items()}
    save_file(given, tmp_path / "model.safetensors")
    for found in run_on_ranks(4, first_weights, str(tmp_path)):
        assert all(torch.equal(found[name], one) for name, one in given.items())


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plan": ({"tp_plan": {"net.head": "colwise_rep"}}, {}, "net.blocks.0.up.weight is a DTensor already, and there is"),
    "other mesh": ({}, {"mesh": "own"}, "is a DTensor over DeviceMesh"),
    "no group": ({"tp": 1}, {"mesh": "own"}, "To cut layers in configure_model(), set ParallelismConfig(tp_size=...)"),
    "rank 0 alone": ({"cpu_ram_efficient_loading": True}, {}, "cpu_ram_efficient_loading=True cannot load a model"),
    "other values": ({"sync_module_states": False}, {"seed": "ranks"}, "net.blocks.0.up.weight (part 0)"),
    "uneven": ({}, {"uneven": True}, "net.embed.weight of shape (6, 5) is placed as S(1) over tp_size=2"),
}


def refused(name: str) -> str:
    options, more, _ = REFUSED[name]
    uneven = more.pop("uneven", False)
    if "seed" in more:
        more["seed"] = 3 + dist.get_rank() // 2
    module = (_Uneven if uneven else Parallelizes)(**more)
    with pytest.raises((ValueError, RuntimeError)) as error:
        quiet_trainer(_strategy(**options), 4, max_epochs=1).fit(module, loader(2))
    return f"{error.value}"


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_an_error(name: str) -> None:
    for message in run_on_ranks(4, refused, name):
        assert REFUSED[name][2] in message
