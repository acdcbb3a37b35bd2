"""A user's module, trained on two processes and by plain Lightning on one device that gets the batches of both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.orders import Block, Net, Second, loader

KINDS = ("fsdp2", "fsdp1", "fsdp1_flat")
"""FSDP1 with original parameters, and with flat ones."""
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
ORIGINAL_PARAMETERS = pytest.mark.parametrize("kind", KINDS[:2])


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


class UserModule(LightningModule):
    """What tests derive from; ``seen`` is what hooks saw, to be compared, too."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net: Any = Net(5)
        self.rank = rank
        self.seen: list[float] = []
        self.build()

    def build(self) -> None:
        """Add to the model."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.see(self.loss(batch))

    def see(self, value: Tensor) -> None:
        """Note a mean over the batch, of all ranks."""
        value = value.detach().clone()
        if self.rank is not None:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        self.seen.append(value.item())

    def sample(self) -> Tensor:
        """What a hook computes with the model."""
        return self(torch.arange(4)[None]).float().square().sum()

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


class ManualModule(UserModule):
    def build(self) -> None:
        self.automatic_optimization = False
        self.second: Any = Second()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.net(tokens))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(self(batch[0]).float(), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.before_step()
        optimizer.step()

    def before_step(self) -> None:
        """Whatever comes between."""


@dataclass
class Place:
    """Where a script runs: one of two processes, or one device (``rank`` None)."""

    folder: Path
    rank: int | None = None
    kind: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)

    def trainer(self, **settings: Any) -> Trainer:
        if self.rank is None and settings.get("precision"):
            del settings["precision"]  # the reference rounds nothing
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1 if self.rank is None else 2,
            "strategy": "auto" if self.rank is None else self._strategy(),
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
        }
        return Trainer(**{**defaults, **settings})

    def _strategy(self) -> AccelFSDPStrategy:
        by_kind: dict[str, dict[str, Any]] = {"fsdp2": {"fsdp_version": 2}, "fsdp1_flat": {"use_orig_params": False}}
        defaults = {"state_dict_type": "full_state_dict", "auto_wrap_policy": ModuleWrapPolicy({Block})}
        return AccelFSDPStrategy(**{**defaults, **by_kind.get(self.kind, {}), **self.options})

    def loader(self, num_batches: int) -> Any:
        return loader(num_batches, self.rank)


Script = Callable[[Place], tuple[Trainer, UserModule]]


@dataclass(frozen=True)
class Fit:
    """The plainest script: one fit of a module of this class."""

    module: type[UserModule]
    batches: int = 4
    validates: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, place: Place) -> tuple[Trainer, UserModule]:
        module, trainer = self.module(place.rank), place.trainer(**self.settings)
        trainer.fit(module, place.loader(self.batches), place.loader(2) if self.validates else None)
        return trainer, module


def _whole(tensor: Any) -> Tensor:
    if isinstance(tensor, ShardedTensor):
        out = torch.zeros(tensor.size()) if dist.get_rank() == 0 else None
        tensor.gather(0, out)
        return torch.zeros(()) if out is None else out
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _on_rank(script: Script, kind: str, folder: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    trainer, module = script(Place(Path(folder), dist.get_rank(), kind, options))
    weights = trainer.strategy.lightning_module_state_dict()
    return {name: _whole(one) for name, one in weights.items() if isinstance(one, Tensor)}, module.seen


def _refused(script: Script, kind: str, folder: str, options: dict[str, Any]) -> str:
    try:
        script(Place(Path(folder), dist.get_rank(), kind, options))
    except Exception as error:  # noqa: BLE001 (the test says which)
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def assert_as_one_process(script: Script, kind: str, *, atol: float = 1e-5, **options: Any) -> None:
    """Run a script on two processes and on one device, and compare weights and what hooks saw."""
    with tempfile.TemporaryDirectory() as folder:
        weights, seen = run_on_ranks(2, _on_rank, script, kind, folder, options)[0]
    with tempfile.TemporaryDirectory() as folder:
        _, module = script(Place(Path(folder)))
    for name, expected in (*module.named_parameters(), *module.named_buffers()):
        error = (weights[name] - expected).abs().max().item()
        assert error <= atol, f"{name} is off by {error:.2g}"
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(module.seen), rtol=20 * atol, atol=20 * atol)


def assert_refused(script: Script, kind: str, *words: str, **options: Any) -> None:
    """Run a script on two processes, each of which must raise an error with these words; none may hang."""
    with tempfile.TemporaryDirectory() as folder:
        for said in run_on_ranks(2, _refused, script, kind, folder, options, timeout_s=30, group_timeout_s=15):
            for word in words:
                assert word in said
