"""``timeline``: one optimizer step of two micro-batches under each engine: computation and communication by unit.

Two gloo processes train a model of three blocks under torch's profiler. Marks around each block record when its forward
and its backward compute; the collectives are those that gloo reports from its threads. Rank 0's fastest step of
several is kept, and drawn by `benchmarks.plots`::

    python -m benchmarks timeline --keep    # half a minute
    python -m benchmarks.plots timeline

The blocks have different sizes, so that the number of elements tells which unit a collective belongs to. ZeRO-2's
bucket holds a block and ZeRO-3's the smallest unit, as they would in a much larger model: the defaults would move this
one whole.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from benchmarks import results
from benchmarks.turns import alive, turn

ENGINES = ("FSDP1", "FSDP2", "ZeRO-2", "ZeRO-3")
WORLD_SIZE, ACCUMULATE = 2, 2
WIDTH, HIDDEN, BATCH = 512, (1600, 2048, 2560), 128
_WARM_UP, _RECORDED = 3, 12
"""Optimizer steps."""
_REST = "rest of the root"
_COLLECTIVES = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::allgather_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::reduce_scatter_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "c10d::reduce_": "reduce",
}
_MESSAGE_ELEMENTS = 256
"""A collective of fewer is a message about the step: which parameters were used, whether a signal came."""


@dataclass(frozen=True)
class Event:
    """Something that took a while."""

    kind: str
    """``forward``, ``backward``, ``optimizer``, the name of a collective, or ``message`` for one of a few numbers."""
    unit: str
    """Whose parameters or gradients; empty where several units are in one collective."""
    start_ms: float
    end_ms: float


def run() -> None:
    """Print a line for each engine, and keep the events."""
    engines = {}
    with tempfile.TemporaryDirectory() as folder, alive(ENGINES, WORLD_SIZE, _Record(folder)) as sides:
        for engine in ENGINES:
            turn(sides, engine)
            events = engines[engine] = json.loads(Path(folder, engine).read_text(encoding="utf-8"))
            number = {kind: sum(each["kind"] == kind for each in events) for kind in sorted(_COLLECTIVES.values())}
            counted = ", ".join(f"{count} {kind}" for kind, count in number.items() if count)
            print(f"{engine:7} {max(each['end_ms'] for each in events):6.1f} ms: {counted}")
    sizes = {"processes": WORLD_SIZE, "micro_batches": ACCUMULATE, "elements": _elements()}
    results.keep("timeline", {**sizes, "engines": engines})


@dataclass(frozen=True)
class _Record:
    """Trains under an engine, inside one of its processes, and writes rank 0's events.

    Args:
        folder: Where to.
    """

    folder: str

    def __call__(self, engine: str, connection: Connection) -> None:
        connection.recv()
        module = _Model()
        trainer = Trainer(
            strategy=_strategy(engine), accelerator="cpu", devices=WORLD_SIZE, max_steps=_WARM_UP + _RECORDED,
            accumulate_grad_batches=ACCUMULATE, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        samples: Any = torch.randn(BATCH * ACCUMULATE * trainer.max_steps, WIDTH)
        trainer.fit(module, DataLoader(samples, BATCH))
        if dist.get_rank() == 0:
            fastest = min(module.steps, key=lambda events: max(each.end_ms for each in events))
            text = json.dumps([asdict(each) for each in fastest])
            Path(self.folder, engine).write_text(text, encoding="utf-8")
        connection.send(0.0)
        connection.recv()


def _strategy(engine: str) -> Any:
    number = int(engine[-1])
    if engine.startswith("FSDP"):
        return AccelFSDPStrategy(fsdp_version=number, auto_wrap_policy={_Block})
    unit = min(_elements().values()) if number == 3 else sum(_elements().values()) // len(HIDDEN)
    buckets: dict[str, Any] = {"stage": number, "reduce_bucket_size": unit}
    if number == 3:
        buckets |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": unit,
            "stage3_max_reuse_distance": unit,
            "stage3_prefetch_bucket_size": unit,
        }
    return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": buckets})


# ------------------------------------------------------------------------------------------------
# The model, with marks where its parts begin and end to compute.


class _Mark(torch.autograd.Function):
    """Ends one label and begins another, in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: _Labels, begins: bool) -> Tensor:
        ctx.labels, ctx.begins = labels, begins
        labels.switch("forward" if begins else "")
        return x.clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.labels.switch("" if ctx.begins else "backward")
        return gradient, None, None


