"""``save``: how long training stands still for a checkpoint, sharded, in the background and as safetensors.

``ACCELIGHT_BENCH_GB`` sets the size of the weights (AdamW's state is twice that beside it), ``ACCELIGHT_BENCH_DIR`` the
folder on the disk that is to be measured, with room for ten times as much::

    python -m benchmarks save                                   # 0.2 GB of weights, a minute or two
    ACCELIGHT_BENCH_GB=2 python -m benchmarks save

Two gloo processes train; each way saves in turn, between two steps, into a new name. Every side ends with fsync, except
those in the background, which are waited for outside of the measurement.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Timing, python

REPEATS = 5
_NUM_RANKS = 2
_SIDE = 1024
_SAVE = "import sys; from benchmarks.save import train; train(*sys.argv[1:])"
_ROWS = (  # ours, its peer, target; DCP alone writes no metadata and gives nothing its name atomically
    ("fsdp1 sharded", "fsdp1 Lightning's FSDPStrategy", 1.0),
    ("fsdp2 sharded", "fsdp2 DCP save", 1.0),
    ("fsdp1 async_save", "fsdp1 Lightning's FSDPStrategy", 0.3),
    ("fsdp2 async_save", "fsdp2 DCP save", 0.3),
    ("fsdp2 async_save", "fsdp2 DCP async_save", None),
    ("fsdp1 save_safetensors", "fsdp1 sharded, weights alone", 1.0),
    ("fsdp2 save_safetensors", "fsdp2 sharded, weights alone", 1.0),
)


def run() -> None:
    """Print medians, spread and ratios; the targets stand beside them."""
    num_bytes = int(float(os.environ.get("ACCELIGHT_BENCH_GB", "0.2")) * 10**9)
    with tempfile.TemporaryDirectory(prefix="bench_save_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as scratch:
        free = shutil.disk_usage(scratch).free
        if free < 10 * num_bytes:
            raise OSError(f"{scratch} has {free} bytes free, {10 * num_bytes} are needed. Set ACCELIGHT_BENCH_DIR.")
        seconds: dict[str, list[float]] = {}
        for engine in ("fsdp1", "fsdp2"):
            folder = Path(scratch, engine)
            folder.mkdir()
            commands = [[*python(_SAVE), str(folder), engine, str(num_bytes), f"{rank}"] for rank in range(_NUM_RANKS)]
            with (folder / "errors").open("ab") as errors:
                processes = [subprocess.Popen(command, stderr=errors) for command in commands]
                statuses = [process.wait() for process in processes]
            if any(statuses):
                raise RuntimeError(f"{engine}: a process failed:\n{(folder / 'errors').read_text()}")
            seconds |= json.loads((folder / "seconds.json").read_text())
    timings = {name: Timing(tuple(values)) for name, values in seconds.items()}
    for name, timing in timings.items():
        print(f"  {name:34} {timing.median * 1000:8.1f} ms   spread {timing.spread * 1000:7.1f} ms")
    for ours, peer, target in _ROWS:
        ratio = timings[ours].median / timings[peer].median
        print(f"  {ours:24} / {peer:34} {ratio:6.2f}" + (f"   target <= {target}" if target else ""))


def train(folder: str, engine: str, num_bytes: str, rank: str) -> None:
    """Train in one of the processes, and save between the steps."""
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=f"{_NUM_RANKS}", LOCAL_WORLD_SIZE=f"{_NUM_RANKS}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GROUP_RANK="0", TORCHELASTIC_RUN_ID="bench")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=_NUM_RANKS)
    seconds: dict[str, list[float]] = {}
    if engine == "fsdp1":
        _fit(_lightning(), folder, int(num_bytes), {f"{engine} Lightning's FSDPStrategy": _plain_save}, seconds)
    _fit(_ours(engine), folder, int(num_bytes), _ways(engine), seconds)
    if rank == "0":
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _lightning() -> Any:
    import torch
    from lightning.pytorch.strategies import FSDPStrategy
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    class OnCPU(FSDPStrategy):
        """Lightning's own with nothing changed but the device that torch is told."""

        def _setup_model(self, model: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    return OnCPU(auto_wrap_policy={nn.Linear}, state_dict_type="sharded")


def _ours(engine: str) -> Any:
    from accelight.strategies import AccelFSDPStrategy

    return AccelFSDPStrategy(
        fsdp_version=int(engine[-1]),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        state_dict_type="sharded_state_dict",
        async_save=True,
    )


_Way = Callable[[Any, str], "Callable[[], Any] | None"]
"""Saves, and returns what has to be waited for afterwards."""


def _plain_save(trainer: Any, path: str) -> None:
    trainer.save_checkpoint(path)


def _ways(engine: str) -> dict[str, _Way]:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    stager = DefaultStager(StagingOptions(False, False, False, False))

    def synchronous(trainer: Any, path: str, *, weights_only: bool = False) -> None:
        checkpointer = trainer.strategy._checkpointer
        saves, checkpointer.saves = checkpointer.saves, None
        trainer.save_checkpoint(path, weights_only=weights_only)
        checkpointer.saves = saves

    def in_background(trainer: Any, path: str) -> Callable[[], Any]:
        trainer.save_checkpoint(path)
        return trainer.strategy.wait_for_saves

    def state_of(trainer: Any) -> dict[str, Any]:
        strategy = trainer.strategy
        weights = strategy.lightning_module_state_dict()
        return {"model": weights, "optimizer_0": strategy.optimizer_state(trainer.optimizers[0])}

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
        f"{engine} sharded": synchronous,
        f"{engine} async_save": in_background,
        f"{engine} DCP save": lambda trainer, path: save(state_of(trainer), checkpoint_id=path) and None,
        f"{engine} DCP async_save": dcp_async,
        f"{engine} sharded, weights alone": lambda trainer, path: synchronous(trainer, path, weights_only=True),
        f"{engine} save_safetensors": lambda trainer, path: trainer.strategy.save_safetensors(path) and None,
    }


def _fit(strategy: Any, folder: str, num_bytes: int, ways: dict[str, _Way], seconds: dict[str, list[float]]) -> None:
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            count = max(1, num_bytes // (_SIDE * _SIDE * 4))
            self.layers = nn.Sequential(*(nn.Linear(_SIDE, _SIDE) for _ in range(count)))

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.layers(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), foreach=False)

    class Saver(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            for name, way in ways.items():
                path = Path(folder, "checkpoint")
                dist.barrier()
                start = time.perf_counter()
                wait = way(trainer, str(path))
                elapsed = time.perf_counter() - start
                if wait is not None:
                    wait()
                if trainer.global_step > 1:  # the first is the warm-up
                    seconds.setdefault(name, []).append(elapsed)
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(path)

    trainer = Trainer(
        accelerator="cpu",
        devices=_NUM_RANKS,
        strategy=strategy,
        max_steps=REPEATS + 1,
        callbacks=[Saver()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(REPEATS + 1, _SIDE))))
