"""The callbacks on CUDA with NCCL: one stop on all processes, logged norms, exact metrics, merged checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import ExactEvaluation, GradNormMonitor, MergeShardedCheckpoint, TriggerEarlyStopping
from accelight.state import PartialState, set_trigger
from accelight.strategies import AccelFSDPStrategy
from tests.gpu import ACCELERATOR, NUM_DEVICES
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, build_model, quiet_trainer, rank_loader, train_plain

pytestmark = pytest.mark.gpu

STOPS_AFTER = 3
WRAP: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


class Listener(Callback):
    """Notes the logged norm of each step, and says stop on the last process."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.norms.append(float(trainer.callback_metrics["grad_norm"]))
        if trainer.global_step == STOPS_AFTER and PartialState().is_last_process:
            set_trigger()


def _stopped(version: int, folder: str) -> tuple[int, list[float], dict[str, Tensor]]:
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type="sharded_state_dict", async_save=True, **WRAP)
    listener = Listener()
    merged = MergeShardedCheckpoint(f"{folder}/merged")
    trainer = quiet_trainer(
        strategy,
        NUM_DEVICES,
        accelerator=ACCELERATOR,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[
            *(GradNormMonitor(), listener, TriggerEarlyStopping(), merged),
            ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=1),
        ],
    )
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(NUM_DEVICES))
    trainer.strategy.barrier()
    return trainer.global_step, listener.norms, load_file(f"{folder}/merged/model.safetensors")


@pytest.mark.parametrize("version", [1, 2])
def test_all_stop_at_one_step_and_the_checkpoint_is_merged(version: int, tmp_path: Path) -> None:
    outcomes = run_on_ranks(NUM_DEVICES, _stopped, version, str(tmp_path), init_group=False)
    expected = train_plain(Case(clip_norm=0.5), NUM_DEVICES)
    [num_steps] = {steps for steps, _, _ in outcomes}
    assert STOPS_AFTER <= num_steps <= STOPS_AFTER + 1
    for _, norms, merged in outcomes:
        # fp32 sums of CUDA kernels have another order than those of the CPU
        assert norms == pytest.approx(expected.grad_norms[:num_steps], rel=1e-4)
        assert sorted(merged) == sorted(f"model.{name}" for name in build_model().state_dict())


class _Counting(TinyModule):
    """Logs numbers whose sums are exact in any order."""

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.model(batch[0])
        self.log("mean", batch[1].mean(), batch_size=len(batch[1]))
        self.log("sum", batch[1].sum(), reduce_fx="sum")


def _evaluated(num_samples: int) -> tuple[float, float]:
    data = TensorDataset(torch.zeros(num_samples, 5), torch.arange(float(num_samples)))
    strategy = AccelFSDPStrategy(fsdp_version=2, **WRAP)
    trainer = quiet_trainer(strategy, NUM_DEVICES, accelerator=ACCELERATOR, callbacks=[ExactEvaluation()])
    [metrics] = trainer.validate(_Counting(Case(), Outcome()), DataLoader(data, 1), verbose=False)
    return metrics["mean"], metrics["sum"]


def test_no_sample_counts_twice() -> None:
    num_samples = 2 * NUM_DEVICES + 1
    outcomes = run_on_ranks(NUM_DEVICES, _evaluated, num_samples, init_group=False)
    assert outcomes == [((num_samples - 1) / 2, sum(range(num_samples)))] * NUM_DEVICES
