"""A small student learns from a large teacher: two engines of DeepSpeed, each under a plugin of its own.

    python examples/distill_deepspeed.py                 # two CPU processes
    python examples/distill_deepspeed.py --devices 4

The teacher is partitioned over the processes by ZeRO-3 and only infers; the student trains under ZeRO-2, with the
Trainer's accumulation and clipping.
"""

from __future__ import annotations

import argparse
from typing import Any

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps")
    arguments = parser.parse_args()

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import PartialState
from accelight.strategies import AccelDeepSpeedStrategy, DeepSpeedPlugin

INPUTS, CLASSES, TEMPERATURE = 16, 4, 2.0


def make_teacher() -> nn.Module:
    """The same weights on every process; yours come from a file."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(INPUTS, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, CLASSES))


class Distillation(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(INPUTS, 64), nn.GELU(), nn.Linear(64, CLASSES))
        self.teacher: list[
            Any
        ] = []  # a list keeps it out of this module's parameters, which the student's engine trains

    def setup(self, stage: str) -> None:
        if not self.teacher:
            strategy: Any = self.trainer.strategy
            self.teacher = [strategy.prepare_model(make_teacher(), plugin="teacher")]  # no optimizer: it only infers

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = log_softmax(self.teacher[0](batch[0]) / TEMPERATURE, dim=-1)
        found = log_softmax(self.student(batch[0]) / TEMPERATURE, dim=-1)
        return kl_div(found, wanted, log_target=True, reduction="batchmean") * TEMPERATURE**2

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        same = self.student(batch[0]).argmax(-1) == self.teacher[0](batch[0]).argmax(-1)
        self.log("agreement", same.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(arguments: argparse.Namespace) -> None:
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    trainer = Trainer(
        strategy=AccelDeepSpeedStrategy(plugins),  # the first trains the module
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_steps=arguments.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=1_000_000,  # validated before and after, below
    )
    inputs = torch.randn(4096, INPUTS, generator=torch.Generator().manual_seed(0))
    train = DataLoader(TensorDataset(inputs[512:]), batch_size=32, shuffle=True)
    held_out = DataLoader(TensorDataset(inputs[:512]), batch_size=32)
    module = Distillation()
    [before] = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, train)
    [after] = trainer.validate(module, held_out, verbose=False)

    state = PartialState()
    held = sum(p.ds_tensor.numel() for p in module.teacher[0].module.parameters())  # by this process
    whole = sum(p.numel() for p in make_teacher().parameters())
    state.print(f"teacher: {held:,} of {whole:,} parameters on each of {state.num_processes} processes")
    state.print(
        f"student and teacher agree on {before['agreement']:.0%} of new inputs before, {after['agreement']:.0%} after"
    )
    assert after["agreement"] > before["agreement"] + 0.2 or arguments.steps < 100, "the student has learnt too little"


if __name__ == "__main__":
    main(arguments)
