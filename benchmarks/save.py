"""``save``: how long training stands still for a checkpoint, sharded, in the background and as safetensors.

``ACCELIGHT_BENCH_GB`` sets the size of the weights (AdamW's state is twice that beside it), ``ACCELIGHT_BENCH_DIR`` the
folder on the disk that is to be measured, with room for ten times as much::

    python -m benchmarks save                                   # 0.2 GB of weights, a minute or two
    ACCELIGHT_BENCH_GB=2 python -m benchmarks save

Two gloo processes train with each engine, and two with Lightning's strategy, all alive at once; each way saves in turn,
between two steps, into a new name. Ratios are those within a round, with intervals of 95 % by bootstrap (`paired`).
Every side ends with fsync, except those in the background, which are waited for outside of the measurement. DCP is
given what torch's ``get_state_dict`` returns of FSDP1, within the measurement, and of FSDP2 the strategy's state.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import paired, results
from benchmarks.turns import END, alive, in_rounds, turn

_NUM_ROUNDS = int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "9"))
_NUM_RANKS = 2
_WIDTH = 1024
_LIGHTNING = "fsdp1 Lightning's FSDPStrategy"
_ROWS = (  # ours, its peer, target; DCP alone writes no metadata and gives nothing its name atomically
    ("fsdp1 sharded", _LIGHTNING, 1.0),
    ("fsdp1 sharded", "fsdp1 DCP save", 1.0),
    ("fsdp2 sharded", "fsdp2 DCP save", 1.0),
    ("fsdp1 async_save", _LIGHTNING, 0.3),
    ("fsdp1 async_save", "fsdp1 DCP save", 0.05),
    ("fsdp1 async_save", "fsdp1 DCP async_save", None),
    ("fsdp2 async_save", "fsdp2 DCP save", 0.05),
    ("fsdp2 async_save", "fsdp2 DCP async_save", None),
    ("fsdp1 async_save=process", "fsdp1 async_save", None),
    ("fsdp2 async_save=process", "fsdp2 async_save", None),
    ("fsdp1 save_safetensors", "fsdp1 sharded, weights alone", 1.0),
    ("fsdp2 save_safetensors", "fsdp2 sharded, weights alone", 1.0),
)


_SIDES = {
    "Lightning": {_LIGHTNING: "plain"},
    **{
        engine: {
            f"{engine} {way}": way
            for way in (
                *("sharded", "async_save", "async_save=process", "DCP save", "DCP async_save"),
                *("sharded, weights alone", "save_safetensors"),
            )
        }
        for engine in ("fsdp1", "fsdp2")
    },
}
"""What each side's processes are told for each name."""


def run() -> None:
    """Print medians and ratios; the targets stand beside them."""
    with (
        scratch_folder() as (scratch, num_bytes),
        alive(list(_SIDES), _NUM_RANKS, _Saves(scratch, num_bytes)) as live,
    ):
        rounds = in_rounds(
            {name: partial(turn, live, side, way) for side, ways in _SIDES.items() for name, way in ways.items()},
            _NUM_ROUNDS,
            num_unmeasured=2,
        )
    for name in rounds:
        print(f"  {name:34} {paired.median_of(rounds, name).in_ms()}")
    for ours, peer, target in _ROWS:
        found = paired.ratio(rounds, ours, peer)
        print(f"  {ours:24} / {peer:34} {found}" + (f"   target <= {target}" if target else ""))
    results.keep("save", {"bytes_of_weights": num_bytes, "processes": _NUM_RANKS, "seconds": rounds})


