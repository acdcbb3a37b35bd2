"""``gpu``: a decoder of 1 B parameters with FSDP2, bf16, checkpointing and compile, under the Trainer and by hand.

Both sides have one process for each GPU, the same weights, batches and settings, and run in turn, in processes of their
own. Reported are time per step, peak memory, and calls that make the host wait for the device, counted by
``torch.cuda.set_sync_debug_mode`` in steps of their own::

    python -m benchmarks gpu                           # some minutes; about 20 GB on each GPU
    ACCELIGHT_BENCH_REPEATS=5 python -m benchmarks gpu
    ACCELIGHT_BENCH_TRY=1 python -m benchmarks gpu     # a tiny model on two CPU processes: shows that it runs, no more
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from accelight.strategies import AccelFSDPStrategy
from benchmarks import results
from benchmarks.measure import Timing, python

TRIED = os.environ.get("ACCELIGHT_BENCH_TRY") == "1"
BY_HAND, OURS = "by hand", "accelight"
_RUN = "import sys; from benchmarks.gpu import train; train(*sys.argv[1:])"
_TARGET = 1.02


@dataclass(frozen=True)
class Size:
    """Of the model and of the run."""

    vocabulary: int = 32_000
    width: int = 2048
    num_layers: int = 18
    num_heads: int = 16
    length: int = 2048
    batch_size: int = 2
    num_unmeasured: int = 10
    """Steps before those that are timed: they compile."""
    num_measured: int = 40
    num_counted: int = 5
    """Steps after them, in which waits are counted."""

    @property
    def num_steps(self) -> int:
        """All of them."""
        return self.num_unmeasured + self.num_measured + self.num_counted


SIZE = Size(64, 32, 2, 2, 16, 2, 6, 10, 2) if TRIED else Size()


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.num_heads = size.num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        hidden = self.norm2(x)
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Decoder(nn.Module):
    """Tokens in, loss out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.num_layers)))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens[:, :-1]))))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class _Tokens(IterableDataset[Tensor]):
    """Random ones, this rank's own."""

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        shape = (SIZE.batch_size, SIZE.length + 1)
        for _ in range(SIZE.num_steps):
            yield torch.randint(SIZE.vocabulary, shape, generator=generator)


def loader() -> DataLoader[Tensor]:
    """Return the batches, in pinned memory for a GPU."""
    return DataLoader(_Tokens(), batch_size=None, pin_memory=not TRIED)


@dataclass
class Probe:
    """Looks at the clock, at memory and for waits, after each step."""

    seconds: float = 0.0
    peak_bytes: int = 0
    waits: list[str] = field(default_factory=list)
    num_steps: int = 0
    _counting: ExitStack = field(default_factory=ExitStack)
    _caught: list[warnings.WarningMessage] = field(default_factory=list)

    def after_step(self) -> None:
        """Call it when a step is complete."""
        self.num_steps += 1
        timed_until = SIZE.num_unmeasured + SIZE.num_measured
        if self.num_steps == SIZE.num_unmeasured:
            _synchronise()
            if not TRIED:
                torch.cuda.reset_peak_memory_stats()
            self.seconds = -time.perf_counter()
        elif self.num_steps == timed_until:
            _synchronise()
            self.seconds += time.perf_counter()
            self.peak_bytes = 0 if TRIED else torch.cuda.max_memory_allocated()
            self._count()
        elif self.num_steps == timed_until + SIZE.num_counted:
            self._counting.close()
            synchronising = [one for one in self._caught if "synchronizing" in str(one.message)]
            self.waits = sorted(f"{Path(one.filename).name}:{one.lineno}" for one in synchronising)

    def _count(self) -> None:
        self._caught = self._counting.enter_context(warnings.catch_warnings(record=True)) or []
        warnings.simplefilter("always")
        if not TRIED:
            torch.cuda.set_sync_debug_mode("warn")
            self._counting.callback(torch.cuda.set_sync_debug_mode, "default")

    def report(self) -> dict[str, Any]:
        """Return what it saw."""
        return {
            "seconds_per_step": self.seconds / SIZE.num_measured,
            "peak_bytes": self.peak_bytes,
            "waits_per_step": len(self.waits) / SIZE.num_counted,
            "waits": sorted(set(self.waits)),
        }


def _synchronise() -> None:
    if not TRIED:
        torch.cuda.synchronize()


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(SIZE)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self)


