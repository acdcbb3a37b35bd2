"""What the tests of both engines' checkpoints in an object store share: data, and saves that are killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.object_store import BUCKET

BATCHES, BATCH = 6, 12
URL = f"s3://{BUCKET}"


def data() -> DataLoader[Tensor]:
    samples = torch.randn(BATCHES * BATCH, 8, generator=torch.Generator().manual_seed(2))
    return DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # sums over ranks in another order


def two_best(folder: str) -> ModelCheckpoint:
    """Return a callback that keeps the last checkpoint and the best two."""
    return ModelCheckpoint(
        folder, filename="{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=2
    )


# ---------------------------------------------------------------------- kills
_SAVES = """
import importlib, os, sys
module, rank, folder, url = sys.argv[1:]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", DS_ACCELERATOR="cpu")
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=2)
importlib.import_module(module).save_without_end(url)
"""


class SaveEachStep(Callback):
    """Says after each step what it has saved."""

    def __init__(self, url: str) -> None:
        self._url = url

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        trainer.save_checkpoint(self._url)
        print("saved", trainer.global_step, flush=True)


def kill_saves(module: str, folder: Path, num_times: int, load: Callable[[str], dict[str, Tensor]]) -> str:
    """Kill ranks that save without a pause, and look at the checkpoint that is there.

    Args:
        module: Its ``save_without_end(url)`` trains a model whose weights are all the number of steps, with
            `SaveEachStep`: a checkpoint of two moments shows.
        folder: For the ranks' meetings.
        num_times: How often. Rank 0, rank 1 and both are killed in turn.
        load: Returns the weights at a URL.

    Returns:
        The URL.
    """
    generator = torch.Generator().manual_seed(4)
    url = f"{URL}/killed.ckpt"
    for number in range(num_times):
        which = [(0,), (1,), (0, 1)][number % 3]
        saved = _kill_once(module, folder / str(number), url, float(torch.rand((), generator=generator)), which)
        steps = {float(number) for one in load(url).values() for number in one.unique()}
        assert len(steps) == 1, f"a checkpoint of {steps}"
        assert int(max(steps)) >= max([1, *saved])
    return url


def _kill_once(module: str, folder: Path, url: str, after_s: float, which: tuple[int, ...]) -> list[int]:
    """Return the steps that rank 0 has saved after its first one."""
    folder.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SAVES, module, str(rank), str(folder), url],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    output = processes[0].stdout
    assert output is not None
    try:
        assert any(line.startswith("saved") for line in output), "nothing was saved"
        time.sleep(after_s)
        for rank in which:
            processes[rank].kill()
        time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [int(line.split()[1]) for line in output if line.startswith("saved")]
