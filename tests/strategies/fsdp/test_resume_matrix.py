"""Every kind of checkpoint resumed by everything that can: the same training goes on.

FSDP1, FSDP2 and plain Lightning on one device; full and sharded; 1, 2 and 3 processes, before and after.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, dataset, quiet_trainer

WORLD_SIZES = (1, 2, 3)
KINDS = {"full": "full_state_dict", "sharded": "sharded_state_dict"}
SHARDED_ENGINES = ("fsdp1", "fsdp2")
PLAIN = "plain"
NUM_STEPS = 3
"""Of an epoch; a checkpoint is of the first epoch's end."""
GLOBAL_BATCH = 6


class Module(TinyModule):
    """Notes what a checkpoint has to bring back: losses, learning rates, where the loop is."""

    def __init__(self) -> None:
        super().__init__(Case(optimizer="adamw"), Outcome())
        self.seen: list[tuple[int, int, int, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((self.trainer.global_step, self.trainer.current_epoch, batch_idx, rate))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass
class Found:
    """What one training shows."""

    losses: list[float]
    seen: list[tuple[int, int, int, float]]
    weights: dict[str, Tensor]


def _fit(engine: str, kind: str, epochs: int, save_to: str | None, resume_from: str | None) -> Found:
    world_size = dist.get_world_size()
    strategy: Any = SingleDeviceStrategy("cpu")
    if engine != PLAIN:
        strategy = AccelFSDPStrategy(state_dict_type=KINDS[kind], **ENGINES[engine])
    data, module = dataset(GLOBAL_BATCH // 2), Module()
    loader = DataLoader(data, GLOBAL_BATCH // world_size, sampler=DistributedSampler(data, shuffle=False))
    trainer = quiet_trainer(strategy, world_size, max_epochs=epochs, limit_train_batches=NUM_STEPS)
    trainer.fit(module, loader, ckpt_path=resume_from, weights_only=True if resume_from else None)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    state = strategy.lightning_module_state_dict()
    weights = {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).clone() for name, x in state.items()}
    return Found(module.outcome.losses, module.seen, weights)


def _savers(world_size: int) -> list[tuple[str, str]]:
    sharded = [(engine, kind) for engine in SHARDED_ENGINES for kind in KINDS]
    return [(PLAIN, "full"), *sharded] if world_size == 1 else sharded


def _name(engine: str, kind: str, world_size: int) -> str:
    return f"{engine}-{kind}-on-{world_size}"


def _save_all(folder: str) -> None:
    for engine, kind in _savers(dist.get_world_size()):
        _fit(engine, kind, 1, f"{folder}/{_name(engine, kind, dist.get_world_size())}", None)


def _resume_all(folder: str, names: list[str]) -> dict[tuple[str, str], Found]:
    found = {}
    for name in names:
        for engine in SHARDED_ENGINES:
            found[name, engine] = _fit(engine, "full", 2, None, f"{folder}/{name}")
        if dist.get_world_size() == 1 and "-full-" in name:  # a single file is what plain Lightning reads
            found[name, PLAIN] = _fit(PLAIN, "full", 2, None, f"{folder}/{name}")
    return found


def _difference(found: Found, expected: Found) -> float:
    """Return the largest relative difference of losses and weights; infinite if something else differs."""
    if found.seen != expected.seen or sorted(found.weights) != sorted(expected.weights):
        return float("inf")
    differences = [abs(one - other) / abs(other) for one, other in zip(found.losses, expected.losses, strict=True)]
    for name, weight in expected.weights.items():
        differences.append(((found.weights[name] - weight).norm() / weight.norm()).item())
    return max(differences)


@pytest.mark.exhaustive
def test_everything_resumes_from_everything(tmp_path: Path) -> None:
    for world_size in WORLD_SIZES:
        run_on_ranks(world_size, _save_all, str(tmp_path))
    names = [_name(engine, kind, n) for n in WORLD_SIZES for engine, kind in _savers(n)]
    [whole] = run_on_ranks(1, _fit, PLAIN, "full", 2, None, None)
    expected = Found(whole.losses[NUM_STEPS:], whole.seen[NUM_STEPS:], whole.weights)
    cells: dict[str, dict[str, float]] = {name: {} for name in names}
    for world_size in WORLD_SIZES:
        for (name, engine), found in run_on_ranks(world_size, _resume_all, str(tmp_path), names, timeout_s=180)[
            0
        ].items():
            cells[name][f"{engine} on {world_size}"] = _difference(found, expected)
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    table = [f"{'saved by':22}" + "".join(f"{column:>14}" for column in columns)]
    for name, row in cells.items():
        table.append(f"{name:22}" + "".join(f"{row[c]:14.1e}" if c in row else f"{'(no file)':>14}" for c in columns))
    print("\n".join(["", "largest relative difference from uninterrupted training on one process", *table]))
    # fp32 sums in another order differ by 1e-7 each; AdamW's first steps divide by small numbers.
    assert all(value < 1e-5 for row in cells.values() for value in row.values()), "\n".join(table)
    assert sum(len(row) for row in cells.values()) == 13 * 6 + 7


class Noisy(LightningModule):
    """Losses tell every generator's state apart; the data are the same in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean() * random.random() * float(np.random.rand())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _noisy(version: int, kind: str, folder: str | None, resume_from: str | None) -> list[float]:
    torch.manual_seed(0)
    module = Noisy()
    seed = 10 * (resume_from is not None) + dist.get_rank()  # other ones when resuming, other ones on each process
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    callbacks: list[Callback] = []
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2))
        callbacks.append(ModelCheckpoint(folder, "end-{epoch}", save_top_k=-1, save_on_train_epoch_end=True))
    trainer = quiet_trainer(
        AccelFSDPStrategy(fsdp_version=version, state_dict_type=kind),
        dist.get_world_size(),
        max_epochs=2,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
    )
    data = TensorDataset(torch.ones(5 * dist.get_world_size(), 4))
    loader = DataLoader(data, 1, sampler=DistributedSampler(data))
    trainer.fit(module, loader, ckpt_path=resume_from, weights_only=True if resume_from else None)
    return module.losses


def test_dropout_goes_on_as_it_would_have(tmp_path: Path) -> None:
    """Random states are each process's own, as Accelerate keeps them: torch, Python, NumPy."""
    for version, kind in ((1, "full_state_dict"), (2, "sharded_state_dict")):
        folder = tmp_path / f"{version}"
        whole = run_on_ranks(2, _noisy, version, kind, str(folder), None)
        assert whole[0] != whole[1]
        for name, num_left in (("end-epoch=0.ckpt", 5), ("step=4.ckpt", 6), ("step=6.ckpt", 4)):
            resumed = run_on_ranks(2, _noisy, version, kind, None, str(folder / name))
            for found, expected in zip(resumed, whole, strict=True):
                assert found == expected[-num_left:], (version, name)


def test_other_numbers_of_processes_start_from_new_random_states(tmp_path: Path) -> None:
    run_on_ranks(2, _noisy, 2, "full_state_dict", str(tmp_path), None)
    [losses] = run_on_ranks(1, _noisy, 2, "full_state_dict", None, str(tmp_path / "end-epoch=0.ckpt"))
    assert len(losses) == 5


def _scale(which: str, save_to: str | None, resume_from: str | None) -> float:
    plugins: list[Any] = []
    strategy: Any = AccelFSDPStrategy(state_dict_type="full_state_dict", fsdp_version=2)
    if which == PLAIN:
        strategy = SingleDeviceStrategy("cpu")
        plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    precision: Any = {} if plugins else {"precision": "16-mixed"}
    trainer: Trainer = quiet_trainer(strategy, 1, max_steps=1, plugins=plugins, **precision)
    loader = DataLoader(dataset(1), 2)
    trainer.fit(
        TinyModule(Case(), Outcome()), loader, ckpt_path=resume_from, weights_only=True if resume_from else None
    )
    scaler = cast("torch.amp.GradScaler", cast("Any", trainer.precision_plugin).scaler)
    if save_to is not None:
        scaler.update(new_scale=128.0)  # not the value a new one starts with
        trainer.save_checkpoint(save_to)
    return scaler.get_scale()


def test_plain_lightning_and_the_strategy_find_each_others_scaler(tmp_path: Path) -> None:
    """Lightning keeps the scaler's state under its plugin's class name, and ours is another class."""
    for saved_by, loaded_by in ((PLAIN, "fsdp2"), ("fsdp2", PLAIN)):
        path = str(tmp_path / saved_by)
        run_on_ranks(1, _scale, saved_by, path, None)
        assert run_on_ranks(1, _scale, loaded_by, None, path) == [128.0]
