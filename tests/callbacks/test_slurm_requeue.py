"""What is known of a SLURM job, and what is said when it cannot be requeued; tests/many_machines has real jobs."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from accelight.callbacks import TriggerEarlyStopping
from accelight.callbacks.trigger_early_stopping import requeue, slurm_job
from tests.scripts import run_script


def test_a_job_is_named_as_scontrol_names_it() -> None:
    assert slurm_job({}) is None
    assert slurm_job({"SLURM_JOB_ID": "12"}) == "12"
    assert slurm_job({"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}) == "12_3"


def test_without_scontrol_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    text = "SLURM job 12 could not be requeued: there is no `scontrol` on this node. `scontrol requeue 12`"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        requeue("12")


def test_signals_of_both_kinds_are_checked_by_their_argument() -> None:
    with pytest.raises(TypeError, match=r"requeue_on_signals must be a list of signals, got 'SIGUSR1'\."):
        TriggerEarlyStopping(requeue_on_signals="SIGUSR1")
    with pytest.raises(ValueError, match="requeue_on_signals: SIGKILL cannot be caught"):
        TriggerEarlyStopping(requeue_on_signals=[signal.SIGKILL])
    with pytest.raises(ValueError, match="stop_on_signals: there is no signal 'SIGNONE' on this system"):
        TriggerEarlyStopping(stop_on_signals=["SIGNONE"], requeue_on_signals=["SIGUSR1"])


_SIGNALLED = """
import os, signal, sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from accelight.callbacks import TriggerEarlyStopping
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

class Module(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)

strategy, *callbacks = sys.argv[1:]
made = AccelFSDPStrategy(fsdp_version=2) if strategy == "fsdp2" else AccelDeepSpeedStrategy(zero_stage=2)
trainer = Trainer(
    accelerator="cpu", devices=1, strategy=made, max_epochs=1, limit_train_batches=6, limit_val_batches=0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[TriggerEarlyStopping(requeue_on_signals=["SIGUSR1"]) for _ in callbacks],
)
try:
    trainer.fit(Module())
finally:
    print("steps", trainer.global_step, flush=True)
"""
_AS_A_TASK = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_NODELIST": "localhost",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


@pytest.mark.machines
@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_without_the_callback_the_signal_saves_nothing_and_says_so(strategy: str, tmp_path: Path) -> None:
    result = run_script(_SIGNALLED, strategy, env=_AS_A_TASK, cwd=tmp_path)
    assert "steps 6" in result.lines
    assert "Received SIGUSR1 and saved nothing: a sharded model cannot be saved in a signal handler." in result.output
    assert "TriggerEarlyStopping(requeue_on_signals=['SIGUSR1'])" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_job_that_slurm_does_not_take_back_ends_with_an_error_and_its_checkpoint(tmp_path: Path) -> None:
    env = {**_AS_A_TASK, "PATH": ""}
    result = run_script(_SIGNALLED, "fsdp2", "with the callback", env=env, cwd=tmp_path, check=False)
    assert result.returncodes == [1]
    assert "RuntimeError: SLURM job 12 could not be requeued: there is no `scontrol` on this node." in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["last-stopped-epoch=0-step=4.ckpt"]