@contextmanager
def scratch_folder() -> Iterator[tuple[str, int]]:
    """Make a folder with room for ten times the weights; yield it and the number of bytes of the weights.

    Raises:
        OSError: If the disk has less.
    """
    num_bytes = int(float(os.environ.get("ACCELIGHT_BENCH_GB", "0.2")) * 10**9)
    with tempfile.TemporaryDirectory(prefix="bench_save_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as scratch:
        free = shutil.disk_usage(scratch).free
        if free < 10 * num_bytes:
            raise OSError(f"{scratch} has {free} bytes free, {10 * num_bytes} are needed. Set ACCELIGHT_BENCH_DIR.")
        yield scratch, num_bytes


@dataclass(frozen=True)
class _Saves:
    """Trains in one of a side's processes, and saves between steps as it is told."""

    folder: str
    num_bytes: int

    def __call__(self, side: str, connection: Connection) -> None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        if side == "Lightning":
            fit(_lightning(), Path(self.folder, side), self.num_bytes, {"plain": _plain_save}, connection)
        else:
            fit(_ours(side), Path(self.folder, side), self.num_bytes, _ways(), connection)


def _lightning() -> Any:
    from torch import nn

    from benchmarks.sharded_training import FSDPStrategyOnCPU

    return FSDPStrategyOnCPU(auto_wrap_policy={nn.Linear}, state_dict_type="sharded")


def _ours(engine: str) -> Any:
    from accelight.strategies import AccelFSDPStrategy

    return AccelFSDPStrategy(
        fsdp_version=int(engine[-1]),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        state_dict_type="sharded_state_dict",
        async_save=True,
    )


Way = Callable[[Any, str], "Callable[[], Any] | None"]
"""Saves, and returns what has to be waited for afterwards."""


def _plain_save(trainer: Any, path: str) -> None:
    trainer.save_checkpoint(path)


def synchronous(trainer: Any, path: str, *, weights_only: bool = False) -> None:
    """Save as without ``async_save``."""
    checkpointer = trainer.strategy._checkpointer
    saves, checkpointer.saves = checkpointer.saves, None
    trainer.save_checkpoint(path, weights_only=weights_only)
    checkpointer.saves = saves


def in_background(trainer: Any, path: str) -> Callable[[], Any]:
    """Begin to save, with ``async_save``."""
    trainer.save_checkpoint(path)
    wait: Callable[[], Any] = trainer.strategy.wait_for_saves
    return wait


def _ways() -> dict[str, Way]:
    from datetime import timedelta

    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    from accelight.strategies.fsdp.checkpoint.process_save import SavingProcess
    from accelight.strategies.saving.async_save import make_async_saver
    from accelight.strategies.sharded_tensors.user_code import library_code

    stager = DefaultStager(StagingOptions(False, False, False, False))
    processes: Any = make_async_saver("process", timedelta(minutes=30), SavingProcess)

    def by_process(trainer: Any, path: str) -> Callable[[], Any]:
        checkpointer = trainer.strategy._checkpointer
        saves, checkpointer.saves = checkpointer.saves, processes
        processes.connect(trainer.strategy.root_device)
        trainer.save_checkpoint(path)

        def wait() -> None:
            processes.wait()
            checkpointer.saves = saves

        return wait

    def state_of(trainer: Any) -> dict[str, Any]:
        strategy, [optimizer] = trainer.strategy, trainer.optimizers
        if strategy.engine.version == 1:
            with library_code():  # torch's own form, and not what users' code sees in hooks
                weights, state = get_state_dict(strategy.model, optimizer)
            return {"model": weights, "optimizer_0": state}
        weights = strategy.lightning_module_state_dict()
        return {"model": weights, "optimizer_0": strategy.optimizer_state(optimizer)}

    def dcp_async(trainer: Any, path: str) -> Callable[[], Any]:
        group = trainer.strategy._checkpointer.saves._groups[1]
        future: Any = async_save(
            state_of(trainer),
            checkpoint_id=path,
            async_stager=stager,
            process_group=group,
        )
        return future.result

    return {
        "sharded": synchronous,
        "async_save": in_background,
        "async_save=process": by_process,
        "DCP save": lambda trainer, path: save(state_of(trainer), checkpoint_id=path) and None,
        "DCP async_save": dcp_async,
        "sharded, weights alone": lambda trainer, path: synchronous(trainer, path, weights_only=True),
        "save_safetensors": lambda trainer, path: trainer.strategy.save_safetensors(path) and None,
    }


def fit(strategy: Any, folder: Path, num_bytes: int, ways: Mapping[str, Way], connection: Connection) -> None:
    """Train in one process, and save between steps as the connection says; send how long that took."""
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            count = max(1, num_bytes // (_WIDTH * _WIDTH * 4))
            self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)))

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.layers(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), foreach=False)

    class Saver(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            what = connection.recv()
            if what == END:
                trainer.should_stop = True
                return
            path = folder / "checkpoint"
            dist.barrier()
            start = time.perf_counter()
            wait = ways[what](trainer, str(path))
            elapsed = time.perf_counter() - start
            if wait is not None:
                wait()
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
            connection.send(elapsed)

    folder.mkdir(exist_ok=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=_NUM_RANKS,
        strategy=strategy,
        callbacks=[Saver()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(10_000, _WIDTH))))
