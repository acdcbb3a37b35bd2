"""The oracle grid: engine x accumulation x clipping x kind of model x precision, each trains as a plain loop.

Each test is one run on the processes with six cells in it (accumulation x clipping); what ran is printed as a table at
the end of pytest's output. Per step, losses and gradient norms are compared, and in the end the weights.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Block, quiet_trainer

VOCABULARY, WIDTH, LENGTH = 11, 8, 3
"""Odd on purpose: shards of unequal length, padding, and ranks with none."""
BATCH_SIZE = 2
NUM_MICRO_BATCHES = 5
"""With accumulation 3, an epoch has a window of three and one of two."""
NUM_EPOCHS = 2
Clipping = Literal["none", "norm", "value"]
Setting = tuple[str, str, str]
"""Engine, kind of model, precision."""
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1},
    "fsdp1_flat": {"fsdp_version": 1, "use_orig_params": False},
    "fsdp2": {"fsdp_version": 2},
}


@dataclass(frozen=True)
class Kind:
    """A kind of model and what the strategy is told about it."""

    tied: bool = False
    frozen: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ignored(self) -> str | None:
        """Name of the block that is left whole."""
        return "blocks.2" if "ignored_modules" in self.options else None


_IGNORED = {"ignored_modules": r"model\.blocks\.2"}
KINDS = {
    "plain": Kind(),
    "tied": Kind(tied=True),
    "frozen": Kind(frozen=True),
    "checkpointing": Kind(options={"activation_checkpointing": True}),
    "offload": Kind(options={"cpu_offload": True}),
    "ignored": Kind(options=_IGNORED),
    "together": Kind(True, True, {"activation_checkpointing": True, "cpu_offload": True, **_IGNORED}),
}


class Decoder(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        if kind.tied:
            self.head.weight = self.embed.weight
        if kind.frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Cell:
    """What differs between the cells of one test."""

    accumulate: int
    clipping: Clipping
    limit: float | None = None
    """Of the norm or of each value."""


@dataclass
class Trace:
    """What a training leaves behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def cells_for(kind: str, world_size: int) -> list[Cell]:
    """Accumulation x clipping, which bites at some of the steps: one that always does would hide a wrong scale."""
    cells = []
    for accumulate in (1, 3):
        unclipped = Cell(accumulate, "none")
        median = statistics.median(train_plain(KINDS[kind], "32-true", unclipped, world_size).norms)
        cells += [unclipped, Cell(accumulate, "norm", median), Cell(accumulate, "value", median / 20)]
    return cells


def tokens(world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    size = NUM_MICRO_BATCHES * BATCH_SIZE * world_size
    return torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)


def next_token_loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in parameters if p.requires_grad), lr=0.3, momentum=0.9)


# ------------------------------------------------------------------ under the Trainer
class Module(LightningModule):
    def __init__(self, kind: Kind, trace: Trace) -> None:
        super().__init__()
        self.model, self.trace = Decoder(kind), trace

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = next_token_loss(self.model, batch[0])
        mean = loss.detach().cpu()
        dist.all_reduce(mean)
        self.trace.losses.append(mean.item() / dist.get_world_size())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = cast("AccelFSDPStrategy", self.trainer.strategy).clip_grad_norm(optimizer, math.inf)  # clips nothing
        self.trace.norms.append(norm.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def train_cell(engine: str, kind: Kind, precision: Any, cell: Cell, accelerator: str) -> Trace:
    trace, world_size = Trace(), torch.cuda.device_count() if accelerator == "gpu" else dist.get_world_size()
    options: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        "state_dict_type": "full_state_dict",
    }
    strategy = AccelFSDPStrategy(**options | ENGINES[engine] | kind.options)
    trainer = quiet_trainer(
        strategy,
        world_size,
        accelerator=accelerator,
        max_epochs=NUM_EPOCHS,
        precision=precision,
        accumulate_grad_batches=cell.accumulate,
        gradient_clip_val=cell.limit,
        gradient_clip_algorithm=None if cell.clipping == "none" else cell.clipping,
    )
    data = TensorDataset(tokens(world_size))
    sampler: Any = DistributedSampler(data, world_size, trainer.global_rank, shuffle=False)
    trainer.fit(Module(kind, trace), DataLoader(data, BATCH_SIZE, sampler=sampler))
    if cell.clipping == "norm":
        assert strategy.last_grad_norm is not None
        assert strategy.last_grad_norm.item() == trace.norms[-1]
    weights = strategy.lightning_module_state_dict()
    trace.weights = {name.removeprefix("model."): tensor.cpu().clone() for name, tensor in weights.items()}
    return trace


def train_cells(
    engine: str, kind: Kind, precision: Any, cells: Sequence[Cell], accelerator: str = "cpu"
) -> list[Trace]:
    return [train_cell(engine, kind, precision, cell, accelerator) for cell in cells]


