"""A module that each rank builds differently, and what one process trains that begins as rank 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.oracle import quiet_trainer

STEPS = 3


class Module(LightningModule):
    """Two layers and a buffer that the ranks would make differently, at one of the places where models are made."""

    offset: Tensor

    def __init__(self, where: str, seed: int, *, device: str = "cpu") -> None:
        super().__init__()
        self.where, self.seed, self.made_on = where, seed, device
        self.net: nn.Module | None = None
        self.register_buffer("offset", torch.full((3,), float(seed)))
        if where != "configure_model":
            self.make()

    def make(self) -> None:
        torch.manual_seed(self.seed)
        with torch.device(self.made_on):
            self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            torch.manual_seed(7 + self.seed)
            for parameter in self.parameters():
                nn.init.normal_(parameter)

    def configure_model(self) -> None:
        if self.net is None:
            self.make()

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(x) + self.offset

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, 4, 4, generator=generator), torch.randn(STEPS, 4, 3, generator=generator)


def plain_weights(where: str) -> dict[str, Tensor]:
    """Return what one process trains that begins as rank 0."""
    module = Module(where, 0)
    module.configure_model()
    module.setup("fit")
    optimizer = module.configure_optimizers()
    for x, y in zip(*batches(), strict=True):
        optimizer.zero_grad()
        module.training_step([x, y], 0).backward()
        optimizer.step()
    return module.state_dict()


def fit(strategy: Any, where: str, *, seed: int | None = None, device: str = "cpu") -> Module:
    """Train the module that this rank builds."""
    rank = dist.get_rank()
    module = Module(where, rank if seed is None else seed, device=device)
    x, y = (part.chunk(2, dim=1)[rank] for part in batches())
    quiet_trainer(strategy, 2, max_steps=STEPS, use_distributed_sampler=False).fit(
        module, DataLoader(TensorDataset(x.flatten(0, 1), y.flatten(0, 1)), batch_size=2)
    )
    return module


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To fp32 sums in another order."""
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