class _Probing(Callback):
    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def on_train_batch_end(self, *_: Any) -> None:
        self.probe.after_step()


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)  # at 1e-4 rounding grows to 1e-2 in 55 steps


def _train_under_trainer(probe: Probe) -> list[Tensor]:
    strategy = AccelFSDPStrategy(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
        compile=True,
    )
    trainer: Any = Trainer(
        strategy=strategy, accelerator="cpu" if TRIED else "gpu", devices=_num_processes(), precision="bf16-mixed",
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, gradient_clip_val=1.0, callbacks=[_Probing(probe)],
    )  # fmt: skip
    module = _Module()
    trainer.fit(module, loader())
    return module.losses


def _train_by_hand(probe: Probe) -> list[Tensor]:
    device = torch.device("cpu") if TRIED else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if TRIED:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    model: Any = Decoder(SIZE).to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for index, block in enumerate(model.blocks):
        compiled: Any = torch.compile(checkpoint_wrapper(block))
        model.blocks[index] = fully_shard(compiled, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer, losses = _optimizer(model), list[Tensor]()
    for batch in loader():
        tokens = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        probe.after_step()
    return losses


def train(side: str, folder: str, rank: str) -> None:
    """Train one side in one of its processes, and leave what was measured in a file."""
    number, size = int(rank), _num_processes()
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}", GROUP_RANK="0")
    os.environ.update(TORCHELASTIC_RUN_ID="bench")
    if TRIED:
        torch.set_num_threads(1)
    probe = Probe()
    losses = (_train_under_trainer if side == OURS else _train_by_hand)(probe)
    if number == 0:
        found = {**probe.report(), "losses": torch.stack(losses).tolist()}
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _num_processes() -> int:
    return 2 if TRIED else torch.cuda.device_count()


def _run_side(side: str, folder: Path) -> dict[str, Any]:
    from tests.ranks import free_port

    folder.mkdir()
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    with (folder / "output").open("ab") as output:
        processes = [
            subprocess.Popen(
                [*python(_RUN), side, str(folder), f"{rank}"], env=environment, stdout=output, stderr=output
            )
            for rank in range(_num_processes())
        ]
        statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError(f"{side}: a process failed:\n{(folder / 'output').read_text()[-8000:]}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def run() -> None:
    """Print both sides; the targets stand beside them."""
    if not TRIED and not torch.cuda.is_available():
        print("  no GPU is visible: nothing is measured. ACCELIGHT_BENCH_TRY=1 tries it on the CPU.")
        return
    repeats = 1 if TRIED else int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "3"))
    num_parameters = sum(parameter.numel() for parameter in _on_meta().parameters())
    print(f"  {num_parameters / 1e9:.2f} B parameters on {_num_processes()} processes, torch {torch.__version__}")
    runs: dict[str, list[dict[str, Any]]] = {BY_HAND: [], OURS: []}
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as scratch:
        for repeat in range(repeats):
            for side, found in runs.items():
                found.append(_run_side(side, Path(scratch, f"{repeat} {side}")))
    for side, found in runs.items():
        timing = Timing(tuple(one["seconds_per_step"] for one in found))
        print(
            f"  {side:10} {timing.median * 1000:9.2f} ms a step (spread {timing.spread * 1000:.2f} ms)   "
            f"peak {max(one['peak_bytes'] for one in found) / 2**30:6.2f} GiB   "
            f"{found[-1]['waits_per_step']:4.1f} waits a step: {', '.join(found[-1]['waits']) or 'none'}"
        )
    if TRIED:
        print("  tried on the CPU: but for the losses, these numbers say nothing")
    for what in () if TRIED else ("seconds_per_step", "peak_bytes"):
        ours, theirs = (Timing(tuple(one[what] for one in runs[side])).median for side in (OURS, BY_HAND))
        print(f"  {what}, ours / by hand: {ours / theirs:.3f}   target <= {_TARGET}")
    print(f"  losses differ by at most {_difference(runs[BY_HAND][0], runs[OURS][0]):.2e}")
    if repeats > 1:
        print(f"  those of two runs by hand by at most {_difference(*runs[BY_HAND][:2]):.2e}")
    if not TRIED:
        results.keep("gpu", {"size": asdict(SIZE), "device": torch.cuda.get_device_name(), "runs": runs})


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))


def _on_meta() -> Decoder:
    with torch.device("meta"):
        return Decoder(SIZE)
