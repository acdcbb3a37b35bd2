"""What training really takes: the allocator counts, on processes that train."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from tests.strategies.oracle import quiet_trainer

SOURCE = Path(__file__).with_name("counting_allocator.cpp")
NUM_STEPS = 4
NUM_COUNTED = 3
"""Steps at the end, which are alike. The least of them counts: now and then, on a busy machine, gloo frees late."""


@dataclass(frozen=True)
class Measured:
    """Of one process, in bytes."""

    peak_bytes: int
    """The most that was held in a step."""
    init_peak_bytes: int
    """The most that was held before the first step."""
    steady_state_bytes: int
    """What was held between steps."""


def build_allocator(folder: Path) -> Path:
    """Compile the allocator that counts; takes some seconds."""
    home, library = Path(torch.__path__[0]), folder / "counting_allocator.so"
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", str(SOURCE), "-o", str(library)]
    subprocess.run([*command, f"-L{home / 'lib'}", "-lc10", f"-Wl,-rpath,{home / 'lib'}"], check=True)
    return library


def measure(
    library: str,
    make_module: Callable[[], LightningModule],
    make_batch: Callable[[], Any],
    strategy: Any,
    world_size: int,
    num_steps: int = NUM_STEPS,
    **trainer: Any,
) -> Measured:
    """Train some steps inside one of several processes, and say what tensors took."""
    counting = ctypes.CDLL(library)
    for name in ("held_bytes", "highest_bytes"):
        getattr(counting, name).restype = ctypes.c_int64
    gc.collect()
    counting.install()
    before = counting.held_bytes()
    counting.begin_again()
    highest: list[int] = []
    resting: list[int] = []
    step = strategy.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:  # no callback: hooks of the user's change what FSDP1 gathers
        highest.append(counting.highest_bytes() - before)
        resting.append(counting.held_bytes() - before)
        counting.begin_again()
        return step(*args, **kwargs)

    strategy.training_step = training_step
    module, batch, window = make_module(), make_batch(), trainer.get("accumulate_grad_batches", 1)
    size = next(iter(batch.values()) if isinstance(batch, dict) else iter([batch])).shape[0]
    loader: Any = DataLoader(range(size * num_steps * window), size, collate_fn=lambda _: batch)  # type: ignore[arg-type]
    fit = quiet_trainer(strategy, world_size, max_steps=num_steps, use_distributed_sampler=False, **trainer)
    fit.fit(module, loader)
    highest.append(counting.highest_bytes() - before)
    return Measured(_of_a_step(highest[1:], window), highest[0], _of_a_step(resting, window))


def _of_a_step(of_batches: list[int], window: int) -> int:
    """Return what a step takes, whose most counts."""
    steps = [max(of_batches[start : start + window]) for start in range(0, len(of_batches), window)]
    return min(steps[-NUM_COUNTED:])
