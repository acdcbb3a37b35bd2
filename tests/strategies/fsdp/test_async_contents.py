"""An asynchronous checkpoint holds the state of its step, whatever writes to weights and state before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.checkpoint_contents import assert_equal, everything_in
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.late_saves import late_saves
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


class _Writes(Callback):
    """Saves after some batches, and writes to weights and state by ``data`` wherever they are sharded."""

    def __init__(self, folder: str, everywhere: bool) -> None:
        self.folder, self.everywhere, self.num_batches = folder, everywhere, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.num_batches += 1
        if self.num_batches in (2, 5):
            trainer.save_checkpoint(f"{self.folder}/{self.num_batches}")
            self._write(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._write(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.everywhere:
            return
        for parameter in module.parameters():
            _local(parameter).mul_(1.01)
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                torch._foreach_mul_(
                    [_local(one) for one in state.values() if isinstance(one, Tensor) and one.ndim], 0.9
                )


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data


class _Manual(TinyModule):
    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class _Overflowing(TinyModule):
    """The scaler leaves out every other step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx % 2 else 1.0)


KINDS: dict[str, tuple[type[TinyModule], dict[str, Any], bool]] = {
    "automatic": (TinyModule, {}, False),
    "written": (TinyModule, {"gradient_clip_val": 0.1}, True),
    "manual": (_Manual, {}, True),
    "skipped": (_Overflowing, {"precision": "16-mixed"}, True),
    "accumulated": (TinyModule, {"accumulate_grad_batches": 3, "max_epochs": 3}, True),
}


def _train(engine: str, form: str, kind: str, folder: str) -> list[str]:
    make, options, everywhere = KINDS[kind]

    def fit(name: str, *, in_background: bool) -> None:
        strategy = AccelFSDPStrategy(async_save=in_background, state_dict_type=form, **ENGINES[engine])
        callback = _Writes(f"{folder}/{name}", everywhere)
        settings: dict[str, Any] = {"max_epochs": 2, **options}
        trainer = quiet_trainer(strategy, 2, callbacks=[callback], **settings)
        trainer.fit(make(Case(optimizer="adamw"), Outcome()), rank_loader(2))

    fit("now", in_background=False)
    with late_saves() as saved:
        fit("later", in_background=True)
    return saved


@pytest.mark.core("automatic-fsdp2-sharded", "written-fsdp1_orig_params-sharded", "skipped-fsdp1-full")
@pytest.mark.parametrize("form", ["sharded_state_dict", "full_state_dict"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.machines) if kind == "accumulated" else kind for kind in KINDS]
)
def test_a_checkpoint_is_of_its_step(kind: str, engine: str, form: str, tmp_path: Path) -> None:
    saved = run_on_ranks(2, _train, engine, form, kind, str(tmp_path))[0]
    assert len(saved) >= 2
    for name in ("2", "5"):
        assert_equal(everything_in(tmp_path / "later" / name), everything_in(tmp_path / "now" / name))
