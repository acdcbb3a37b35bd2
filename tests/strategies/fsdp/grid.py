"""Cells of the oracle grid: kinds of models, what trains them, and the plain loop beside it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accelight.strategies import AccelFSDPStrategy
from tests.strategies.oracle import Block, quiet_trainer

VOCABULARY, WIDTH, LENGTH = 11, 8, 3
"""Odd on purpose: shards of unequal length, padding, and ranks with none."""
BATCH_SIZE = 2
NUM_MICRO_BATCHES = 5
"""With accumulation 3, an epoch has a window of three and one of two."""
NUM_EPOCHS = 2
Clipping = Literal["none", "norm", "value"]
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
        """Name of the block that is left unsharded."""
        return "blocks.2" if "ignored_modules" in self.options else None


_IGNORED = {"ignored_modules": r"model\.blocks\.2"}
KINDS = {
    "plain": Kind(),
    "tied": Kind(tied=True),
    "frozen": Kind(frozen=True),
    "checkpointing": Kind(options={"activation_checkpointing": True}),
    "offload": Kind(options={"cpu_offload": True}),
    "ignored": Kind(options=_IGNORED),
    "together": Kind(
        True,
        True,
        {"activation_checkpointing": True, "activation_checkpointing_offload": True, "cpu_offload": True, **_IGNORED},
    ),
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


def tokens(world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    size = NUM_MICRO_BATCHES * BATCH_SIZE * world_size
    return torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)


def next_token_loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in parameters if p.requires_grad), lr=0.3, momentum=0.9)


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
        norm = cast("AccelFSDPStrategy", self.trainer.strategy).grad_norm(optimizer)
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


def train_plain(kind: Kind, precision: str, cell: Cell, world_size: int, device: str = "cpu") -> Trace:
    """Train in one process: in fp32 over the global batches, in bf16 with every cast that sharded training makes."""
    torch.set_num_threads(1)  # as on the ranks: LayerNorm's backward adds up in an order of its own for each number
    model, trace = Decoder(kind).to(device), Trace()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, data = sgd(parameters), tokens(world_size).unflatten(0, (NUM_MICRO_BATCHES, -1)).to(device)
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
    trace.weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
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
            with torch.autocast(window.device.type, torch.bfloat16):
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
