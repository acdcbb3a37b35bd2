"""Trains for some steps, and prints each loss; started by test_two_hosts.py."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import TriggerEarlyStopping
from accelight.state import PartialState, gather_object, set_trigger
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy


class Module(LightningModule):
    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        self.pause_s = pause_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(f"step {self.trainer.global_step} loss {outputs['loss'].item()!r}", flush=True)
        if PartialState().process_index == 1 and self.trainer.global_step == arguments.stop_at:
            set_trigger()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


parser = argparse.ArgumentParser()
parser.add_argument("strategy", choices=("fsdp1", "fsdp2", "zero2"))
parser.add_argument("--save", default="")
parser.add_argument("--stop-at", type=int, default=0)
parser.add_argument("--timeout", type=float, default=120)
parser.add_argument("--pause", type=float, default=0.0)
arguments = parser.parse_args()
timeout = timedelta(seconds=arguments.timeout)
strategy: Any = (
    AccelDeepSpeedStrategy(zero_stage=2, timeout=timeout)
    if arguments.strategy == "zero2"
    else AccelFSDPStrategy(
        fsdp_version=int(arguments.strategy[-1]), state_dict_type="sharded_state_dict", timeout=timeout
    )
)
torch.manual_seed(0)
inputs = torch.randn(960, 8)
trainer = Trainer(
    accelerator="cpu",
    strategy=strategy,
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    max_epochs=1,
    callbacks=[TriggerEarlyStopping(lag=False)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(arguments.pause), DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8))
print("gathered", gather_object([PartialState().process_index]), flush=True)
if arguments.save:
    trainer.save_checkpoint(arguments.save)
    print("saved", flush=True)
