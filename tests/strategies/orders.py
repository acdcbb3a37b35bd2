"""Scripts of what users do, in random order, run under a strategy and under plain Lightning on one device.

A script is a value: it prints as code. ``python -m tests.strategies.orders "Script(...)" fsdp2`` runs one again.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from accelight.callbacks import ReplicaCheck, ShardedEMA, Watchdog
from accelight.state import GradientAccumulationPlugin
from accelight.strategies import full_parameters
from tests.gpu import share_a_device
from tests.ranks import run_on_ranks
from tests.storage import URL
from tests.strategies.deepspeed.training import ds_config
from tests.strategies.late_saves import late_saves

WORLD_SIZE = 2
ROWS = 2
"""Samples in one rank's batch."""
TENSOR_PARALLEL = "fsdp2_tp"
"""The kind whose two ranks share the layers of one model and see the same batches."""
SEQUENCE_PARALLEL = {"fsdp2_sp": "sp_size", "fsdp2_cp": "cp_size"}
"""The kinds whose two ranks share each sequence."""

HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)
ACTIONS = (
    *("save", "stop", "raise", "sample", "part", "clamp", "read", "draft", "adversary", "freeze", "thaw"),
    *("rows", "assign", "noise", "norms", "gradients"),
)
"""A forward whose graph is dropped is a draft; an adversary wants the gradient of an input; from ``rows`` on, users'
code looks at whole tensors and changes them."""
_OF_WHOLE_TENSORS = {"rows", "noise", "norms"}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "kept": {"fsdp1": {"reshard_during_accumulation": False}, "fsdp2": {"reshard_during_accumulation": False}},
    "grad_op": {"fsdp1": {"sharding_strategy": "SHARD_GRAD_OP"}, "fsdp2": {"reshard_after_forward": False}},
    "recompute": {"fsdp1": {"activation_checkpointing": True}, "fsdp2": {"activation_checkpointing": True}},
    "find_unused": {"fsdp1": {"find_unused_parameters": True}, "fsdp2": {"find_unused_parameters": True}},
    "one_unit": {"fsdp1": {"auto_wrap_policy": "no_wrap"}, "fsdp2": {"auto_wrap_policy": "no_wrap"}},
    "each_batch": {
        "fsdp1": {"gradient_accumulation": GradientAccumulationPlugin(sync_each_batch=True)},
        "fsdp2": {"gradient_accumulation": GradientAccumulationPlugin(sync_each_batch=True)},
    },
    "ignored": {engine: {"ignored_modules": r"net\.(emb|branch|blocks\.1\.norm)"} for engine in ("fsdp1", "fsdp2")},
    "background": {engine: {"async_save": True} for engine in ("fsdp1", "fsdp2", "zero")},
    "process": {
        engine: {"async_save": "process", "state_dict_type": "sharded_state_dict"} for engine in ("fsdp1", "fsdp2")
    },
}
"""Ways to run an engine that must not change what is trained.

Saves in the background are written as late as can be.
"""


