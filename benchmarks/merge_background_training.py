"""The training that ``merge-background`` measures, on one of its processes."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks.merge_sharded_checkpoint import MergeJob, MergeOptions, MergeQueue
from accelight.strategies import AccelFSDPStrategy
from benchmarks import results

_WINDOW_STEPS, _NUM_WINDOWS, _SIDE = 8, 12, 1024


class Model(LightningModule):
    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        num_layers = max(1, num_bytes // (_SIDE * _SIDE * 4))
        self.layers = nn.Sequential(*[nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(num_layers)])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Measure(Callback):
    """Times steps, and keeps a merge going in every other window of them."""

    def __init__(self, folder: Path) -> None:
        self.job = MergeJob(folder / "checkpoint", folder / "merged")
        self.queue: MergeQueue | None = None
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.blocked: list[float] = []
        self.num_merges, self.started = 0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.job.checkpoint, weights_only=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        merging = batch_idx // _WINDOW_STEPS % 2 == 1
        if trainer.is_global_zero:
            self.keep_merging(merging)
        trainer.strategy.barrier()
        self.started = time.perf_counter()

    def keep_merging(self, merging: bool) -> None:
        """Start a merge if none runs; or let the last one end."""
        if self.queue is not None and (not merging or not self.queue.needs(self.job.checkpoint)):
            self.queue.drain()
            if self.queue.jobs[0].error is not None:
                raise self.queue.jobs[0].error
            self.queue, self.num_merges = None, self.num_merges + 1
        if merging and self.queue is None:
            self.queue = MergeQueue(MergeOptions(("--threads=1",)))
            self.queue.submit(MergeJob(self.job.checkpoint, self.job.output))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        window, step = divmod(batch_idx, _WINDOW_STEPS)
        if window >= 2 and step:  # the first windows and the first step of each warm up
            self.seconds[window % 2 == 1].append(time.perf_counter() - self.started)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.keep_merging(False)
            self.blocked = [self.merge_while_all_wait() for _ in range(5)]
        trainer.strategy.barrier()

    def merge_while_all_wait(self) -> float:
        start = time.perf_counter()
        self.keep_merging(True)
        self.keep_merging(False)
        self.num_merges -= 1
        return time.perf_counter() - start


def train(folder: Path, num_bytes: int) -> None:
    """Train and measure, on one of the processes."""
    data = TensorDataset(torch.randn(2 * 16 * _WINDOW_STEPS * _NUM_WINDOWS, _SIDE))
    measure = Measure(folder)
    trainer = Trainer(
        strategy=AccelFSDPStrategy(fsdp_version=2, state_dict_type="sharded_state_dict"), accelerator="cpu", devices=2,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[measure],
    )  # fmt: skip
    trainer.fit(Model(num_bytes), DataLoader(data, 16))
    if not trainer.is_global_zero:
        return
    size = sum(file.stat().st_size for file in measure.job.checkpoint.glob("*.distcp"))
    print(f"{size / 1e6:.0f} MB merged {measure.num_merges} times; {len(measure.seconds[True])} steps of each kind")
    medians = {merging: statistics.median(seconds) for merging, seconds in measure.seconds.items()}
    for merging, seconds in measure.seconds.items():
        low, _, high = (1000 * value for value in statistics.quantiles(seconds, n=4))
        print(
            f"  {'while merging' if merging else 'no merge':15} median step {medians[merging] * 1000:7.1f} ms   "
            f"quartiles {low:.1f} to {high:.1f} ms   ratio {medians[merging] / medians[False]:.2f}"
        )
    sides = {"while accelight merges": measure.seconds[True], "no merge": measure.seconds[False]}
    results.keep_panels("merge-background", {f"A step of FSDP2, 2 processes, {size / 1e6:.0f} MB": sides})
    num_steps = _WINDOW_STEPS * _NUM_WINDOWS // 2  # in which merges ran
    added, blocked = (
        (medians[True] - medians[False]) * num_steps / measure.num_merges,
        statistics.median(measure.blocked),
    )
    print(f"  one merge adds {added * 1000:.0f} ms to training; with background=False it adds {blocked * 1000:.0f} ms")


if __name__ == "__main__":
    train(Path(os.environ["ACCELIGHT_BENCH_SCRATCH"]), int(float(os.environ.get("ACCELIGHT_BENCH_MB", "200")) * 1e6))