# ------------------------------------------------------------------ the oracle
def train_plain(kind: Kind, precision: str, cell: Cell, world_size: int) -> Trace:
    """Train in one process: in fp32 over the global batches, in bf16 with every cast that sharded training makes."""
    torch.set_num_threads(1)  # as on the ranks: LayerNorm's backward adds up in an order of its own for each number
    model, trace = Decoder(kind), Trace()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, data = sgd(parameters), tokens(world_size).unflatten(0, (NUM_MICRO_BATCHES, -1))
    backward = _backward_in_fp32 if precision == "32-true" else _backward_in_bf16
    for _ in range(NUM_EPOCHS):
        for start in range(0, NUM_MICRO_BATCHES, cell.accumulate):
            optimizer.zero_grad()
            trace.losses += backward(model, kind, data[start : start + cell.accumulate], cell.accumulate, world_size)
            trace.norms.append(nn.utils.clip_grad_norm_(parameters, math.inf).item())
            if cell.clipping == "norm":
                nn.utils.clip_grad_norm_(parameters, cast("float", cell.limit))
            elif cell.clipping == "value":
                nn.utils.clip_grad_value_(parameters, cast("float", cell.limit))
            optimizer.step()
    trace.weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return trace


def _backward_in_fp32(model: nn.Module, kind: Kind, window: Tensor, num_steps: int, world_size: int) -> list[float]:
    losses = [next_token_loss(model, micro_batch) for micro_batch in window]
    for loss in losses:
        (loss / num_steps).backward()
    return [loss.item() for loss in losses]


def _backward_in_bf16(model: nn.Module, kind: Kind, window: Tensor, num_steps: int, world_size: int) -> list[float]:
    """bf16 weights made from the fp32 ones, autocast, gradients that add up and are averaged over "ranks" in bf16."""
    whole = [] if kind.ignored is None else list(model.get_submodule(kind.ignored).parameters())
    losses, gradients = torch.zeros(len(window)), dict[nn.Parameter, Tensor]()
    for rank in range(world_size):
        replica = copy.deepcopy(model)
        replica.zero_grad()
        of_replica = dict(zip(model.parameters(), replica.parameters(), strict=True))
        for parameter, copied in of_replica.items():
            if not any(parameter is other for other in whole):  # ignored modules are not cast, only autocast
                copied.data = copied.data.bfloat16()
        for index, micro_batch in enumerate(window):
            with torch.autocast("cpu", torch.bfloat16):
                loss = next_token_loss(replica, micro_batch[rank::world_size])
            (loss / num_steps).backward()
            losses[index] += loss.item() / world_size
        for parameter, copied in of_replica.items():
            if copied.grad is not None:
                share = copied.grad / world_size
                gradients[parameter] = gradients[parameter] + share if parameter in gradients else share
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.float()
    return losses.tolist()


def assert_same(found: Trace, expected: Trace, tolerance: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), **tolerance)
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(expected.norms), **tolerance)
    assert sorted(found.weights) == sorted(expected.weights)
    for name, weight in expected.weights.items():
        found_weight = found.weights[name]
        message = f"{name}: {found_weight} and {weight}"
        torch.testing.assert_close(found_weight, weight, **tolerance, msg=message)


def _check(world_size: int, setting: Setting, tolerance: dict[str, Any], accelerator: str = "cpu") -> None:
    engine, kind, precision = setting
    cells = cells_for(kind, world_size)
    more: dict[str, Any] = {} if accelerator == "cpu" else {"init_group": False, "timeout_s": 240}
    traces = run_on_ranks(world_size, train_cells, engine, KINDS[kind], precision, cells, accelerator, **more)[0]
    for cell, found in zip(cells, traces, strict=True):
        expected = train_plain(KINDS[kind], precision, cell, world_size)
        if cell.clipping == "norm":
            assert min(expected.norms) < cast("float", cell.limit) < max(expected.norms)
        assert_same(found, expected, tolerance)


# Sums in another order differ by some 1e-7 of the largest summand, hence ``atol``; steps that are not clipped carry it
# on, to 1.7e-6 on one kind of processor. In bf16 the oracle makes the very same casts, so that each rounding is the
# same one and only the fp32 parts differ.
_CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 4e-6}
# A GPU adds up in another order than a CPU, in half precision before rounding, and training carries that on.
_CLOSE_ON_GPU: dict[str, Any] = {"32-true": {"rtol": 1e-4, "atol": 1e-5}, "bf16-mixed": {"rtol": 2**-5, "atol": 2**-7}}
PRECISIONS = ("32-true", "bf16-mixed")
SETTINGS: list[Setting] = list(itertools.product(("fsdp1", "fsdp2"), KINDS, PRECISIONS))
# Flat parameters change what optimizers hold, nothing else: where ties, freezing and ignoring meet is enough.
SETTINGS += itertools.product(("fsdp1_flat",), ("plain", "together"), PRECISIONS)
SOME: list[Setting] = list(itertools.product(("fsdp1", "fsdp2"), ("plain", "together"), ("32-true",)))


def _name(value: Setting | int) -> str:
    return f"{value}_processes" if isinstance(value, int) else "-".join(value)


@pytest.mark.parametrize(
    ("world_size", "setting"), [*((2, setting) for setting in SETTINGS), *((3, setting) for setting in SOME)], ids=_name
)
def test_processes_train_as_one(
    world_size: int, setting: Setting, record_property: Callable[[str, object], None]
) -> None:
    """Also where an epoch's last window is short, which is divided by the full number, as Lightning does."""
    record_property("grid", (world_size, "cpu", *setting))
    _check(world_size, setting, _CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS, ids=_name)
def test_gpus_train_as_one_cpu_process(setting: Setting, record_property: Callable[[str, object], None]) -> None:
    record_property("grid", (torch.cuda.device_count(), "gpu", *setting))
    _check(torch.cuda.device_count(), setting, _CLOSE_ON_GPU[setting[2]], "gpu")
