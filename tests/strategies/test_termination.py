"""SIGTERM at any moment: all processes leave at the same batch, whoever was told, and can train again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from accelight.strategies.common.signals import mark_terminated, terminated
from accelight.strategies.upstream.lightning import _ChildProcessObserver
from tests.ranks import run_on_ranks
from tests.scripts import run_script, wait_for
from tests.strategies.oracle import (
    NUM_MICRO_BATCHES,
    Case,
    Outcome,
    TinyModule,
    quiet_trainer,
    rank_loader,
    strategy_named,
)

ENGINES = ["fsdp1", "fsdp2", "zero2", "zero3"]


class Told(Callback):
    """Sends itself SIGTERM at one moment, and counts the batches that each loop has ended."""

    def __init__(self, ranks: list[int], hook: str, batch: int) -> None:
        self.ranks, self.hook, self.batch = ranks, hook, batch
        self.ended = {"train": 0, "validation": 0, "test": 0, "predict": 0}
        for name in ("train", "validation", "test", "predict"):
            setattr(self, f"on_{name}_batch_start", self._listener(name, "start"))
            setattr(self, f"on_{name}_batch_end", self._listener(name, "end"))

    def _listener(self, loop: str, moment: str) -> Any:
        def listen(*args: Any, **_: Any) -> None:
            if moment == "end":
                self.ended[loop] += 1
            elif loop != "train":  # ZeRO evaluates a tiny model without collectives: a rank could be anywhere
                dist.barrier()
            batch = args[3 if moment == "start" else 4]
            if self.hook == f"{loop}_{moment}" and batch == self.batch and dist.get_rank() in self.ranks:
                os.kill(os.getpid(), signal.SIGTERM)

        return listen


def _leave(engine: str, ranks: list[int], run: str, hook: str, batch: int, folder: str) -> dict[str, int]:
    size = dist.get_world_size()
    handler = signal.getsignal(signal.SIGTERM)
    told, saved = Told(ranks, hook, batch), OnExceptionCheckpoint(folder, "left")
    more: dict[str, Any] = {"max_epochs": 1, "val_check_interval": 3}
    module = TinyModule(Case(), Outcome())
    if run != "fit":
        quiet_trainer(strategy_named(engine), size, max_epochs=1).fit(module, rank_loader(size))
    trainer = quiet_trainer(strategy_named(engine), size, callbacks=[told, saved], enable_checkpointing=True, **more)
    loaders = {"val_dataloaders": rank_loader(size)} if run == "fit" else {}
    with pytest.raises(SIGTERMException) as caught:
        getattr(trainer, run)(module, rank_loader(size), **loaders)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    if run == "fit":  # the checkpoint of that moment is whole: training goes on from it
        again = quiet_trainer(strategy_named(engine), size, **more)
        again.fit(module, rank_loader(size), rank_loader(size), ckpt_path=saved.ckpt_path)
        assert again.global_step == NUM_MICRO_BATCHES
    return told.ended


@pytest.mark.parametrize("ranks", [[1], [0], [0, 1]], ids=["one", "main", "all"])
@pytest.mark.parametrize(
    ("run", "hook", "batch", "num_batches"),
    [
        ("fit", "train_start", 1, 2),
        ("fit", "train_end", 1, 2),
        ("fit", "train_end", NUM_MICRO_BATCHES - 1, NUM_MICRO_BATCHES),
        ("fit", "validation_start", 2, 3),
        ("fit", "validation_end", NUM_MICRO_BATCHES - 1, NUM_MICRO_BATCHES),
        ("validate", "validation_end", 1, 3),
        ("test", "test_start", 0, 1),
        ("predict", "predict_end", NUM_MICRO_BATCHES - 1, NUM_MICRO_BATCHES),
    ],
)
@pytest.mark.core(
    "fsdp2-fit-validation_start",
    "fsdp2-test-test_start-0-1-one",
    "fsdp1-fit-validation_start-2-3-main",
    "zero2-fit-train_start-1-2-all",
    "zero3-validate-validation_end-1-3-main",
)
@pytest.mark.parametrize("engine", ENGINES)
def test_all_processes_leave_together(
    engine: str, run: str, hook: str, batch: int, num_batches: int, ranks: list[int], tmp_path: Path
) -> None:
    results = run_on_ranks(2, _leave, engine, ranks, run, hook, batch, str(tmp_path))
    loop = hook.split("_")[0]
    if hook == "train_end" and engine.startswith("fsdp") and num_batches < NUM_MICRO_BATCHES:
        num_batches += 1  # the ranks had agreed already in that batch, with which parameters it used
    assert [result[loop] for result in results] == [num_batches] * 2
    assert results[0] == results[1]


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            Path(sys.argv[2], f"{os.getpid()}").touch()
        return self.model(batch[0]).square().mean()
    def validation_step(self, batch):
        self.log("loss", self.model(batch[0]).square().mean(), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    import accelight.strategies
    data = DataLoader(TensorDataset(torch.randn(64, 64)), 2)
    trainer = Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=-1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), data, data)
"""


@pytest.mark.machines
@pytest.mark.parametrize("launcher", ["python", "torchrun", "by_hand"])
@pytest.mark.parametrize(
    "strategy",
    [
        "accel_fsdp2",
        *(pytest.param(f"accel_{one}", marks=pytest.mark.machines) for one in ("fsdp1", "deepspeed_stage_2")),
    ],
)
def test_a_plain_run_ends_on_all_processes(strategy: str, launcher: Any, tmp_path: Path) -> None:
    """With the status of a process that SIGTERM has ended: 0 would say that the training is complete."""

    def tell_all() -> None:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        for process in tmp_path.iterdir():
            os.kill(int(process.name), signal.SIGTERM)

    result = run_script(
        SCRIPT, strategy, str(tmp_path), launcher=launcher, timeout_s=60, while_running=tell_all, check=False
    )
    if launcher == "torchrun":  # which has a status and a traceback of its own for workers that failed
        assert result.returncodes == [1]
        assert re.search(r"exitcode *: 143", result.output)  # of the first to end; torchrun ends the other
    else:
        assert "Traceback" not in result.output
        assert result.returncodes == [143] * len(result.returncodes)


def _alone(engine: str) -> None:
    """One process is told by Lightning's own loop."""
    trainer = quiet_trainer(strategy_named(engine), 1, callbacks=[Told([0], "train_start", 1)], max_epochs=1)
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(1))
    assert caught.value.code == 143


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
def test_one_process_ends_with_the_same_status(engine: str) -> None:
    run_on_ranks(1, _alone, engine)


def test_a_process_that_was_told_is_no_reason_to_kill_the_others() -> None:
    """Lightning's launcher looks after the processes that it started; those may have ended before this one."""
    with subprocess.Popen(["sleep", "100"]) as main, subprocess.Popen(["sh", "-c", "exit 143"]) as child:
        child.wait()
        observer = _ChildProcessObserver(main.pid, [child], sleep_period=1_000)
        observer.start()
        mark_terminated(SIGTERMException())
        assert observer._run()  # it has nothing more to look after
        assert main.poll() is None
        main.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 128 + signal.SIGUSR1)])
def test_the_status_tells_the_signal(number: signal.Signals, status: int) -> None:
    with pytest.raises(SystemExit) as caught:
        raise terminated(number)
    assert caught.value.code == status
