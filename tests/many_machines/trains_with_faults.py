"""Trains, and on one process does what is asked for at one batch; started by test_watchdog.py."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accelight.callbacks import Watchdog
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

BATCH = 20


class Data(Dataset[Tensor]):
    """Its worker waits for a lock that nobody gives back."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        if arguments.fault == "worker" and is_victim and index >= 2 * BATCH:
            time.sleep(10_000)
        return torch.full((8,), float(index % 7))


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(arguments.pause)
        if is_victim and batch_idx == BATCH:
            print(f"at batch {BATCH} on {rank}", flush=True)
            self.fail()
        return self.model(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        while arguments.fault == "hook" and is_victim and batch_idx == BATCH:
            pass

    def fail(self) -> None:
        if arguments.fault in ("stop", "kill", "term"):
            os.kill(os.getpid(), signal.SIGSTOP if arguments.fault == "stop" else signal.SIGKILL)
        while arguments.fault == "loop":
            pass
        if arguments.fault == "branch":
            dist.barrier()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Terminated(Callback):
    """Gets SIGTERM while `Watchdog` finds out who has ended: as from torchrun, but at a known moment."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if arguments.fault == "term":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()


parser = argparse.ArgumentParser()
parser.add_argument("strategy")
parser.add_argument("fault", choices=("none", "stop", "kill", "term", "loop", "branch", "worker", "cut", "hook"))
parser.add_argument("victim", type=int)
parser.add_argument("folder")
parser.add_argument("--on-hang", default="abort")
parser.add_argument("--limit", type=float, default=4.0)
parser.add_argument("--pause", type=float, default=0.02)
parser.add_argument("--steps", type=int, default=2 * BATCH)
arguments = parser.parse_args()
rank = int(os.environ["RANK"])
is_victim = rank == arguments.victim
watchdog: Any = Watchdog(
    arguments.on_hang, min_limit_s=arguments.limit, every_s=0.25, first_limit_s=60, dirpath=arguments.folder
)
strategy: Any = "ddp"
if arguments.strategy.startswith("zero"):
    strategy = AccelDeepSpeedStrategy(zero_stage=int(arguments.strategy[-1]))
elif arguments.strategy.startswith("fsdp"):
    strategy = AccelFSDPStrategy(fsdp_version=int(arguments.strategy[-1]))
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=strategy,
    use_distributed_sampler=False,
    max_steps=arguments.steps,
    callbacks=[Terminated(), watchdog],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(Data(), batch_size=2, num_workers=int(arguments.fault == "worker")))
print(f"done {rank}", flush=True)