class _Code:
    """Prints as the code that makes it, without what is a default."""

    def __repr__(self) -> str:
        given = [(one.name, getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True, repr=False)
class Event(_Code):
    """What happens at one hook when it comes by for the ``count``-th time, from 0."""

    hook: str
    count: int
    action: str


@dataclass(frozen=True, repr=False)
class Fit(_Code):
    """One call of a new Trainer."""

    call: str = "fit"
    """Or ``validate``, ``predict``."""
    start: str = "same"
    """``same`` module as before; ``resume`` it from a checkpoint; a ``fresh`` module from that."""
    back: int = 1
    """Which checkpoint that is: the last, the last but one, ...; the first if there are fewer."""
    accumulate: int = 1
    epochs: int = 1
    batches: int = 4
    """In an epoch."""
    clip: float | None = None
    limit: int | None = None
    """``limit_train_batches``."""
    skip_at: int | None = None
    """``on_train_batch_start`` returns -1 at this batch of each epoch."""
    validate_every: int | None = None
    """Micro-batches between validations."""
    swap: bool = False
    """Whether validation runs on other weights, swapped in and out as EMA callbacks do."""
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, repr=False)
class Script(_Code):
    """What a user does with one module."""

    fits: tuple[Fit, ...] = (Fit(),)
    optimizer: str = "sgd"
    """``sgd`` with momentum, ``decay`` (the same with weight decay), ``adamw``, ``ratio`` (`TrustRatio`)."""
    over: str = "all"
    """``all`` parameters, two ``groups``, a ``part``."""
    schedule: str | None = None
    """``step`` or ``epoch``: when it advances."""
    manual: str | None = None
    """Manual optimization with two optimizers, in this order: z(ero_grad), b(ackward), s(tep); ``t`` toggles."""
    every: int = 1
    """Manual optimization: the optimizers step every so many batches."""
    unused: str | None = None
    """A branch that every other ``batch`` does not use, or the first two of an epoch (``late``), or only one ``rank``
    uses, or ``never``; a block, which is a ``unit``, that every other batch does not use, or that only one rank uses
    (``unit_rank``)."""
    iterable: bool = False
    """A dataset without a length."""
    scaled_targets: bool = False
    """Whether the ``collate_fn`` scales targets by the norm of a weight."""
    penalty: bool = False
    """Whether steps add a weight's squares to the loss, from the third batch on."""
    sharded: bool = False
    """The form of checkpoints."""
    option: str | None = None
    """One of `OPTIONS`."""
    average: int | None = None
    """Steps between updates of `ShardedEMA`, which evaluates with averages."""
    items: bool = False
    """Whether each token weighs the same, and not each micro-batch."""
    remote: bool = False
    """Whether checkpoints lie behind a URL."""
    width: int = 5
    """Of the model: what tensor parallelism cuts must be even."""
    heads: int = 0
    """Of attention, which sequence parallelism divides; none without it."""


class Planned(Exception):  # noqa: N818 (an event, and no error)
    """The user's own exception."""


class Block(nn.Module):
    """Counts the batches that it was trained on, and keeps that beside its weights."""

    def __init__(self, width: int, heads: int = 0) -> None:
        super().__init__()
        self.norm, self.linear, self.heads = nn.LayerNorm(width), nn.Linear(width, width), heads
        self.num_batches = 0
        self.recomputes = False
        """Whether it is recomputed in backward without a strategy: with weights that a hook has changed since, too."""

    def get_extra_state(self) -> dict[str, int]:
        return {"num_batches": self.num_batches}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_batches = state["num_batches"]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._compute, x, use_reentrant=False) if self.recomputes else self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        if self.heads:
            split = hidden.view(*hidden.shape[:2], self.heads, -1).transpose(1, 2)
            attended = functional.scaled_dot_product_attention(split, split, split, is_causal=True)
            hidden = attended.transpose(1, 2).flatten(2)
        return x + torch.tanh(self.linear(hidden))


class Net(nn.Module):
    def __init__(self, width: int, heads: int = 0) -> None:
        super().__init__()
        self.emb, self.blocks = nn.Embedding(7, width), nn.ModuleList([Block(width, heads), Block(width, heads)])
        self.branch, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens: Tensor, branch: bool = True, unit: bool = True) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks if unit else self.blocks[:1]:
            x = block(x)
        if branch:
            x = x + self.branch(x)
        return self.head(x)


