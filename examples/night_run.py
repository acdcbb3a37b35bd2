"""A run that looks after itself: a NaN, a frozen process and a flipped bit, and the weights of a run without them.

    python examples/night_run.py    # two CPU processes; half a minute

It starts torchrun twice with this script, without faults and with them. Each fault ends the run on both processes with
a message that names it: `StepGuard` finds the NaN in a gradient, `Watchdog` the process that no longer moves,
`ReplicaCheck` the flipped bit. torchrun starts the script again, which goes on from the newest checkpoint. At the end
both runs have the same weights.
"""

from __future__ import annotations

import argparse
import os

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo_output/night_run", help="folder for checkpoints and stacks")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--faults", action="store_true", help="of a process that torchrun has started")
    arguments = parser.parse_args()

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import ReplicaCheck, StepGuard, Watchdog
from accelight.strategies import AccelFSDPStrategy, ParallelismConfig, newest_checkpoint

STEPS_PER_EPOCH = 8


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_end(self) -> None:
        squares = torch.stack([parameter.detach().double().square().sum() for parameter in self.parameters()])
        total = getattr(squares, "full_tensor", lambda: squares)().sum().item()
        self.print(f"step {self.global_step}, sum of squared weights {total:.12f}")


class Faults(Callback):
    """What can happen in a night, each once: on process 1, and in another start of the script."""

    def __init__(self) -> None:
        self.start = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) if os.environ["RANK"] == "1" else -1

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if self.start == 1 and trainer.global_step == 3 * STEPS_PER_EPOCH + 4:
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        if self.start == 0 and trainer.global_step == 1 * STEPS_PER_EPOCH + 4:
            loss.data.mul_(torch.nan)  # what a bad device, or a bad batch, does
            loss.register_hook(lambda gradient: gradient * torch.nan)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.start == 2 and trainer.global_step == 5 * STEPS_PER_EPOCH + 4:
            weight: Any = next(module.parameters())
            weight.to_local().data.view(torch.int32)[0, 0] ^= 1 << 12


def train(arguments: argparse.Namespace) -> None:
    inputs = torch.randn(16 * STEPS_PER_EPOCH, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = Trainer(
        strategy=AccelFSDPStrategy(
            fsdp_version=2, parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=1)
        ),
        accelerator="cpu",
        devices=2,
        max_epochs=arguments.epochs,
        callbacks=[
            Watchdog(on_hang="abort", min_limit_s=3, every_s=0.5, dirpath=f"{arguments.output}/watchdog"),
            StepGuard(max_consecutive_skips=0),
            ReplicaCheck(every_n_steps=2),
            ModelCheckpoint(f"{arguments.output}/checkpoints", save_top_k=-1, save_on_train_epoch_end=True),
            *([Faults()] if arguments.faults else []),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = newest_checkpoint(f"{arguments.output}/checkpoints")
    trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path=checkpoint)


def launch(output: str, *options: str) -> str:
    """Run this script under torchrun, and return the last line that it has printed."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=5"]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else a new start meets addresses of the last one
    options = (__file__, f"--output={output}", *options)
    run = subprocess.run([*command, *options], env=env, capture_output=True, text=True)
    for line in run.stderr.splitlines():
        if (
            line.startswith("Watchdog:")
            or "StepGuard skipped optimizer" in line
            or "[rank0]: RuntimeError: Rep" in line
        ):
            print(f"  {line}")
    if run.returncode:
        sys.exit(run.stderr)
    return run.stdout.splitlines()[-1]


def main(arguments: argparse.Namespace) -> None:
    if "RANK" in os.environ:
        train(arguments)
        return
    found = {}
    for name, options in {"without faults": [], "with faults": ["--faults"]}.items():
        print(f"A run {name}:")
        folder = Path(arguments.output) / name.replace(" ", "_")
        found[name] = launch(str(folder), f"--epochs={arguments.epochs}", *options)
        print(f"  {found[name]}")
    print(f"The same weights: {len(set(found.values())) == 1}")


if __name__ == "__main__":
    main(arguments)
