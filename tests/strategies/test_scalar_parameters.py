"""Parameters without a dimension (a temperature, CLIP's ``logit_scale``) train as on one device, and are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import PartialState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, whole_weights
from tests.strategies.oracle import quiet_trainer


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.scale.exp()
        return scaled


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Scaled(), nn.Tanh(), nn.Linear(3, 3))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self.net(batch[0]) * self.temperature, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(strategy: Any, rank: int | None, epochs: int, save: str = "", resume: str | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, 2, 2, size, generator=generator) for size in (4, 3))
    mine = slice(None) if rank is None else slice(rank, rank + 1)
    data = TensorDataset(x[:, mine].reshape(-1, 4), y[:, mine].reshape(-1, 3))
    world_size = 1 if rank is None else 2
    trainer = quiet_trainer(
        strategy, world_size, max_epochs=epochs, use_distributed_sampler=False, gradient_clip_val=0.5
    )
    module = Module()
    trainer.fit(module, DataLoader(data, 2 * (3 - world_size)), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    if isinstance(strategy, AccelDeepSpeedStrategy):
        return whole_weights(module)
    weights = module.state_dict() if rank is None else trainer.strategy.lightning_module_state_dict()
    return {name: one.detach().clone() for name, one in weights.items()}


def sharded(kind: str, state_dict_type: str, folder: str) -> dict[str, Tensor]:
    rank = PartialState().process_index

    def strategy(saves: str) -> Any:
        if kind.startswith("zero"):
            return AccelDeepSpeedStrategy(hf_ds_config=ds_config(int(kind[-1])))
        flat: dict[str, Any] = {"use_orig_params": False} if kind.endswith("flat") else {}
        return AccelFSDPStrategy(fsdp_version=int(kind[4]), auto_wrap_policy={Scaled}, state_dict_type=saves, **flat)

    file = f"{folder}/{kind}.ckpt"
    train(strategy(state_dict_type), rank, 1, save=file)
    reset_state()
    weights = train(strategy("full_state_dict"), rank, 2, resume=file)
    reset_state()
    return weights


@pytest.mark.core("fsdp1-full", "fsdp2-sharded", "zero3")
@pytest.mark.parametrize(
    ("kind", "state_dict_type"),
    [
        *((kind, which) for kind in ("fsdp1", "fsdp2") for which in ("full_state_dict", "sharded_state_dict")),
        ("fsdp1_flat", "full_state_dict"),
        *((f"zero{stage}", "") for stage in range(4)),
    ],
)
def test_scalars_train_and_come_back(tmp_path: Path, kind: str, state_dict_type: str) -> None:
    wanted = train("auto", None, 2)
    found, _ = run_on_ranks(2, sharded, kind, state_dict_type, str(tmp_path))  # rank 0 has full state dicts
    for name, weight in wanted.items():
        assert found[name].shape == weight.shape
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)