class Second(nn.Module):
    """What the second optimizer of manual optimization trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TrustRatio(torch.optim.Optimizer):
    """Steps by the norms of whole tensors, with momentum; later steps of a parameter are shorter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state.update(steps=0, momentum=torch.zeros_like(one))
                state["steps"] += 1
                ratio = (1 + one.norm()) / (1 + one.grad.norm())
                state["momentum"].mul_(0.9).add_(one.grad * ratio)
                one.sub_(state["momentum"] * (group["lr"] / (1 + state["steps"] / 10)))
        return loss


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Rows of a rank, or of all ranks in the order of ranks within each batch."""

    def __init__(self, num_batches: int, rank: int | None) -> None:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 7, (num_batches, WORLD_SIZE, ROWS, 4), generator=generator)
        targets = torch.randn(num_batches, WORLD_SIZE, ROWS, 4, 3, generator=generator)
        chosen = slice(None) if rank is None else slice(rank, rank + 1)
        self.tokens, self.targets = tokens[:, chosen].flatten(0, 2), targets[:, chosen].flatten(0, 2)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.targets[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, data: Data) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.data[index] for index in range(len(self.data)))


def loader(num_batches: int, rank: int | None, module: Module | None = None, iterable: bool = False) -> Any:
    data, scaled_by = Data(num_batches, rank), module if module is not None and module.script.scaled_targets else None

    def collate(samples: Any) -> Any:
        tokens, targets = default_collate(samples)
        if scaled_by is not None:
            targets = targets / (1 + next(scaled_by.net.blocks.parameters()).detach().norm().cpu())
        return tokens, targets

    return DataLoader(
        Stream(data) if iterable else data,
        ROWS * (WORLD_SIZE if rank is None else 1),
        collate_fn=collate,
    )


class Module(LightningModule):
    """The user's module; ``rank`` None plays all ranks in one process, and so does each rank that ``sees_all``."""

    def __init__(self, script: Script, rank: int | None, seed: int = 1, *, sees_all: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net(script.width, script.heads)
        self.sees_all = sees_all or rank is None
        if script.manual:
            self.second = Second()
        self.script, self.rank = script, rank
        for block in self.blocks():
            block.recomputes = rank is None and script.option == "recompute"
        self.automatic_optimization = script.manual is None
        self.skip_at: int | None = None
        self.num_items = 0
        """Of the last micro-batch."""
        self.seen: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        out = self.net(tokens)
        return self.second(out) if self.script.manual else out

    def _uses_branch(self, batch_idx: int, rank: int) -> bool:
        unused = self.script.unused
        return not (
            unused == "never"
            or (unused == "batch" and batch_idx % 2)
            or (unused == "late" and batch_idx < 2)
            or (unused == "rank" and rank != batch_idx % 2)
        )

    def _uses_unit(self, batch_idx: int, rank: int) -> bool:
        unused = self.script.unused
        return not ((unused == "unit" and batch_idx % 2) or (unused == "unit_rank" and rank != batch_idx % 2))

    @property
    def ranks(self) -> list[int]:
        """Those that are played here."""
        return list(range(WORLD_SIZE)) if self.rank is None or self.sees_all else [self.rank]

    def _loss(self, batch: list[Tensor], batch_idx: int, second: bool, by_items: bool = False) -> Tensor:
        ranks, losses = self.ranks, []
        for rank, tokens, targets in zip(ranks, batch[0].chunk(len(ranks)), batch[1].chunk(len(ranks)), strict=True):
            out = self.net(tokens, self._uses_branch(batch_idx, rank), self._uses_unit(batch_idx, rank))
            if second:
                out = self.second(out)
            if by_items:
                num_items = num_items_of(batch_idx, rank)
                out, targets = out.flatten(0, 1)[:num_items], targets.flatten(0, 1)[:num_items]
            alone = by_items and self.rank is None  # sums, which `ItemsByHand` divides at the end of the window
            loss = functional.mse_loss(out, targets, reduction="sum" if alone else "mean")
            losses.append(loss * self.trainer.accumulate_grad_batches / targets.shape[-1] if alone else loss)
        loss = torch.stack(losses).mean()
        first: Any = self.net.blocks[0]
        if not self.script.penalty or first.num_batches <= 2:
            return loss
        penalty: Tensor = 0.5 * first.linear.weight.square().mean()
        if by_items and self.rank is None:
            num_items = sum(num_items_of(batch_idx, rank) for rank in ranks)
            penalty = penalty * num_items * self.trainer.accumulate_grad_batches / len(ranks)
        return loss + penalty

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        for block in self.blocks():
            block.num_batches += 1
        if self.script.manual is None:
            loss = self._loss(batch, batch_idx, second=False, by_items=self.script.items)
            self.num_items = sum(num_items_of(batch_idx, rank) for rank in self.ranks)
            return {"loss": loss, "num_items": self.num_items} if self.script.items else loss
        for optimizer, second in zip(self.optimizers(), (False, True), strict=True):
            toggles = "t" in self.script.manual
            if toggles:
                self.toggle_optimizer(optimizer)
            loss = self._loss(batch, batch_idx, second)
            steps = (batch_idx + 1) % self.script.every == 0
            for action in self.script.manual:
                if (
                    action == "z"
                    and (batch_idx if self.script.manual.index("z") == 0 else batch_idx + 1) % (self.script.every) == 0
                ):
                    optimizer.zero_grad()
                elif action == "b":
                    self.manual_backward(loss)
                elif action == "s" and steps:
                    optimizer.step()
            if toggles:
                self.untoggle_optimizer(optimizer)
        return None

    def blocks(self) -> list[Block]:
        return [one for one in self.modules() if isinstance(one, Block)]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skip_at else None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, batch_idx, second=self.script.manual is not None)

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs.item() if self.sees_all else _sum_over_ranks(outputs) / WORLD_SIZE)

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])

    def on_predict_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs.sum().item() if self.sees_all else _sum_over_ranks(outputs))

    def configure_optimizers(self) -> Any:
        owners = [self.net, self.second] if self.script.manual else [self]
        optimizers = [self._optimizer(owner) for owner in owners]
        if self.script.schedule is None:
            return optimizers
        schedules = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(one, 2, 0.5), "interval": self.script.schedule}
            for one in optimizers
        ]
        return optimizers, schedules

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        parameters: Any = list(module.parameters())
        if self.script.over == "groups":
            named = list(module.named_parameters())
            parameters = [
                {"params": [p for name, p in named if "bias" not in name]},
                {"params": [p for name, p in named if "bias" in name], "lr": 0.02},
            ]
        elif self.script.over == "part":
            parameters = [p for name, p in module.named_parameters() if "0" in name or "head" in name]
        if self.script.optimizer == "ratio":
            return TrustRatio(parameters, lr=0.02)
        if self.script.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
        decay = 0.1 if self.script.optimizer == "decay" else 0.0
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=decay)


