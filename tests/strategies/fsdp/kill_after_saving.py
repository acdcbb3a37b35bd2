"""Kills all ranks when ``trainer.save_checkpoint`` has returned on each of them, with ``async_save="process"``.

By hand, 50 times (some minutes: each time two processes are started that write)::

    python -m tests.strategies.fsdp.kill_after_saving 50
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint.process_save import SavingProcess
from tests.ranks import _PRELOAD
from tests.scripts import wait_for
from tests.slowness import slowness
from tests.strategies.fsdp.checkpoint_contents import files_of
from tests.strategies.fsdp.steps import AtStep
from tests.strategies.oracle import quiet_trainer

NUM_RANKS = 2
SAVED, EXPECTED = "saved", "expected"
_WIDTH, _NUM_LAYERS = 256, 8
_FOREVER_S = 1000.0

Moment = Callable[[Trainer, int, Path], None]
"""Given the Trainer, the rank and the folder: saves, and says so by `tell`."""


class Module(LightningModule):
    """No two of its weights are equal."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS)))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def process_of(trainer: Trainer) -> SavingProcess:
    """Return what writes for this rank."""
    strategy: Any = trainer.strategy
    process = strategy._checkpointer.saves.process
    assert isinstance(process, SavingProcess)
    return process


def wait_until_killed(rank: int, folder: Path, trainer: Trainer) -> None:
    """Tell that the moment has come."""
    path = folder / f".{rank}.pids"
    path.with_suffix(".tmp").write_text(json.dumps([os.getpid(), process_of(trainer).pid]))
    path.with_suffix(".tmp").rename(path)
    time.sleep(_FOREVER_S)


def save_in_the_foreground(trainer: Trainer, path: Path) -> None:
    """Save as without ``async_save``."""
    checkpointer: Any = trainer.strategy._checkpointer  # type: ignore[attr-defined]
    saves, checkpointer.saves = checkpointer.saves, None
    trainer.save_checkpoint(path)
    checkpointer.saves = saves


def when_saved(trainer: Trainer, rank: int, folder: Path) -> None:
    """Save; the moment is when that has returned."""
    save_in_the_foreground(trainer, folder / EXPECTED)
    trainer.save_checkpoint(folder / SAVED)
    wait_until_killed(rank, folder, trainer)


def fit(rank: int, folder: Path, version: int, moment: Moment, timeout_s: float = 300) -> None:
    """Train, until a moment after the second step."""
    strategy = AccelFSDPStrategy(
        fsdp_version=version,
        state_dict_type="sharded_state_dict",
        auto_wrap_policy="size_based_wrap",
        min_num_params=1000,
        async_save="process",
        timeout=timedelta(seconds=timeout_s),
    )
    callback = AtStep({2: lambda trainer: moment(trainer, rank, folder)})
    trainer = quiet_trainer(strategy, NUM_RANKS, max_steps=-1, callbacks=[callback])
    data = TensorDataset(torch.randn(1000, _WIDTH))
    loader = DataLoader(data, 1, sampler=DistributedSampler(data, num_replicas=NUM_RANKS, rank=rank))
    trainer.fit(Module(seed=version), loader)


def _train(rank: int, folder: str, version: int, moment: Moment, timeout_s: float) -> None:
    os.setsid()
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{NUM_RANKS}", LOCAL_WORLD_SIZE=f"{NUM_RANKS}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GROUP_RANK="0", TORCHELASTIC_RUN_ID="kill")
    sys.stderr = open(f"{folder}/.errors{rank}", "w")  # noqa: SIM115 (until it is killed)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/.store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=timeout_s),
    )
    fit(rank, Path(folder), version, moment, timeout_s)


def kill_all(folder: Path, version: int = 2, moment: Moment = when_saved, timeout_s: float = 300) -> list[int]:
    """Train, and kill all ranks with their process groups at a moment.

    Returns:
        The processes that write for the ranks; they may still do so.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, "tests.strategies.oracle"])
    ranks = [
        context.Process(target=_train, args=(rank, f"{folder}", version, moment, timeout_s))
        for rank in range(NUM_RANKS)
    ]
    files = [folder / f".{rank}.pids" for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + 120 * slowness()
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, "the moment did not come"
            assert all(rank.is_alive() for rank in ranks), (folder / ".errors0").read_text()[-3000:]
            time.sleep(0.001)
        pids = [json.loads(file.read_text()) for file in files]
        for own, _ in pids:
            os.killpg(own, signal.SIGKILL)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return [writer for _, writer in pids if writer is not None]


def wait_until_gone(writers: list[int]) -> None:
    """Wait until these processes have ended."""
    wait_for(lambda: not any(is_alive(pid) for pid in writers))


def is_alive(pid: int) -> bool:
    """Return whether a process still does something: one that nobody has asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_in(folder: Path) -> list[str]:
    """Return what is there but for the test's own files."""
    own = ".store", ".errors", *(f".{rank}.pids" for rank in range(NUM_RANKS))
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(own))


def check_complete(folder: Path, writers: list[int]) -> None:
    """Wait until the killed ranks' checkpoint is complete, and compare it with the one that they wrote themselves."""
    wait_until_gone(writers)
    assert left_in(folder) == [EXPECTED, SAVED]
    assert files_of(folder / SAVED) == files_of(folder / EXPECTED)


def kill_often(num_attempts: int) -> None:
    """Kill with both engines in turn; print how long the rest took."""
    for attempt in range(num_attempts):
        with tempfile.TemporaryDirectory() as folder:
            version = 1 + attempt % 2
            writers = kill_all(Path(folder), version)
            start, was_there = time.monotonic(), Path(folder, SAVED).exists()
            check_complete(Path(folder), writers)
            elapsed_s = time.monotonic() - start
        when = "before" if was_there else f"{elapsed_s:.1f} s after"
        print(f"{attempt + 1:3}: FSDP{version}, complete {when} the end of all ranks", flush=True)


if __name__ == "__main__":
    kill_often(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