class _Labels:
    """The profiler's label of what a unit computes now."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._open: Any = None

    def switch(self, kind: str) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = record_function(f"{kind}: {self._unit}") if kind else None
        if self._open is not None:
            self._open.__enter__()


class _Part(nn.Module):
    def __init__(self, name: str, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self._labels = layers, _Labels(name)

    def forward(self, x: Tensor) -> Tensor:
        mark: Any = _Mark.apply
        return mark(self.layers(mark(x, self._labels, True)), self._labels, False)


class _Block(_Part):
    """A unit."""

    def __init__(self, number: int, hidden: int) -> None:
        layers = nn.Sequential(nn.Linear(WIDTH, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, WIDTH, bias=False))
        super().__init__(f"block {number}", layers)


class _Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Part(_REST, nn.Linear(WIDTH, WIDTH, bias=False))
        self.blocks = nn.Sequential(*(_Block(number, hidden) for number, hidden in enumerate(HIDDEN)))
        self.last = _Part(_REST, nn.Linear(WIDTH, 64, bias=False))
        self.steps: list[list[Event]] = []
        self._profile: profile | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        if self._profile is None and self.trainer.global_step >= _WARM_UP:
            dist.barrier()
            self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self._profile.__enter__()

    def training_step(self, batch: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(batch.requires_grad_()))).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self._profile is not None and self.trainer.global_step > _WARM_UP + len(self.steps):
            self._profile.__exit__(None, None, None)
            self.steps.append(_events_of(self._profile))
            self._profile = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


# ------------------------------------------------------------------------------------------------
# The profiler's records, as events.


def _events_of(recorded: profile) -> list[Event]:
    records = sorted(recorded.events() or [], key=lambda each: each.time_range.start)
    found: list[tuple[str, str, float, float]] = []
    for each in records:
        kind, _, unit = each.name.partition(": ")
        if kind in ("forward", "backward"):
            found.append((kind, unit, each.time_range.start, each.time_range.end))
    found += _collectives(records)
    for each in records:
        if each.name.startswith("Optimizer.step"):  # Lightning's closure, forward and backward, is inside
            ends = [end for kind, _, _, end in found if kind != "message"]  # messages run beside it
            inside = [end for end in ends if each.time_range.start <= end <= each.time_range.end]
            found.append(("optimizer", "", max([each.time_range.start, *inside]), each.time_range.end))
    begin = min(start for _, _, start, _ in found)
    events = [Event(kind, unit, (start - begin) / 1e3, (end - begin) / 1e3) for kind, unit, start, end in found]
    return sorted(events, key=lambda each: each.start_ms)


def _collectives(records: Sequence[Any]) -> Iterator[tuple[str, str, float, float]]:
    """Yield the collectives: called in one thread, run by gloo in others, in the same order for each of its kinds."""
    calls: dict[str, list[Any]] = {"all_gather": [], "all_reduce": [], "reduce": []}
    for each in records:
        if each.name in _COLLECTIVES:
            kind = _COLLECTIVES[each.name]  # gloo reduces and scatters by an all-reduce
            calls["all_gather" if "gather" in kind else "reduce" if kind == "reduce" else "all_reduce"].append(each)
    for name, called in calls.items():
        run = [each for each in records if each.name == f"gloo:{name}"]
        if len(run) != len(called):
            raise RuntimeError(f"{len(called)} calls of {name}, but gloo ran {len(run)}: the records are incomplete.")
        for call, each in zip(called, run, strict=True):
            kind = _COLLECTIVES[call.name]
            numel = sum(torch.Size(shape).numel() for shape in each.input_shapes) * (
                WORLD_SIZE if name == "all_gather" else 1
            )
            start = call.time_range.start if "scatter" in kind else each.time_range.start  # with gloo's copies
            yield "message" if numel < _MESSAGE_ELEMENTS else kind, _unit_of(numel), start, each.time_range.end


def _elements() -> dict[str, int]:
    """Return the elements of each unit."""
    return {unit: sum(numels) for unit, numels in _matrices().items()}


@cache
def _matrices() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, parameter in _Model().named_parameters():
        unit = f"block {name.split('.')[1]}" if name.startswith("blocks.") else _REST
        found.setdefault(unit, []).append(parameter.numel())
    return found


def _unit_of(numel: int) -> str:
    """Return the unit that has so many elements, or a matrix of so many; empty for several units in one bucket."""
    return next((unit for unit, numels in _matrices().items() if numel in (sum(numels), *numels)), "")