def num_items_of(batch_idx: int, rank: int) -> int:
    """Return how many tokens of a batch have a loss, at most `ROWS` * 4; none on one rank of some batches."""
    return (3, 8, 1, 0, 5)[(batch_idx * WORLD_SIZE + rank) % 5]


def _sum_over_ranks(values: Tensor) -> float:
    total = values.detach().sum()
    dist.all_reduce(total)
    return total.item()


def _clamp(module: Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.3, 0.3)


@torch.no_grad()
def _edit_rows(module: Module) -> None:
    block: Any = module.net.blocks[0]
    module.net.head.weight[0].mul_(0.5)
    block.linear.weight[:2] = 0.1


def _assign(module: Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.9


@torch.no_grad()
def _add_noise(module: Module) -> None:
    torch.manual_seed(len(module.seen))
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.01)


def _divide_by_norms(module: Module) -> None:
    for parameter in module.parameters():
        parameter.data.div_(1 + parameter.data.norm())


def _normalize_gradients(module: Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 / (1 + parameter.grad.norm()))


_EDITS: dict[str, Callable[[Module], None]] = {
    "clamp": _clamp,
    "rows": _edit_rows,
    "assign": _assign,
    "noise": _add_noise,
    "norms": _divide_by_norms,
    "gradients": _normalize_gradients,
}


