"""What the oracle grid (``test_fsdp_grid.py``) leaves out: other optimizers, one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from accelight.state import GradientAccumulationPlugin, reset_state
from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import (
    NUM_MICRO_BATCHES,
    Case,
    Outcome,
    SkippingModule,
    assert_same,
    quiet_trainer,
    rank_loader,
    train_plain,
    train_sharded,
)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_process_trains_as_a_plain_loop(engine: str) -> None:
    case = Case(accumulate=3, clip_norm=0.5)
    assert_same(run_on_ranks(1, train_sharded, case, ENGINES[engine])[0], train_plain(case, 1))


@pytest.mark.core("fsdp2-2", "fsdp1-3")
@pytest.mark.parametrize("epochs", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_windows_go_on_over_the_end_of_an_epoch(engine: str, epochs: int) -> None:
    """Seven micro-batches an epoch, three a window: two epochs leave two over, three fill the seventh window."""
    case = Case(accumulate=3, clip_norm=0.5, epochs=epochs, sync_with_dataloader=False, validate_every=5)
    options = {**ENGINES[engine], "reshard_during_accumulation": epochs == 2}
    assert_same(run_on_ranks(2, train_sharded, case, options)[0], train_plain(case, 2))


@pytest.mark.parametrize("skip_at", [3, 4, 5])
def test_windows_go_on_where_a_hook_has_ended_an_epoch(skip_at: int) -> None:
    case = Case(accumulate=3, clip_norm=0.5, sync_with_dataloader=False, skip_at=skip_at)
    assert_same(run_on_ranks(2, train_sharded, case, ENGINES["fsdp2"])[0], train_plain(case, 2))


class _Scheduled(SkippingModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _over_epochs(case: Case, ckpt_path: str | None = None, save: str | None = None) -> tuple[int, int, Any]:
    plugin = GradientAccumulationPlugin(num_steps=case.accumulate, sync_with_dataloader=False)
    strategy = AccelFSDPStrategy(gradient_accumulation=plugin, state_dict_type="full_state_dict", **ENGINES["fsdp2"])
    trainer, module = quiet_trainer(strategy, 2, max_epochs=case.epochs), _Scheduled(case, Outcome())
    trainer.fit(module, rank_loader(2), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
    return trainer.global_step, scheduler.last_epoch, strategy.lightning_module_state_dict()


@pytest.mark.parametrize("skip_at", [3, 5])
def test_the_schedule_counts_steps_alone_where_windows_go_on(skip_at: int) -> None:
    global_step, scheduled, _ = run_on_ranks(2, _over_epochs, Case(3, skip_at=skip_at))[0]
    assert scheduled == global_step == (skip_at + NUM_MICRO_BATCHES) // 3


def _resume_over_epochs(path: str) -> tuple[int, int, Any]:
    _over_epochs(Case(3, epochs=1), save=path)
    reset_state()
    return _over_epochs(Case(3), ckpt_path=path)


def test_a_resume_begins_a_window_anew_and_drops_the_open_one(tmp_path: Path) -> None:
    """Seven micro-batches in windows of three leave one over, whose gradients are in no checkpoint."""
    global_step, _, weights = run_on_ranks(2, _resume_over_epochs, f"{tmp_path}/last.ckpt")[0]
    expected = train_plain(Case(3, sync_with_dataloader=False, skip_at=6), 2)
    assert global_step == expected.global_step
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(weights[f"model.{name}"], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_adamw(engine: str) -> None:
    case = Case(accumulate=2, clip_norm=0.5, optimizer="adamw")
    assert_same(run_on_ranks(2, train_sharded, case, ENGINES[engine])[0], train_plain(case, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fused_optimizer_under_fp16_steps_as_another(engine: str) -> None:
    """Its own unscaling would come after clipping, and would look for overflows in one rank's shards alone."""
    fused, plain = (
        run_on_ranks(2, train_sharded, Case(2, clip_norm=0.5, optimizer=name, precision="16-mixed"), ENGINES[engine])
        for name in ("fused_adamw", "adamw")
    )
    assert any(math.isinf(norm) for norm in plain[0].grad_norms), "no step overflowed: the case shows too little"
    assert fused[0].grad_norms == pytest.approx(plain[0].grad_norms, rel=1e-5)
    assert fused[0].losses == pytest.approx(plain[0].losses, rel=1e-5)