class Events(Callback):
    """Lets the script's events happen, and swaps weights around validation."""

    def __init__(self, fit: Fit, save: Callable[[Trainer], None]) -> None:
        self.fit, self.save = fit, save
        self.counts: dict[str, int] = {}
        self.weights: list[Tensor] = []

    def _happen(self, hook: str, trainer: Trainer, module: Module) -> None:
        count = self.counts.get(hook, 0)
        self.counts[hook] = count + 1
        for event in self.fit.events:
            if (event.hook, event.count) == (hook, count):
                self._do(event.action, trainer, module)

    def _do(self, action: str, trainer: Trainer, module: Module) -> None:
        if action == "save":
            self.save(trainer)
        elif action == "stop":
            trainer.should_stop = True
        elif action == "raise":
            raise Planned
        elif action == "sample":
            with torch.no_grad():
                module.seen.append(module(torch.arange(4, device=module.device)[None]).sum().item())
        elif action == "part":
            block: Any = module.net.blocks[1]
            module.seen.append(block.linear(torch.ones(2, 5, device=module.device)).sum().item())
            module.seen.append(module.net.head(torch.ones(2, 5, device=module.device)).sum().item())
        elif action in _EDITS:
            _EDITS[action](module)
        elif action == "read":
            module.seen.append(_total(module))
        elif action == "draft":
            module.seen.append(module(torch.arange(4, device=module.device)[None]).sum().item())
        elif action == "adversary":
            x = torch.ones(2, 5, device=module.device, requires_grad=True)
            module.seen.append(torch.autograd.grad(module.net.blocks[0](x).square().sum(), x)[0].sum().item())
        elif action in ("freeze", "thaw"):
            module.net.blocks[0].requires_grad_(action == "thaw")

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.fit.swap:
            with torch.no_grad():
                self.weights = [parameter.detach().clone() for parameter in pl_module.parameters()]
                for parameter in pl_module.parameters():
                    parameter.copy_(parameter * 0.5)
        self._happen("on_validation_start", trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._happen("on_validation_end", trainer, pl_module)
        if self.fit.swap:
            with torch.no_grad():
                for parameter, weights in zip(pl_module.parameters(), self.weights, strict=True):
                    parameter.copy_(weights)


class ItemsByHand(Callback):
    """Divides the gradients of a window by its items, on one device without a strategy of ours."""

    num_items = 0

    def on_before_zero_grad(self, *_: Any) -> None:
        self.num_items = 0

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        self.num_items += pl_module.num_items

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(WORLD_SIZE / self.num_items)


class Averaging(ShardedEMA):
    """Looks at the averages at the end."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        with self.averaged_weights(trainer), torch.no_grad():
            pl_module.seen.append(pl_module(torch.arange(4, device=pl_module.device)[None]).sum().item())


def _add_hook(name: str) -> None:
    def hook(self: Events, trainer: Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        self._happen(name, trainer, pl_module)

    setattr(Events, name, hook)


for _name in HOOKS:
    if _name not in Events.__dict__:
        _add_hook(_name)


def _total(module: Module) -> float:
    """The sum of all weights."""
    return torch.stack([parameter.detach().sum() for parameter in module.parameters()]).sum().item()


@dataclass
class Record:
    """What one fit left."""

    outcome: str
    global_step: int
    weights: dict[str, Tensor]
    optimizers: list[dict[Any, Any]]
    rates: list[float]
    counts: list[int]
    """Batches, as the blocks have counted them."""
    seen: list[float] = field(default_factory=list)


def _play(
    script: Script,
    strategy: Callable[[], Any],
    rank: int | None,
    folder: Path,
    where: Mapping[str, Any],
    sees_all: bool = False,
) -> list[Record]:
    """Run the script in this process, on the devices that the Trainer's settings name."""
    data_rank = None if sees_all else rank
    records: list[Record] = []
    module: Module | None = None
    last: list[str] = []
    for number, fit in enumerate(script.fits):
        if module is None or fit.start == "fresh":
            module = Module(script, rank, seed=number + 1, sees_all=sees_all)
        module.seen, module.skip_at = [], fit.skip_at
        if rank is None:
            module.zero_grad()  # a fit begins without gradients

        def save(trainer: Trainer, number: int = number) -> None:
            path = f"{URL if script.remote and rank is not None else ''}{folder}/{number}-{len(last)}.ckpt"
            trainer.save_checkpoint(path)
            last.append(path)

        trainer = Trainer(
            strategy=strategy(),
            max_epochs=fit.epochs if fit.start == "same" or not last else fit.epochs + 2 * number,
            accumulate_grad_batches=1 if script.manual else fit.accumulate,
            gradient_clip_val=None if script.manual else fit.clip,
            limit_train_batches=fit.limit,
            val_check_interval=fit.validate_every,
            check_val_every_n_epoch=None if fit.validate_every else 1,
            callbacks=[
                *([ItemsByHand()] if script.items and rank is None else []),
                Events(fit, save),
                *([] if script.average is None else [Averaging(0.7, every_n_steps=script.average)]),
                *([] if rank is None else [Watchdog(dirpath=f"{folder}/watchdog"), ReplicaCheck(every_n_steps=1)]),
            ],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            **where,
        )
        validation = loader(2, data_rank, module) if fit.validate_every or fit.call == "validate" else None
        path = last[-min(fit.back, len(last))] if fit.start != "same" and last else None
        try:
            if fit.call == "fit":
                trainer.fit(module, loader(fit.batches, data_rank, module, script.iterable), validation, ckpt_path=path)
            elif fit.call == "validate":
                trainer.validate(module, validation, ckpt_path=path, verbose=False)
            else:
                trainer.predict(module, loader(2, data_rank, module), ckpt_path=path)
            outcome = "done"
        except Planned:
            outcome = "raised"
        if rank is None:
            weights = {name: one.cpu().clone() for name, one in module.state_dict().items() if isinstance(one, Tensor)}
        else:
            weights = {name: tensor.cpu().clone() for name, tensor in _weights(trainer, module).items()}
        trainer_optimizers = trainer.optimizers
        is_zero = hasattr(trainer.strategy, "deepspeed_plugin")
        states = [{} if is_zero else trainer.strategy.optimizer_state(one) for one in trainer_optimizers]
        rates = [float(group["lr"]) for one in trainer_optimizers for group in one.param_groups]
        counts = [block.num_batches for block in module.blocks()]
        records.append(
            Record(outcome, trainer.global_step, weights, [_plain(s) for s in states], rates, counts, module.seen)
        )
        if fit.call == "fit":
            save(trainer)
    return records


def _weights(trainer: Trainer, module: Module) -> dict[str, Tensor]:
    if hasattr(trainer.strategy, "deepspeed_plugin"):
        with full_parameters(trainer.strategy, module, writeback=False) as parameters:
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}
    state = trainer.strategy.lightning_module_state_dict()
    return {
        name: one.full_tensor() if hasattr(one, "full_tensor") else _whole(one)
        for name, one in state.items()
        if isinstance(one, Tensor)
    }


def _whole(tensor: Any) -> Tensor:
    """The whole of one of FSDP1's ShardedTensors."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    device = tensor.local_tensor().device
    out = torch.zeros(tensor.size(), device=device) if dist.get_rank() == 0 else None
    tensor.gather(0, out)
    return torch.zeros(()) if out is None else out


def _plain(state: dict[str, Any]) -> dict[Any, Any]:
    if not state or any(isinstance(key, str) for key in state["state"]):
        return {}  # not rank 0, or sharded
    return {
        (number, name): value.cpu().clone() if isinstance(value, Tensor) else value
        for number, values in state["state"].items()
        for name, value in values.items()
        if value is not None
    }


def plain(script: Script) -> list[Record]:
    """Run a script on one device, with the batches of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return _play(script, lambda: "auto", None, Path(folder), {"accelerator": "cpu", "devices": 1})


def build_strategy(kind: str, script: Script) -> Any:
    """Return a strategy of the kind, ``ddp`` included."""
    if kind == "ddp":
        return "ddp_find_unused_parameters_true"
    accumulation = GradientAccumulationPlugin()
    average_over: Any = "items" if script.items else "micro_batches"
    if kind.startswith("zero"):
        from accelight.strategies import AccelDeepSpeedStrategy

        config = {"train_micro_batch_size_per_gpu": ROWS, **ds_config(int(kind[-1]))}
        return AccelDeepSpeedStrategy(
            hf_ds_config=config,
            find_unused_parameters=True,
            gradient_accumulation=replace(accumulation, average_over=average_over),
            **({} if script.option is None else OPTIONS[script.option]["zero"]),
        )
    from accelight.strategies import AccelFSDPStrategy, ParallelismConfig

    form = "sharded_state_dict" if script.sharded else "full_state_dict"
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    options: dict[str, Any] = {
        "state_dict_type": form,
        "auto_wrap_policy": ModuleWrapPolicy({Block}),
        "gradient_accumulation": accumulation,
        "whole_tensor_optimizers": script.optimizer == "ratio" or None,
    }
    if kind in ("fsdp2", TENSOR_PARALLEL, *SEQUENCE_PARALLEL):
        options["fsdp_version"] = 2
    if kind == TENSOR_PARALLEL:
        cut = {"net.blocks.0.linear": "colwise_rep", "net.blocks.1.linear": "rowwise_rep", "net.head": "rowwise_rep"}
        options |= {"parallelism_config": ParallelismConfig(tp_size=WORLD_SIZE), "tp_plan": cut}
    elif kind in SEQUENCE_PARALLEL:
        sizes = {SEQUENCE_PARALLEL[kind]: WORLD_SIZE}
        options |= {"parallelism_config": ParallelismConfig(**sizes), "sequence_modules": ["net"]}
    elif kind == "fsdp1_flat":
        options["use_orig_params"] = False
    elif kind == "fsdp1":
        options["use_orig_params"] = True
    if script.option is not None:
        options.update(OPTIONS[script.option]["fsdp1" if kind.startswith("fsdp1") else "fsdp2"])
    options["gradient_accumulation"] = replace(options["gradient_accumulation"], average_over=average_over)
    return AccelFSDPStrategy(**options)


def play_on_rank(script: Script, kind: str, folder: str, on_gpu: bool = False) -> list[Record]:
    """Run a script on this rank, in a group of all."""
    where = share_a_device() if on_gpu else {"accelerator": "cpu", "devices": WORLD_SIZE}
    with late_saves() if script.option == "background" else nullcontext():
        sees_all = kind in (TENSOR_PARALLEL, *SEQUENCE_PARALLEL)
        return _play(script, lambda: build_strategy(kind, script), dist.get_rank(), Path(folder), where, sees_all)


def run(script: Script, kind: str, *, on_gpu: bool = False) -> list[Record]:
    """Run a script on all ranks; what rank 0 has to say."""
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(WORLD_SIZE, play_on_rank, script, kind, folder, on_gpu, timeout_s=60)[0]


def differences(found: list[Record], expected: list[Record], *, tolerance: float = 1e-5) -> list[str]:
    """Return what differs, a line each. fp32 sums in another order: 1e-5 on weights of order 1.

    Optimizer states are sums of gradients, which differ by the curvature times as much: 8e-6 was seen where weights
    differ by 7e-7.
    """
    lines: list[str] = []
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        where = f"fit {number}"
        for name in ("outcome", "global_step", "counts"):
            if getattr(mine, name) != getattr(theirs, name):
                lines.append(f"{where}: {name} {getattr(mine, name)}, expected {getattr(theirs, name)}")
        for name, weight in theirs.weights.items():
            error = (mine.weights[name] - weight).abs().max().item() if name in mine.weights else float("nan")
            if not error <= tolerance:
                lines.append(f"{where}: {name} off by {error:.2g}")
        if mine.rates != theirs.rates:
            lines.append(f"{where}: learning rates {mine.rates}, expected {theirs.rates}")
        lines += _differing_states(where, mine, theirs, 4 * tolerance)
        if len(mine.seen) != len(theirs.seen) or any(
            not abs(a - b) <= 20 * tolerance for a, b in zip(mine.seen, theirs.seen, strict=True)
        ):
            lines.append(f"{where}: hooks saw {mine.seen}, expected {theirs.seen}")
    return lines


def _differing_states(where: str, mine: Record, theirs: Record, tolerance: float) -> list[str]:
    lines = []
    for index, (state, expected) in enumerate(zip(mine.optimizers, theirs.optimizers, strict=True)):
        if not state and expected and any(mine.optimizers):
            lines.append(f"{where}: optimizer {index} has no state")
        for key in sorted(set(state) | set(expected), key=str) if state else ():
            if key not in state or key not in expected:
                lines.append(f"{where}: optimizer {index} {key}: {'missing' if key in expected else 'unexpected'}")
            elif not (torch.as_tensor(state[key]) - torch.as_tensor(expected[key])).abs().max() <= tolerance:
                lines.append(f"{where}: optimizer {index} {key} differs")
    return lines


def refusals(script: Script, kind: str) -> list[str]:
    """Return the words with which a kind of strategy may refuse a script that plain ``ddp`` runs."""
    is_fsdp, is_flat, is_zero = kind.startswith("fsdp"), kind == "fsdp1_flat", kind.startswith("zero")
    has_units = script.option not in ("one_unit", "find_unused")
    events = [event for fit in script.fits for event in fit.events]
    actions = {event.action for event in events}
    between = ("on_before_zero_grad", "on_before_backward")
    possible = {
        "p.grad was used in a hook while gradients accumulate": "gradients" in actions
        and any(fit.accumulate > 1 for fit in script.fits),
        "A flat parameter of FSDP1 was used": is_flat and bool({*_OF_WHOLE_TENSORS, "gradients", "read"} & actions),
        "was used while it is sharded": is_flat and (script.penalty or "rows" in actions),
        "optimizer got an empty parameter list": is_flat and script.over == "part" and not has_units,  # torch's own
        "use_orig_params=True": is_flat
        and (
            script.over != "all"
            or script.unused in ("batch", "late", "never")
            or (not has_units and (script.unused == "unit" or bool({"freeze", "thaw"} & actions)))
        ),
        "Processes use different parts of the model at the same time": is_fsdp
        and script.unused == "unit_rank"
        and has_units,
        "p.grad was used in a hook after the optimizer step": is_zero
        and any(
            event.action == "gradients" and event.hook not in ("on_after_backward", "on_before_optimizer_step")
            for event in events
        ),
        "a DeepSpeed engine has only one": is_zero and script.manual is not None,
        "was frozen when ": is_zero  # fit() began, or the checkpoint was saved
        and "freeze" in actions
        and ("thaw" in actions or any(fit.start == "fresh" for fit in script.fits)),
        "was trained when ": is_zero and "freeze" in actions,
        "Activation checkpointing recomputed something other than the forward": is_fsdp
        and script.option == "recompute"
        and any(event.action in ("freeze", "thaw") and event.hook in between for event in events),
        "p.data = value in on_before_": any(event.action == "assign" and event.hook in between for event in events),
        "User code ran another backward between training_step() and its backward": kind.startswith("fsdp1")
        and any(event.action == "adversary" and event.hook in between for event in events),
    }
    return [words for words, holds in possible.items() if holds]


def check(script: Script, kind: str, *, on_gpu: bool = False) -> None:
    """Run a script both ways.

    Args:
        script: What to run.
        kind: Of strategy.
        on_gpu: Whether the ranks share a GPU; one device is the CPU even then.

    Raises:
        AssertionError: If they differ, with the script as code.
    """
    if kind.startswith("zero") and script.option is not None and "zero" not in OPTIONS[script.option]:
        script = replace(script, option=None)
    if kind == TENSOR_PARALLEL:  # which steps on parts, and whose ranks have the same items
        optimizer = "sgd" if script.optimizer == "ratio" else script.optimizer
        script = replace(script, width=6, items=False, optimizer=optimizer)
    if kind in SEQUENCE_PARALLEL:
        script = replace(script, width=6, items=False, heads=2)
    again = f'python -m tests.strategies.orders "{script}" {kind}'
    refused = refusals(script, kind)
    try:
        expected = plain(script)
    except Exception:  # noqa: BLE001 (what one device cannot do is no measure)
        return
    try:
        found = run(script, kind, on_gpu=on_gpu)
    except AssertionError as error:
        if any(words in str(error) for words in refused):
            return
        raise AssertionError(f"{error}\n\n{again}") from None
    # Kernels of CUDA add up in another order than those of the CPU.
    wrong = differences(found, expected, tolerance=1e-4 if on_gpu else 1e-5)
    assert not wrong, "\n".join([*wrong, "", again])


if __name__ == "__main__":
    check(eval(sys.argv[1]), sys.argv[2])
    print("equal")
