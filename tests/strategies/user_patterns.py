"""What users' code does to parameters, gradients and buffers: small modules, and what each engine makes of them.

Each class is a pattern of code that people write for ``ddp``. `PATTERNS` says for each engine that it trains as under
``ddp``, or how it is refused. ``test_user_code.py`` trains them; ``python -m tools.docs.user_code`` writes the tables
of ``docs/fsdp.md`` and ``docs/deepspeed.md``.
"""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread, Timer
from typing import Any, ClassVar, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, distributed, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from typing_extensions import Self

from accelight.strategies import full_state_dict

INPUTS, WIDTH, OUTPUTS = 5, 7, 3
"""Odd, so that shards differ in size."""
HIDDEN = 16
"""Which tensor parallelism divides."""


class Block(nn.Module):
    """What the wrap policy names."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between two layers that are the root's."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.blocks = nn.Sequential(Block(norm), Block(norm))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


class Stopped(Exception):  # noqa: N818 (no error of the pattern: the next fit goes on)
    """Ends the fit that it is raised in."""


class Pattern(LightningModule):
    """Plain training; each pattern changes something of it."""

    fits: ClassVar[int] = 1
    """One after the other, each with a Trainer of its own."""
    epochs: ClassVar[int] = 2
    accumulate: ClassVar[int] = 1
    accumulate_later: ClassVar[int | None] = None
    """Of fits after the first; None for the same."""
    resumes: ClassVar[str] = ""
    """The ``state_dict_type`` of the checkpoint that the second fit, of a new module, resumes from; "" for none."""
    is_evaluated: ClassVar[bool] = False
    """Whether a Trainer of its own validates the module between two fits."""
    validates: ClassVar[bool] = False
    leaves_unused: ClassVar[bool] = False
    """Whether ``ddp`` needs ``find_unused_parameters``."""
    ignored: ClassVar[str | None] = None
    """``ignored_modules`` of FSDP."""
    referee: ClassVar[type[Pattern] | None] = None
    """A pattern that means the same, where ``ddp`` is wrong itself: it reduces only the first backward of a step."""
    model: Net

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = self.build()
        self.seen: dict[str, float] = {}

    def build(self) -> Net:
        return Net()

    def callbacks(self) -> list[Callback]:
        return []

    def data(self, training: Any, validation: Any) -> dict[str, Any]:
        """Return where ``fit`` has its batches from."""
        return {"train_dataloaders": training, "val_dataloaders": validation}

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.model(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def groups(self) -> Any:
        return self.parameters()

    def configure_optimizers(self) -> Any:
        return SGD(self.groups(), lr=0.05, momentum=0.9)

    def see(self, name: str, value: Any) -> None:
        """Record a number that must be the one of ``ddp``."""
        self.seen[f"{name}{len(self.seen)}"] = float(value)

    @property
    def first(self) -> Any:
        """A linear layer inside a unit."""
        return self.model.blocks[0].up


@dataclass(frozen=True)
class Refused:
    """An engine's answer to what it cannot do."""

    match: str
    """Of the error, as ``pytest.raises`` has it."""
    instead: str
    """What to write, as the docs have it."""


@dataclass(frozen=True)
class Entry:
    """A pattern in the table."""

    module: type[Pattern]
    does: str
    """A row of the docs; patterns with the same words have the same answers."""
    answers: dict[str, Refused]
    """By engine; where there is none, weights and numbers are those of ``ddp``."""
    core: bool

    @property
    def name(self) -> str:
        return self.module.__name__


ENGINES = ("fsdp1", "fsdp2", "zero2", "zero3")
PATTERNS: dict[str, Entry] = {}
_Module = TypeVar("_Module", bound=type[Pattern])


def pattern(does: str, *, core: bool = False, **answers: Refused) -> Callable[[_Module], _Module]:
    """Put a class into `PATTERNS`."""

    def add(module: _Module) -> _Module:
        PATTERNS[module.__name__] = Entry(module, does, answers, core)
        return module

    return add


# ------------------------------------------------------------------ optimizer groups
GROUPS = "groups by `ndim`, shape, fan-in, `numel()`, name, or what `__init__` kept"


@pattern(GROUPS, core=True)
class DecayByDimensions(Pattern):
    def groups(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        matrices, vectors = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
        return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]


@pattern(GROUPS)
class RateByFanIn(Pattern):
    def groups(self) -> Any:
        return [{"params": [p], "lr": 0.3 / (p.shape[1] if p.dim() == 2 else p.shape[0])} for p in self.parameters()]


@pattern(GROUPS)
class RateBySize(Pattern):
    def groups(self) -> Any:
        total = sum(p.numel() for p in self.parameters())
        return [{"params": [p], "lr": 0.1 - 0.05 * p.numel() / total} for p in self.parameters()]


@pattern(GROUPS)
class LargestFirst(Pattern):
    def groups(self) -> Any:
        ordered = sorted(self.parameters(), key=lambda p: (-p.numel(), p.ndim))
        return [{"params": ordered[:3], "lr": 0.01}, {"params": ordered[3:]}]


@pattern(GROUPS)
class DecayByName(Pattern):
    def groups(self) -> Any:
        named = dict(self.named_parameters())
        plain = [p for name, p in named.items() if name.endswith("bias") or ".norm." in name]
        others = [p for p in named.values() if all(p is not q for q in plain)]
        return [{"params": plain, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.3}]


def _names_outside_norms(module: nn.Module) -> list[str]:
    """Return names of parameters, by children and their classes, as transformers' ``get_parameter_names`` does."""
    found = [name for name in module._parameters if name != "bias"]
    for name, child in module.named_children():
        if not isinstance(child, nn.LayerNorm):
            found += [f"{name}.{inner}" for inner in _names_outside_norms(child)]
    return found


@pattern(GROUPS)
class DecayByChildren(Pattern):
    def groups(self) -> Any:
        decays = set(_names_outside_norms(self))
        named = [*self.named_parameters()]
        return [
            {"params": [p for name, p in named if name in decays], "weight_decay": 0.3},
            {"params": [p for name, p in named if name not in decays], "weight_decay": 0.0},
        ]


@pattern(GROUPS)
class RateByClass(Pattern):
    def groups(self) -> Any:
        blocks = [each for each in self.model.blocks.children() if isinstance(each, Block)]
        inner = [p for each in blocks for p in each.parameters()]
        others = [p for p in self.parameters() if all(p is not one for one in inner)]
        return [{"params": inner, "lr": 0.01}, {"params": others}]


@pattern(GROUPS)
class GroupsKeptByInit(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = [p for p in self.model.parameters() if p.ndim == 2]
        self.ids = {id(p) for p in self.matrices}

    def groups(self) -> Any:
        others = [p for p in self.parameters() if id(p) not in self.ids]
        return [{"params": self.matrices, "lr": 0.01}, {"params": others}]


@pattern(GROUPS)
class OnlyBiasesTrain(Pattern):
    def configure_optimizers(self) -> Any:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("bias" in name)
        return SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    leaves_unused = True


ATTRIBUTES = "attributes of parameters, parameters kept in lists"


@pattern(ATTRIBUTES)
class MarkedParameters(Pattern):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.model.blocks.parameters():
            parameter.without_decay = True  # type: ignore[attr-defined]

    def groups(self) -> Any:
        marked = [p for p in self.parameters() if hasattr(p, "without_decay")]
        others = [p for p in self.parameters() if not hasattr(p, "without_decay")]
        return [{"params": marked, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.3}]


@pattern(ATTRIBUTES, core=True)
class MarksOfSecondFit(MarkedParameters):
    fits = 2


@pattern(ATTRIBUTES)
class ListKeptByInit(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.biases = [p for name, p in self.model.named_parameters() if "bias" in name]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for bias in self.biases:
                bias.mul_(0.9)


KEPT = "parameters kept in closures, globals, `functools.partial` and `__slots__` before training"


class _Slots:
    __slots__ = ("parameters",)

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)


@pattern(KEPT, core=True)
class ParametersKeptOutsideOfModules(Pattern):
    def __init__(self) -> None:
        super().__init__()
        parameters = list(self.model.blocks.parameters())
        self.norm = lambda: sum(p.detach().norm() for p in parameters)
        self.decay = functools.partial(torch._foreach_mul_, [self.model.head.weight], 0.9)
        self.slots = _Slots(self.model.embed.parameters())

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.see("norm", self.norm())
        self.decay()
        for parameter in self.slots.parameters:
            parameter[0] *= 0.9
        self.see("embed", self.model.embed.weight.norm())


@pattern(KEPT)
class FunctionTransformsBesideWhatIsKept(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"data": self.first.weight.data}

    def on_train_start(self) -> None:
        self.row = self.first.weight.data[0]

    def on_train_batch_end(self, *_: Any) -> None:
        norms = torch.vmap(lambda row: row.pow(2).sum())(torch.ones(3, 2))
        slopes = torch.func.grad(lambda x: x.pow(2).sum())(torch.ones(3))
        self.see("sum", norms.sum() + slopes.sum() + self.row.sum())


@pattern(KEPT)
class DetachedRows(Pattern):
    def on_train_start(self) -> None:
        weight = self.first.weight
        self.rows = [weight[0].detach(), weight[1].data, weight.detach()[2].detach()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.see("sum", sum(row.sum() for row in self.rows))
        self.rows[0][:2].mul_(0.9)


@pattern(KEPT)
class PenaltyOfKeptParameters(Pattern):
    def __init__(self) -> None:
        super().__init__()
        weight = self.model.head.weight
        self.penalty = lambda: weight.detach().pow(2).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * (1 + self.penalty())


BEFORE = Refused("shares memory with '.*' as it was before the model was sharded", "the parameter, where it is used")


@pattern(
    "`p.data`, a view or a bound method of it, kept since `__init__`",
    core=True,
    **dict.fromkeys(ENGINES, BEFORE),
)
class DataKeptByInit(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.clampers = [p.data.clamp_ for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        for clamp in self.clampers:
            clamp(-0.2, 0.2)


FREED = Refused("or a part of one, that a training step or a forward has kept", "a copy (`w[0].detach().clone()`)")
LOST = Refused("shares memory with '.*' as it was when a training step had gathered it", FREED.instead)


@pattern("a hook that reads a part of a parameter that `training_step` has kept", fsdp1=FREED, fsdp2=FREED, zero3=LOST)
class RowKeptByStep(Pattern):
    def loss(self, batch: Any) -> Tensor:
        self.rows = [self.model.head.weight[0]]
        return super().loss(batch) + 0.1 * self.rows[0].sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.see("sum", self.rows[0].detach().sum())


@pattern("a step that reads a part of a parameter that an earlier step has kept", zero3=LOST)
class RowKeptForLaterSteps(Pattern):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 0:
            self.rows = [self.first.weight[0].detach(), self.model.head.weight[0].detach()]
        self.see("sum", self.rows[0].sum() + self.rows[1].sum())
        return self.loss(batch)


# ------------------------------------------------------------------ element by element
ELEMENTS = "in-place changes of every element in hooks: clamp, scale, masks, also through `.data`"


@pattern(ELEMENTS, core=True)
class ClampData(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


@pattern(ELEMENTS)
class DecayByHand(Pattern):
    def on_train_batch_start(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.model.blocks.parameters():
                parameter.mul_(0.97).sub_(parameter.sign(), alpha=1e-3)


@pattern(ELEMENTS)
class ScaleByForeach(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(self.parameters()), 0.95)


@pattern(ELEMENTS)
class MasksOfFullShape(Pattern):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.masks = {name: torch.rand(p.shape, generator=generator) > 0.4 for name, p in self.model.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.mul_(self.masks[name].to(self.device))


@pattern(ELEMENTS)
class KeepAboveThreshold(Pattern):
    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.data[parameter.data.abs() < 0.05] = 0


# ------------------------------------------------------------------ rows
ROWS = "edits of rows, columns and slices in hooks"


@pattern(ROWS, core=True)
class RowsAndElementsInTurn(Pattern):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.first.weight
        row, flat = weight[1], weight.data.view(-1)
        weight[2].zero_()
        weight.mul_(0.9)
        row.add_(0.1)
        weight.data.clamp_(-0.5, 0.5)
        weight[0].data.mul_(0.5)
        flat[3:5] = 0.2
        self.see("sum", weight.data.abs().sum())


@pattern(ROWS)
class ValuesWrittenThroughNumPy(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        values = self.first.weight.detach().numpy()
        values *= 0.9
        self.see("sum", self.first.weight.abs().sum())


@pattern(ROWS, core=True)
class RowsKeptFromHookToHook(Pattern):
    def on_train_start(self) -> None:
        self.rows = [self.first.weight.data[0], self.model.head.weight.detach().view(-1)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.see("sum", sum(each.sum() for each in self.rows))
        for each in self.rows:
            each.mul_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.see("norm", self.rows[0].norm())
        return self.loss(batch)


@pattern(ROWS, core=True)
class ZeroRows(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.first.weight[2].zero_()
            self.model.head.weight[1:, :3].mul_(0.5)
            self.model.embed.bias[:4] = 0.1


@pattern(ROWS)
class ChunksOfRows(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.first.weight.chunk(3)[1].mul_(0.8)
            self.first.weight[:, 0].add_(0.01)


@pattern(ROWS)
class RowsByIndex(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        rows = torch.tensor([0, 3, 6], device=self.device)
        self.model.embed.weight.data.index_fill_(0, rows, 0.25)
        self.first.weight.data[rows] = self.first.weight.data[rows] * 0.5


@pattern(ROWS)
class LowerTriangle(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        self.model.embed.weight.data.tril_()


# ------------------------------------------------------------------ assignment
ASSIGNMENT = "`p.data = other`, `vector_to_parameters`"


@pattern(ASSIGNMENT, core=True)
class WeightsOfLayersSwapped(Pattern):
    def on_train_epoch_start(self) -> None:
        blocks: Any = self.model.blocks
        first, second = blocks[0].up.weight, blocks[1].up.weight
        before = first.detach()
        first.data, second.data = second.data, first.data
        self.see("before", before.norm())
        self.see("after", first.norm())


@pattern(ASSIGNMENT, core=True)
class AssignData(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.model.blocks.parameters():
            parameter.data = parameter.data.clamp(min=-0.3) * 0.98


@pattern(ASSIGNMENT)
class AssignFullTensors(Pattern):
    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.data = torch.full(parameter.shape, 0.02, device=self.device)


@pattern(ASSIGNMENT)
class ThroughOneVector(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        vector = nn.utils.parameters_to_vector(self.parameters())
        nn.utils.vector_to_parameters(vector * (0.99 / (1 + 1e-3 * vector.norm())), self.parameters())


BEFORE_BACKWARD = Refused(r"p.data = value in on_before_backward\(\)", "`p.data.copy_(other)`")


@pattern(
    "`p.data = other` in `on_before_backward`: some gradients of `ddp` have the old values",
    core=True,
    fsdp1=BEFORE_BACKWARD,
    fsdp2=BEFORE_BACKWARD,
    zero2=BEFORE_BACKWARD,
    zero3=BEFORE_BACKWARD,
)
class AssignBeforeBackward(Pattern):
    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.98


# ------------------------------------------------------------------ first values
MARKS = "marks that `__init__`, hooks and steps set on parameters, read in each other"


@pattern(MARKS, core=True)
class MarksReadInSteps(Pattern):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.model.head.parameters():
            setattr(parameter, "without_penalty", True)  # noqa: B010 (types know none of these)

    def loss(self, batch: Any) -> Tensor:
        marks = ("without_penalty", "seen_in_step", "seen_in_hook")
        self.see("marks", sum(hasattr(p, mark) for p in self.parameters() for mark in marks))
        for parameter in self.model.parameters():
            setattr(parameter, "seen_in_step", True)  # noqa: B010
        return super().loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see("in a hook", sum(hasattr(p, "seen_in_step") for p in self.parameters()))
        for parameter in self.model.embed.parameters():
            setattr(parameter, "seen_in_hook", True)  # noqa: B010


INIT = "`nn.init`, `reset_parameters()` in `configure_optimizers` and in hooks"


@pattern(INIT)
class XavierBeforeTraining(Pattern):
    def on_train_start(self) -> None:
        torch.manual_seed(5)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)


@pattern(INIT)
class XavierWithOptimizer(Pattern):
    def configure_optimizers(self) -> Any:
        torch.manual_seed(5)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        return super().configure_optimizers()


@pattern(INIT)
class ResetInMidTraining(Pattern):
    def on_train_epoch_start(self) -> None:
        torch.manual_seed(5)
        self.model.head.reset_parameters()
        self.first.reset_parameters()


@pattern(INIT)
class OrthogonalInMidTraining(Pattern):
    def on_train_epoch_start(self) -> None:
        torch.manual_seed(5)
        nn.init.orthogonal_(self.first.weight)


@pattern(INIT, core=True)
class InitByApply(Pattern):
    def on_fit_start(self) -> None:
        torch.manual_seed(5)
        self.model.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
            nn.init.zeros_(module.bias)


# ------------------------------------------------------------------ noise
NOISE = "noise: `randn_like(p)`, `torch.randn(p.shape)`, dropout of weights"


@pattern(NOISE, core=True)
class NoiseLikeWeights(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        torch.manual_seed(7 + self.global_step)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


@pattern(NOISE)
class NoiseOfFullShape(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        generator = torch.Generator(self.device).manual_seed(self.global_step)
        for parameter in self.parameters():
            parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator, device=self.device)


@pattern(NOISE)
class DropoutOfWeights(Pattern):
    def on_train_epoch_start(self) -> None:
        torch.manual_seed(7)
        with torch.no_grad():
            self.first.weight.copy_(functional.dropout(self.first.weight, 0.2))
            self.model.head.weight.mul_(torch.bernoulli(torch.full_like(self.model.head.weight, 0.8)))


# ------------------------------------------------------------------ norms and statistics
NORMS = "norms, means, quantiles, counts and finite checks of weights in hooks; renorm, pruning, projection"


@pattern(NORMS, core=True)
class UnitNorm(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.div_(1 + 0.1 * parameter.data.norm())


@pattern(NORMS)
class NormalizedRows(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.first.weight.copy_(functional.normalize(self.first.weight, dim=1))
            self.model.head.weight.renorm_(2, 0, 0.4)


@pattern(NORMS)
class PruneByQuantile(Pattern):
    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            size = parameter.data.abs()
            parameter.data.mul_((size > torch.quantile(size, 0.3)).float())


@pattern(NORMS)
class PruneTogether(Pattern):
    def on_train_epoch_end(self) -> None:
        every = torch.cat([p.data.abs().flatten() for p in self.parameters()])
        limit = every.kthvalue(every.numel() // 3).values
        for parameter in self.parameters():
            parameter.data.mul_((parameter.data.abs() > limit).float())


@pattern(NORMS)
class NumbersOfWeights(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        weights = list(self.parameters())
        self.see("norm", torch.stack([p.detach().norm() for p in weights]).norm())
        self.see("mean", sum(p.detach().mean() for p in weights))
        self.see("largest", max(p.abs().max().item() for p in weights))
        self.see("count", sum(p.numel() for p in weights))
        self.see("finite", all(torch.isfinite(p).all() for p in weights))
        self.see("element", self.first.weight[3, 2])


@pattern(NORMS)
class SpectrumOfAWeight(Pattern):
    def on_train_epoch_end(self) -> None:
        self.see("rank", torch.linalg.svdvals(self.first.weight.detach()).sum())
        self.see("similar", functional.cosine_similarity(self.model.head.weight[0], self.model.head.weight[1], dim=0))


@pattern(NORMS)
class EqualAndWhere(Pattern):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.first.weight
        self.see("equal", torch.equal(weight, weight.clone()) and not weight.equal(weight + 1))
        rows, columns = torch.where(weight.abs() < 0.1)
        weight[rows, columns] = 0.0
        self.see("found", len(rows))
        self.see("copy", copy.copy(weight.data).norm())


# ------------------------------------------------------------------ gradients
GRADIENTS = "gradients changed in `on_after_backward`, `on_before_optimizer_step`: scaled, masked, zeroed, noise"


@pattern(GRADIENTS, core=True)
class RowsAndElementsOfGradients(Pattern):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.first.weight.grad
        row = gradient[1]
        gradient[2].zero_()
        gradient.mul_(0.5)
        row.mul_(3.0)
        self.see("norm", self.first.weight.grad.norm())


class _HalvesGradients(LambdaCallback):
    def __init__(self) -> None:
        super().__init__(on_before_optimizer_step=self.halve)

    def halve(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.div_(1 + parameter.grad.norm())


@pattern(GRADIENTS)
class GradientsChangedByALambdaCallback(Pattern):
    def callbacks(self) -> list[Callback]:
        return [_HalvesGradients()]


FLAT = Refused("p.grad of a parameter in optimizer.param_groups", "`self.parameters()`")


@pattern("gradients of parameters in `optimizer.param_groups`", core=True, zero2=FLAT, zero3=FLAT)
class GradientsThroughGroups(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


@pattern(GRADIENTS, core=True)
class ScaleGradients(Pattern):
    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            if "blocks" in name and parameter.grad is not None:
                parameter.grad.mul_(0.1)


@pattern(GRADIENTS)
class MaskGradients(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        model: Any = self.model
        model.blocks[0].up.weight.grad[:4] = 0
        model.embed.weight.grad.mul_(torch.ones(WIDTH, INPUTS, device=self.device).tril())
        model.head.bias.grad.zero_()


@pattern(GRADIENTS)
class GradientNoise(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        torch.manual_seed(7 + self.global_step)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)


@pattern(GRADIENTS)
class DecayIntoGradients(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.data, alpha=0.1)


@pattern(GRADIENTS)
class ScaleGradientsOfWindow(ScaleGradients):
    accumulate = 2

    def on_after_backward(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        ScaleGradients.on_after_backward(self)


@pattern(GRADIENTS)
class GradientsWithoutNan(Pattern):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (float("nan") if batch_idx == 2 else 1.0)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(nan=0.0)


ASSIGNED_GRADIENTS = "`p.grad = None`, `p.grad = p.grad * 0.1`"


@pattern(ASSIGNED_GRADIENTS, core=True)
class DropGradientsOfHead(Pattern):
    def on_after_backward(self) -> None:
        if self.current_epoch == 0:
            for parameter in self.model.head.parameters():
                parameter.grad = None


@pattern(ASSIGNED_GRADIENTS)
class AssignGradients(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.1


GRADIENT_NORMS = "norms and means of gradients in hooks: centralisation, AGC, logging"


@pattern(GRADIENT_NORMS, core=True)
class CentralizeGradients(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.grad.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))


@pattern(GRADIENT_NORMS)
class AdaptiveClipping(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                most = 0.05 * parameter.detach().norm().clamp(min=1e-3)
                norm = parameter.grad.norm()
                parameter.grad.mul_(torch.where(norm > most, most / norm.clamp(min=1e-6), 1.0))


@pattern(GRADIENT_NORMS)
class NumbersOfGradients(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.see("norm", torch.stack([one.norm() for one in gradients]).norm())
        self.see("count", len(gradients))


@pattern(GRADIENT_NORMS)
class LightningsGradNorm(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        from lightning.pytorch.utilities import grad_norm

        for name, value in grad_norm(self.model, norm_type=2).items():
            self.see(name, value)


AFTER_STEP = Refused("p.grad was used in a hook after the optimizer step", "`on_before_optimizer_step`")


@pattern(
    "gradients read after the step: `on_train_batch_end`, `on_before_zero_grad`", zero2=AFTER_STEP, zero3=AFTER_STEP
)
class NumbersOfGradientsAfterTheStep(Pattern):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.model.blocks[0].zero_grad()
        self.see("missing", sum(p.grad is None for p in self.parameters()))
        self.see("norm", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))


@pattern("`zero_grad()` of a part of the module after the step")
class PartZeroedAfterTheStep(Pattern):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.model.blocks.zero_grad()


BY_HAND = "weights and gradients averaged, or broadcast, with `torch.distributed` in hooks"


@pattern(BY_HAND, core=True)
class AveragedByHand(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for p in self.parameters():
            distributed.all_reduce(p.grad)
        self.see("sum", self.first.weight.grad.norm())
        for p in self.parameters():
            gradient: Any = p.grad
            gradient.div_(4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        works = [distributed.all_reduce(p.data, async_op=True) for p in self.model.blocks.parameters()]
        for work in works:
            work.wait()
        with torch.no_grad():
            for p in self.model.blocks.parameters():
                p.mul_(0.45)


@pattern(BY_HAND)
class SumsOfRowsAndBroadcasts(Pattern):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        row = self.first.weight.data[1]
        distributed.all_reduce(row)
        self.see("row", row.norm())
        row /= 2
        distributed.broadcast(self.model.head.weight.data, 0)


@pattern(
    "`loss.backward()` in a hook, and what it leaves in `p.grad` (Fisher information)",
    fsdp1=Refused(r"backward\(\) of a loss ran in a hook", "FSDP2, manual optimization"),
    zero2=Refused("A backward reached weights without DeepSpeed's engine", "manual optimization"),
    zero3=Refused("A backward reached weights without DeepSpeed's engine", "manual optimization"),
)
class BackwardInAHook(Pattern):
    def on_train_epoch_end(self) -> None:
        self.zero_grad()
        inputs = torch.linspace(-1, 1, 4 * INPUTS, device=self.device).reshape(1, 4, INPUTS)
        self.model(inputs).pow(2).mean().backward()
        self.see("fisher", sum(p.grad.pow(2).sum() for p in self.parameters() if p.grad is not None))
        self.zero_grad()


@pattern("`strategy.grad_norm(...)` in a hook")
class NormAskedOfTheStrategy(Pattern):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        has_one_optimizer = isinstance(self.trainer.strategy, DeepSpeedStrategy)
        if hasattr(strategy, "grad_norm"):
            norm = strategy.grad_norm() if has_one_optimizer else strategy.grad_norm(optimizer)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.see("norm", norm)


CLIPPING = "`torch.nn.utils.clip_grad_norm_` of all parameters, a module, or one, in hooks"


@pattern(CLIPPING, core=True)
class ClipEachModule(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for module in self.model.children():
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)


@pattern(CLIPPING, core=True)
class ClipValuesOfSome(Pattern):
    """Frozen parameters have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model.embed.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.01)
        nn.utils.clip_grad_norm_(self.model.embed.parameters(), 0.01)


@pattern(CLIPPING)
class ClipEachParameter(Pattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.parameters():
            nn.utils.clip_grad_norm_(parameter, 0.05)


@pattern(CLIPPING)
class ClipInItsMethod(Pattern):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.see("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.2))


WHOLE = Refused(
    "p.grad was used in a hook while gradients accumulate.*on_before_optimizer_step", "`on_before_optimizer_step`"
)
MID_WINDOW = "gradients used in `on_after_backward` before the last micro-batch of a window"


@pattern(MID_WINDOW, fsdp1=WHOLE, fsdp2=WHOLE, zero2=WHOLE, zero3=WHOLE)
class ScaleInMidWindow(ScaleGradients):
    accumulate = 2


# ------------------------------------------------------------------ training step: penalties
PENALTY_3 = Refused(
    "was used in a loss while ZeRO-3 has it partitioned.*weight_decay",
    "`weight_decay`, stage 2, or the penalty in the forward of the module that has the parameter",
)
PENALTIES = "penalties over parameters in `training_step`: L1, L2, EWC, orthogonality"


@pattern(PENALTIES, zero3=PENALTY_3)
class SquaredPenalty(Pattern):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.05 * sum(p.pow(2).sum() for p in self.parameters())


@pattern(PENALTIES, zero3=PENALTY_3)
class AbsolutePenaltyBeforeForward(Pattern):
    def loss(self, batch: Any) -> Tensor:
        return 0.01 * sum(p.abs().sum() for p in self.parameters()) + super().loss(batch)


@pattern(PENALTIES, core=True, zero3=PENALTY_3)
class PenaltyOfRowsAndLaterNorms(Pattern):
    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.norm() * p.flatten()[0] for p in self.parameters() if p.requires_grad)
        return super().loss(batch) + 0.05 * penalty

    @torch.no_grad()
    def on_before_zero_grad(self, *_: Any) -> None:
        self.see("norm", sum(p.flatten()[:2].norm() for p in self.parameters()))

    @torch.no_grad()
    def on_before_backward(self, loss: Tensor) -> None:
        self.see("norm", sum(p.flatten()[:2].norm() for p in self.parameters()))


@pattern(PENALTIES, zero3=PENALTY_3)
class OrthogonalPenalty(Pattern):
    def loss(self, batch: Any) -> Tensor:
        weight = self.first.weight
        return super().loss(batch) + 0.1 * (weight.T @ weight - torch.eye(WIDTH, device=self.device)).pow(2).sum()


@pattern(PENALTIES, zero3=PENALTY_3)
class NormPenalty(Pattern):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.05 * sum(torch.norm(p) for p in self.parameters())


@pattern(PENALTIES, core=True, zero3=PENALTY_3)
class PenaltyToFirstValues(Pattern):
    def on_train_start(self) -> None:
        self.anchors = {name: p.detach().clone() for name, p in self.named_parameters()}

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.05 * sum((p - self.anchors[n]).pow(2).sum() for n, p in self.named_parameters())


@pattern(PENALTIES, zero3=PENALTY_3)
class PenaltyToKeptCopies(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.copies = [p.detach().clone() for p in self.model.parameters()]

    def loss(self, batch: Any) -> Tensor:
        pairs = zip(self.model.parameters(), self.copies, strict=True)
        return super().loss(batch) + 0.05 * sum((p - q.to(self.device)).pow(2).sum() for p, q in pairs)


# ------------------------------------------------------------------ training step: values and changes
VALUES = "values of weights in `training_step`, without gradients: norms, copies, logging"


@pattern(VALUES)
class LossScaledByNorm(Pattern):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + 0.1 * self.model.head.weight.detach().norm())


@pattern(VALUES)
class NumbersInSteps(Pattern):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        with torch.no_grad():
            self.see("squares", sum(p.pow(2).sum() for p in self.parameters()))
            self.see("bias", self.first.bias.mean())
        return loss


EVALUATION = "weights in `validation_step`, `test_step`, `predict_step`: norms, rows, values changed for a batch"


@pattern(EVALUATION, core=True)
class NumbersInValidationSteps(Pattern):
    validates = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        penalty = 0.1 * self.first.weight.pow(2).sum() + self.first.weight[0].abs().max()
        self.see("vector", nn.utils.parameters_to_vector(self.parameters()).norm())
        self.see("squares", sum(p.pow(2).sum() for p in self.parameters()))
        self.log("validation", self.loss(batch) + penalty, sync_dist=True)


@pattern(EVALUATION)
class WeightsPerturbedInValidationSteps(Pattern):
    validates = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        kept = [p.detach().clone() for p in self.parameters()]
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(1.5)
            self.first.weight[0] = 0.3
        super().validation_step(batch, batch_idx)
        with torch.no_grad():
            for p, value in zip(self.parameters(), kept, strict=True):
                p.copy_(value)


FORWARDS = "weights of other units read in the `forward` of a module, in its hooks, without gradients"


@pattern(FORWARDS, core=True)
class NumbersInForward(Pattern):
    def forward(self, inputs: Tensor) -> Tensor:
        self.see("squares", sum(p.detach().pow(2).sum() for p in self.parameters()))
        self.see("row", self.first.weight.detach()[0].norm())
        return self.model(inputs)

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self(batch[0]), batch[1])


@pattern(FORWARDS)
class NumbersInHooksOfModules(Pattern):
    validates = True

    def on_fit_start(self) -> None:
        self.model.blocks[0].register_forward_pre_hook(lambda *_: self.see("up", self.first.weight.detach().norm()))
        self.model.head.register_forward_hook(lambda *_: self.see("norm", self.first.bias.detach().norm()))

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self.see("output", self.model(torch.ones(1, 4, INPUTS, device=self.device)).sum())


class ScaledByWeights(Net):
    """Its output depends on weights of a unit that has run already."""

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        return super().forward(x) * (1 + first.up.weight.detach().pow(2).mean())


@pattern("outputs multiplied by weights of another unit in the `forward` of a module")
class OutputsScaledInForward(Pattern):
    validates = True

    def build(self) -> Net:
        return ScaledByWeights()


class ScaledInCheckpoint(Net):
    """As `ScaledByWeights`, in a part whose activations are recomputed in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = checkpoint(self.scaled, self.embed(x), use_reentrant=False)
        return self.head(self.blocks(scaled))

    def scaled(self, hidden: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        return torch.tanh(hidden) * (1 + first.up.weight.detach().pow(2).mean())


RECOMPUTED = Refused("whose activations are recomputed reads a weight of another unit", "the weight handed in")


@pattern("weights of other units read inside of `torch.utils.checkpoint`", fsdp1=RECOMPUTED, fsdp2=RECOMPUTED)
class OutputsScaledInCheckpoint(Pattern):
    def build(self) -> Net:
        return ScaledInCheckpoint()


@pattern("a weight of a unit used with gradients in `training_step`, outside of its forward")
class PartOfAUnit(Pattern):
    def loss(self, batch: Any) -> Tensor:
        probe = functional.linear(torch.ones(1, WIDTH, device=self.device), self.first.weight, self.first.bias)
        return super().loss(batch) + 0.1 * probe.pow(2).mean()


@pattern(
    "`torch.autograd.grad` with respect to a weight outside of units (adaptive loss weights)",
)
class AdaptiveLossWeight(Pattern):
    def loss(self, batch: Any) -> Tensor:
        outputs = self.model(batch[0])
        losses = functional.mse_loss(outputs, batch[1]), outputs.abs().mean()
        weight = self.model.head.weight
        norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in losses]
        return losses[0] + (norms[0] / (norms[1] + 1e-4)).detach() * losses[1]


CHANGES = "weights changed in `training_step`"


@pattern(CHANGES, core=True)
class ChangeBeforeForward(Pattern):
    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            self.model.head.weight.mul_(0.95)
            self.first.weight.mul_(0.95)
        return super().loss(batch)


class InForwardHooks(Pattern):
    """Changes layers of a unit and of the root before their forwards."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.first, self.model.head):
            layer.register_forward_pre_hook(self.change)

    @staticmethod
    def change(module: Any, _: Any) -> None:
        """Change one."""


@pattern("weights changed in hooks of modules (`register_forward_pre_hook`)")
class ClampInForwardHook(InForwardHooks):
    @staticmethod
    def change(module: Any, _: Any) -> None:
        module.weight.data.clamp_(-0.2, 0.2)


class MaxNorm(nn.Linear):
    """A linear layer that limits the norm of its rows in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        norms = self.weight.data.norm(dim=1, keepdim=True)
        self.weight.data = self.weight.data * (0.3 / norms).clamp(max=1)
        self.bias.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pattern("weights changed in the forward of their module, through `.data` (max-norm, clamps)")
class ChangeInForward(Pattern):
    validates = True

    def __init__(self) -> None:
        super().__init__()
        self.first.__class__ = self.model.head.__class__ = MaxNorm


class Codebook(nn.Module):
    """Replaces what it gets by the nearest of eight codes, which follow the means of what they replace."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(8, WIDTH)
        self.sums = nn.Parameter(self.codes.weight.detach().clone())
        self.register_buffer("counts", torch.ones(8))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1, WIDTH)
        chosen = functional.one_hot(torch.cdist(flat, self.codes.weight).argmin(1), 8).float()
        quantized = (chosen @ self.codes.weight).view(x.shape)
        if self.training:
            self.update(chosen.sum(0), chosen.t() @ flat)
        return x + 0.1 * (quantized - x.detach())

    def update(self, counts: Tensor, sums: Tensor) -> None:
        """Move the codes; every process moves them alike."""
        distributed.all_reduce(counts)
        distributed.all_reduce(sums)
        self.counts.mul_(0.9).add_(counts, alpha=0.1)
        self.sums.data.mul_(0.9).add_(sums, alpha=0.1)
        self.codes.weight.data.copy_(self.sums / self.counts.unsqueeze(1).clamp(min=1e-3))


class ReplacedCodebook(Codebook):
    """A codebook whose codes are another parameter after each forward."""

    def update(self, counts: Tensor, sums: Tensor) -> None:
        super().update(counts, sums)
        self.codes.weight = nn.Parameter(self.codes.weight.detach().clone(), requires_grad=False)


class QuantizedBlock(Block):
    """A block whose output is quantized."""

    def __init__(self, codebook: nn.Module) -> None:
        super().__init__()
        self.codebook = codebook

    def forward(self, x: Tensor) -> Tensor:
        quantized: Tensor = self.codebook(super().forward(x))
        return quantized


@pattern("codes that forwards move to means (VQ-VAE), through `.data` and in place")
class CodesMovedInForward(Pattern):
    codebook: ClassVar[type[Codebook]] = Codebook
    validates = True

    def build(self) -> Net:
        net = super().build()
        net.blocks[0] = QuantizedBlock(self.codebook())
        return net

    def groups(self) -> Any:
        return [p for p in self.parameters() if p.requires_grad]

    def on_train_batch_end(self, *_: Any) -> None:
        codes: Any = self.model.get_submodule("blocks.0.codebook.codes")
        self.see("codes", codes.weight.norm())


REPLACED = Refused("replaces the parameter 'weight' of Embedding by another", "`self.weight.data.copy_(value)`")


@pattern(
    "parameters that forwards replace (`self.weight = nn.Parameter(value)`)",
    fsdp1=REPLACED,
    fsdp2=REPLACED,
    zero3=REPLACED,
)
class CodesReplacedInForward(CodesMovedInForward):
    codebook = ReplacedCodebook


class OwnAttributes(nn.Module):
    """Has a word in what is assigned to it, as classes of some libraries."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class OwnBlock(OwnAttributes, Block):
    """A block that does."""


class OwnLinear(OwnAttributes, nn.Linear):
    """A layer that does."""


@pattern("modules with a `__setattr__` of their own")
class ModulesWithSetattr(Pattern):
    validates = True

    def build(self) -> Net:
        net = super().build()
        net.blocks[0], net.head = OwnBlock(), OwnLinear(WIDTH, OUTPUTS)
        net.blocks[0].up = OwnLinear(WIDTH, HIDDEN)
        return net


@pattern("`train()` and `eval()` overridden, with weights read")
class EvalThatReads(Pattern):
    validates = True

    def train(self, mode: bool = True) -> Self:
        if not mode:
            self.see("head", self.model.head.weight.detach().norm())
            self.see("first", self.first.weight.detach()[0].sum())
        return super().train(mode)


@pattern(CHANGES)
class ChangeAtEndOfStep(Pattern):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.model.head.bias.data.add_(0.01)
        self.first.bias.data.add_(0.01)
        return loss


DERIVED = "layers that compute their weight: standardisation, cosine, weight norm, LoRA"


@pattern("modules with two names (`self.backbone = self.model.blocks`)")
class ModulesWithTwoNames(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.last, self.output = self.model.blocks, self.model.blocks[1], self.model.head

    def on_train_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        is_deepspeed = isinstance(strategy, DeepSpeedStrategy)
        saved = full_state_dict(strategy, self) if is_deepspeed else strategy.lightning_module_state_dict()
        for value in saved.values() if self.global_rank == 0 else ():  # FSDP's whole values are on rank 0 alone
            self.see("saved", value.abs().sum())


@pattern(
    "modules with two names that hold units and other layers",
    fsdp1=Refused("is another name of model, which contains both FSDP1 units", "a property as the second name"),
)
class ModelWithTwoNames(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.model


class Standardized(nn.Linear):
    """A linear layer with rows of mean 0 and deviation 1."""

    def forward(self, x: Tensor) -> Tensor:
        centered = self.weight - self.weight.mean(1, keepdim=True)
        return functional.linear(x, centered / (centered.std(1, keepdim=True) + 1e-5), self.bias)


@pattern(DERIVED)
class StandardizedWeights(Pattern):
    def build(self) -> Net:
        net = super().build()
        net.head, net.blocks[0].up = Standardized(WIDTH, OUTPUTS), Standardized(WIDTH, HIDDEN)
        return net


@pattern(DERIVED)
class WeightNorm(Pattern):
    def build(self) -> Net:
        net: Any = super().build()
        for layer in (net.head, net.blocks[0].up):
            nn.utils.parametrizations.weight_norm(layer)
        return net


# ------------------------------------------------------------------ state dicts
STATE_DICTS = "`self.state_dict()`, `load_state_dict()` of the module or a part, in hooks"


@pattern(STATE_DICTS, core=True)
class BestWeightsComeBack(Pattern):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.kept = {name: value.clone() for name, value in self.state_dict().items()}
        else:
            self.load_state_dict(self.kept)


@pattern(STATE_DICTS)
class AverageOfStateDicts(Pattern):
    def on_train_start(self) -> None:
        self.average = {name: value.clone() for name, value in self.model.state_dict().items()}

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.model.state_dict()
        self.average = {name: 0.9 * value + 0.1 * state[name] for name, value in self.average.items()}

    def on_train_end(self) -> None:
        self.model.load_state_dict(self.average)


@pattern(STATE_DICTS)
class LoadFullTensors(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.at_first = {name: value.clone() for name, value in self.model.head.state_dict().items()}

    def on_train_epoch_start(self) -> None:
        self.model.head.load_state_dict(self.at_first)


@pattern(STATE_DICTS)
class EditStateDict(Pattern):
    def on_train_epoch_end(self) -> None:
        for value in self.model.state_dict().values():
            value.mul_(0.9)


# ------------------------------------------------------------------ averages and teachers
AVERAGES = "averages (EMA, SWA, Lookahead) made in hooks or in `__init__`, swapped for validation"


@pattern(AVERAGES, core=True)
class AveragesAssignedAndWeightsPutBack(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.averages: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            average = self.averages.setdefault(name, parameter.data.clone())
            self.averages[name] = 0.9 * average + 0.1 * parameter.data

    def on_validation_start(self) -> None:
        for name, parameter in self.named_parameters() if self.averages else ():
            self.before[name], parameter.data = parameter.data, self.averages[name]

    def on_validation_end(self) -> None:
        for name, parameter in self.named_parameters() if self.averages else ():
            parameter.data = self.before[name]


@pattern(AVERAGES, core=True)
class AverageByZip(Pattern):
    def on_train_start(self) -> None:
        self.shadow = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        for average, parameter in zip(self.shadow, self.parameters(), strict=True):
            average.mul_(0.8).add_(parameter.detach(), alpha=0.2)

    def on_train_end(self) -> None:
        for average, parameter in zip(self.shadow, self.parameters(), strict=True):
            parameter.data.copy_(average)


@pattern(AVERAGES)
class AverageByLerp(AverageByZip):
    def on_train_batch_end(self, *_: Any) -> None:
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.parameters()], 0.2)


@pattern(AVERAGES)
class AverageMadeByInit(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.shadow = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.shadow[name] = 0.8 * self.shadow[name].to(self.device) + 0.2 * parameter.data

    def on_train_end(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data = self.shadow[name].clone()


@pattern(AVERAGES)
class SlowWeights(Pattern):
    def on_train_start(self) -> None:
        self.slow = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step % 3 == 0:
            with torch.no_grad():
                for parameter, slow in zip(self.parameters(), self.slow, strict=True):
                    slow += 0.5 * (parameter - slow)
                    parameter.copy_(slow)


class _Swap(Callback):
    """Validates with the average."""

    average: list[Tensor]

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.average = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        for average, parameter in zip(self.average, pl_module.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.2)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        for average, parameter in zip(self.average, pl_module.parameters(), strict=True):
            kept = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(kept)

    on_validation_end = on_validation_start


@pattern(ELEMENTS)
class SampleThenChange(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.see("sample", self.model(torch.ones(1, INPUTS, device=self.device)).sum())
            for parameter in self.parameters():
                parameter.mul_(0.95)


@pattern(AVERAGES, core=True)
class AverageSwappedForValidation(Pattern):
    validates = True

    def callbacks(self) -> list[Callback]:
        return [_Swap()]


TEACHERS = "a teacher or an `AveragedModel` as a submodule, updated in hooks"


@pattern(TEACHERS, core=True)
class Teacher(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def groups(self) -> Any:
        return self.model.parameters()

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        return super().loss(batch) + functional.mse_loss(self.model(batch[0]), target)

    def update(self) -> None:
        with torch.no_grad():
            for teacher, student in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                teacher.mul_(0.9).add_(student, alpha=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.update()


@pattern(TEACHERS)
class TeacherByStateDict(Teacher):
    def update(self) -> None:
        student, teacher = self.model.state_dict(), self.teacher.state_dict()
        self.teacher.load_state_dict({name: 0.9 * teacher[name] + 0.1 * student[name] for name in teacher})


@pattern(TEACHERS)
class TeacherByAssignment(Teacher):
    def update(self) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            teacher.data = 0.9 * teacher.data + 0.1 * student.data


@pattern(TEACHERS)
class AveragedModelOfTorch(Pattern):
    def __init__(self) -> None:
        super().__init__()
        averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=averaging).requires_grad_(False)

    def groups(self) -> Any:
        return self.model.parameters()

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.model)


TEACHER_IN_STEP = "a teacher updated in `training_step` (BYOL, MoCo, DINO)"


@pattern(TEACHER_IN_STEP)
class TeacherUpdatedInStep(Teacher):
    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def loss(self, batch: Any) -> Tensor:
        self.update()
        return super().loss(batch)


@pattern(TEACHER_IN_STEP)
class TeacherAssignedInStep(TeacherUpdatedInStep):
    def update(self) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            teacher.data = 0.9 * teacher.data + 0.1 * student.data


COPIES = Refused(
    r"copy\.deepcopy\(\) of a sharded module .*Copy the module in __init__",
    "the copy in `__init__`, as a submodule; or `strategy.full_state_dict(module)`",
)


@pattern("`copy.deepcopy(self.model)` in hooks", fsdp1=COPIES, fsdp2=COPIES, zero3=COPIES)
class TeacherCopiedInHook(Pattern):
    def on_train_start(self) -> None:
        self.copies = [copy.deepcopy(self.model)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.see("copy", sum(p.detach().sum() for p in self.copies[0].parameters()))


# ------------------------------------------------------------------ buffers
BUFFERS = "buffers: BatchNorm, statistics and counters of your own, banks"


@pattern(BUFFERS, core=True)
class BatchNormInEvaluation(Pattern):
    def build(self) -> Net:
        return Net(nn.BatchNorm1d)

    def on_train_epoch_start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d) and self.current_epoch == 1:
                module.eval()


@pattern(BUFFERS)
class BatchNormWithValidation(Pattern):
    validates = True

    def build(self) -> Net:
        return Net(nn.BatchNorm1d)


@pattern(BUFFERS, core=True)
class BuffersOfSecondFit(Pattern):
    """Each rank's own at the end of a fit, and those of rank 0 as the next one starts."""

    fits = 2
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(INPUTS))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last.copy_(batch[0].mean(0))
        return self.loss(batch)

    def on_train_start(self) -> None:
        self.see("last", self.last.sum())


@pattern(BUFFERS)
class BankAndCounter(Pattern):
    bank: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(3, OUTPUTS))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def loss(self, batch: Any) -> Tensor:
        outputs = self.model(batch[0])
        with torch.no_grad():
            self.bank[int(self.count) % 3] = outputs.detach().mean(0)
            self.count += 1
        return functional.mse_loss(outputs + 0.1 * self.bank.mean(0), batch[1])


# ------------------------------------------------------------------ hooks on parameters and modules
@pattern(BUFFERS)
class MasksOfWeights(Pattern):
    @torch.no_grad()
    def on_train_start(self) -> None:
        self.register_buffer("mask", (self.first.weight.abs() > 0.1).float())
        self.register_buffer("kept", torch.ones_like(self.model.head.weight, dtype=torch.bool))

    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        self.kept = self.model.head.weight.abs() > 0.05

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.see("kept", self.mask.sum() + self.kept.sum())  # type: ignore[operator]
        return self.loss(batch)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.first.weight.mul_(self.mask)
        self.model.head.weight.masked_fill_(~self.kept, 0.0)


@pattern("gradients read and changed after `clip_gradients()`", core=True)
class ClipThenChange(Pattern):
    accumulate = 2

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        gradient = self.first.weight.grad
        values = gradient.numpy()
        values *= 0.5
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.see("norm", torch.cat([each.grad.flatten() for each in self.parameters() if each.grad is not None]).norm())
        self.see("kept", values.sum() + gradient.sum())
        if self.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        self.first.weight.grad.add_(0.01)


HOOKS = "`p.register_hook`, in `__init__`, in hooks or in forwards; hooks of modules on outputs and gradients"


@pattern(HOOKS, core=True)
class GradientHooksByInit(Pattern):
    def __init__(self) -> None:
        super().__init__()
        for parameter in (self.first.weight, self.model.head.weight):
            parameter.register_hook(lambda gradient: gradient * 0.1)


@pattern(HOOKS, core=True)
class GradientHooksKeptInSecondFit(GradientHooksByInit):
    fits = 2


@pattern(HOOKS)
class GradientHooksOfTraining(Pattern):
    def on_train_start(self) -> None:
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


@pattern(HOOKS, core=True)
class GradientHooksOfTwoForwards(GradientHooksOfTraining):
    """Clamps the sum of the gradients that two forwards give a weight."""

    accumulate = 2

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + functional.mse_loss(self.model(2 * batch[0]), batch[1])


@pattern(HOOKS, core=True)
class GradientHooksThatReadOthers(Pattern):
    """Reads all parameters, of all units, in the hook of each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(functools.partial(self.read, name))

    def read(self, name: str, _: Tensor) -> None:
        values = [(index + each.shape[0]) * each.norm() for index, each in enumerate(self.parameters())]
        self.norms[name] = torch.stack(values).sum()

    def on_after_backward(self) -> None:
        for name in sorted(self.norms):
            self.see(name, self.norms[name])


@pattern(HOOKS)
class GradientHookWithMask(Pattern):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(OUTPUTS, WIDTH)
        mask[1] = 1
        self.model.head.weight.register_hook(lambda gradient: gradient * mask.to(gradient.device))


@pattern(HOOKS)
class HooksOfModules(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].register_forward_hook(lambda module, inputs, output: output * 1.1)
        self.model.head.register_full_backward_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (inputs[0] * 0.5,)


@pattern(HOOKS, core=True)
class GradientHooksWithTheirParameter(Pattern):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient, p=parameter: gradient * p.norm() + 0.1 * p.detach())


@pattern(HOOKS, core=True)
class GradientHooksOfSecondFit(Pattern):
    fits = 2
    has_trained = False

    def on_fit_start(self) -> None:
        if self.has_trained:
            for parameter in self.model.parameters():
                parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.has_trained = True


class HooksItsWeight(nn.Linear):
    """A linear layer that hooks its own weight in its first forward, and removes the hook in its sixth."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + self.training
        if self.calls == 1 and self.training:
            self.hook = self.weight.register_hook(lambda gradient: gradient * 0.2)
        elif self.calls == 6 and self.training:
            self.hook.remove()
        return super().forward(x)


@pattern(HOOKS)
class HooksOfForwards(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.first.__class__ = self.model.head.__class__ = HooksItsWeight


class ClampsItsGradient(nn.Linear):
    """A linear layer that hooks its own weight in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not hasattr(self, "hook"):
            self.hook = self.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return super().forward(x)


@pattern(HOOKS)
class HooksOfFirstForward(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.first.__class__ = self.model.head.__class__ = ClampsItsGradient


PENALTY = Refused("was used in a loss outside of its unit's forward", "`on_before_optimizer_step`")


@pattern("`p.register_hook` on what the loss uses outside of its unit, too (penalties)", fsdp1=PENALTY, fsdp2=PENALTY)
class GradientHookAndPenalty(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.first.weight.square().sum()


MULTI = Refused("register_multi_grad_hook\\(\\) would never run on a parameter of FSDP", "`p.register_hook`")


@pattern("`register_multi_grad_hook` on parameters, in `__init__`", fsdp1=MULTI, fsdp2=MULTI)
class MultiGradHook(Pattern):
    def __init__(self) -> None:
        super().__init__()

        def see(gradients: Any) -> None:
            self.see("sums", sum(gradient.abs().sum() for gradient in gradients))

        register_multi_grad_hook(tuple(self.model.parameters()), see)


NO_NODE = Refused("register_multi_grad_hook\\(\\) of a sharded parameter in a hook", "`p.register_hook`")


@pattern("the same in hooks", fsdp1=NO_NODE, fsdp2=NO_NODE, zero3=NO_NODE)
class MultiGradHookOfHook(Pattern):
    def on_train_start(self) -> None:
        register_multi_grad_hook(tuple(self.model.parameters()), lambda gradients: self.see("number", len(gradients)))


POST = Refused(
    "register_post_accumulate_grad_hook\\(\\) would never run on a gradient", "`on_after_backward` or `p.register_hook`"
)


@pattern("`p.register_post_accumulate_grad_hook`", fsdp1=POST, fsdp2=POST)
class PostAccumulateHook(Pattern):
    def __init__(self) -> None:
        super().__init__()

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        self.model.head.weight.register_post_accumulate_grad_hook(halve)


@pattern("the same in `configure_optimizers` or in hooks", fsdp1=POST)
class PostAccumulateHookOfTraining(Pattern):
    def configure_optimizers(self) -> Any:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)
        return super().configure_optimizers()

    @staticmethod
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


STEP_HOOKS = "hooks on the optimizer's step that change or read weights (`register_step_pre_hook`, `..._post_hook`)"


@pattern(STEP_HOOKS, core=True)
class WeightsDecayedByAStepHook(Pattern):
    def configure_optimizers(self) -> Any:
        head = {id(p) for p in self.model.head.parameters()}
        rest = [p for p in self.parameters() if id(p) not in head]
        groups: Any = [{"params": rest}, {"params": list(self.model.head.parameters()), "lr": 0.01}]
        optimizer = SGD(groups, lr=0.05, momentum=0.9)
        optimizer.register_step_post_hook(self.decay)
        return optimizer

    @torch.no_grad()
    def decay(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.mul_(0.9)
        self.see("norm", sum(p.norm() for p in self.parameters()))


@pattern(STEP_HOOKS)
class GroupsClampedByAStepHook(Pattern):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.05, momentum=0.9)
        optimizer.register_step_post_hook(self.clamp)
        return optimizer

    @torch.no_grad()
    def clamp(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.3, 0.3)
        self.see("calls", len(self.seen))


@pattern(STEP_HOOKS)
class WeightsDecayedBeforeTheStep(WeightsDecayedByAStepHook):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.05, momentum=0.9)
        optimizer.register_step_pre_hook(self.decay)
        return optimizer


@torch.no_grad()
def climbed(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Move weights to where the loss is worst, and return them with their steps (SAM)."""
    trained = [p for p in module.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in trained]).norm()  # type: ignore[union-attr]
    steps: list[tuple[Tensor, Tensor]] = [(p, p.grad * (0.05 / (norm + 1e-9))) for p in trained]
    for parameter, step in steps:
        parameter.add_(step)
    return steps


@pattern("`optimizer_step` with a closure of one's own that changes weights (SAM)", core=True)
class SharpnessAwareClosure(Pattern):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        steps = climbed(self)

        @torch.no_grad()
        def at_the_worst_place() -> Any:
            with torch.enable_grad():
                loss = closure()
            for parameter, step in steps:
                parameter.sub_(step)
            return loss

        optimizer.step(closure=at_the_worst_place)


# ------------------------------------------------------------------ manual optimization
INPUT_GRADIENTS = "gradients of inputs in `training_step` before another forward: FGSM, PGD, VAT"


@pattern(INPUT_GRADIENTS, core=True)
class SignOfInputGradients(Pattern):
    steps = 1

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        for _ in range(self.steps):
            moved = inputs.detach().requires_grad_()
            gradient = torch.autograd.grad(functional.mse_loss(self.model(moved), targets), moved)[0]
            inputs = moved + 0.1 * gradient.sign()
        return functional.mse_loss(self.model(inputs.detach()), targets)


@pattern(INPUT_GRADIENTS)
class ProjectedDescent(SignOfInputGradients):
    steps = 2
    accumulate = 2


@pattern(INPUT_GRADIENTS)
class VirtualAdversary(Pattern):
    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        clean = self.model(inputs)
        moved = (0.1 * torch.ones_like(inputs)).requires_grad_()
        distance = functional.mse_loss(self.model(inputs + moved), clean.detach())
        direction = functional.normalize(torch.autograd.grad(distance, moved)[0])
        adversarial = functional.mse_loss(self.model(inputs + 0.1 * direction), clean.detach())
        return functional.mse_loss(clean, targets) + adversarial


@pattern(
    "the same by `requires_grad_(False)` and `backward()` inside of the step",
    fsdp1=Refused("requires_grad was changed inside a step", "`torch.autograd.grad(loss, input)`"),
)
class SignByBackward(Pattern):
    """Weights are frozen for the attack's backward, so that it leaves a gradient of the input alone."""

    def loss(self, batch: Any) -> Tensor:
        moved = batch[0].detach().requires_grad_()
        self.model.requires_grad_(False)
        functional.mse_loss(self.model(moved), batch[1]).backward()
        self.model.requires_grad_(True)
        assert moved.grad is not None
        return functional.mse_loss(self.model((moved + 0.1 * moved.grad.sign()).detach()), batch[1])


BACKWARDS = "`backward()` overridden: called twice, of several losses"
ONE_BACKWARD = Refused("FSDP1 prepares one backward per step", "one backward, of the sum of the losses")


class DoubledLoss(Pattern):
    def loss(self, batch: Any) -> Tensor:
        return 2 * super().loss(batch)


class DoubledLossInWindows(DoubledLoss):
    accumulate = 2


class SumOfLosses(Pattern):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.model(batch[0].flip(0)).square().mean()


@pattern(BACKWARDS, core=True, fsdp1=ONE_BACKWARD)
class BackwardTwice(Pattern):
    referee = DoubledLoss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


@pattern(BACKWARDS, fsdp1=ONE_BACKWARD)
class BackwardTwiceInWindows(BackwardTwice):
    accumulate = 2
    referee = DoubledLossInWindows


@pattern(BACKWARDS, fsdp1=ONE_BACKWARD)
class BackwardOfTwoLosses(Pattern):
    referee = SumOfLosses

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.other = 0.1 * self.model(batch[0].flip(0)).square().mean()
        return self.loss(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.other.backward()
        loss.backward()


OTHER_PARAMETERS = Refused(
    "called with parameters other than the sharded ones", "a layer outside of units, or a copy made in `__init__`"
)
PLAIN_PARAMETERS = Refused("used in a loss while ZeRO-3 has it partitioned", "stage 2")
FUNCTIONAL = "`torch.func.functional_call` with changed weights (MAML, hypernetworks)"


@pattern(FUNCTIONAL + ", in units", fsdp1=OTHER_PARAMETERS, fsdp2=OTHER_PARAMETERS, zero3=PLAIN_PARAMETERS)
class FunctionalCallOfUnits(Pattern):
    changed = ("blocks.0.up.bias", "head.bias")

    def loss(self, batch: Any) -> Tensor:
        named = dict(self.model.named_parameters())
        changed = {name: 0.5 * named[name] for name in self.changed}
        outputs: Tensor = torch.func.functional_call(self.model, changed, (batch[0],))
        return functional.mse_loss(outputs, batch[1])


@pattern(FUNCTIONAL + ", outside of units", zero3=PLAIN_PARAMETERS)
class FunctionalCallOfRoot(FunctionalCallOfUnits):
    changed = ("head.bias", "embed.weight")


@pattern(
    "`torch.func.functional_call` in `validation_step` (averages, other weights)",
    fsdp1=OTHER_PARAMETERS,
    fsdp2=OTHER_PARAMETERS,
    zero3=Refused("called with parameters other than the partitioned ones", "stage 2, or a copy of `__init__`"),
)
class FunctionalCallInValidation(Pattern):
    validates = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        others = {name: torch.ones(p.shape, device=self.device) for name, p in self.model.named_parameters()}
        outputs: Tensor = torch.func.functional_call(self.model, others, (batch[0],))
        self.log("validation", functional.mse_loss(outputs, batch[1]), sync_dist=True)


PAST_THE_ENGINE = Refused("A backward reached weights without DeepSpeed's engine", "`loss.backward()`")


@pattern("`backward()` overridden with `torch.autograd.backward`", zero2=PAST_THE_ENGINE, zero3=PAST_THE_ENGINE)
class BackwardOfAutograd(Pattern):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.autograd.backward(loss)


_RETURNED = "the sum of the losses, returned"
_ONE_LOSS: Any = {
    "fsdp1": Refused(ONE_BACKWARD.match, _RETURNED),
    "zero2": Refused(PAST_THE_ENGINE.match, _RETURNED),
    "zero3": Refused(PAST_THE_ENGINE.match, _RETURNED),
}
BACKWARD_IN_STEP = "`loss.backward()` in the `training_step` of automatic optimization"


@pattern(BACKWARD_IN_STEP, **_ONE_LOSS)
class BackwardInStep(Pattern):
    """Its gradients are zeroed by the Trainer before those of the loss that it returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        return loss


class SecondLossDoubled(Pattern):
    accumulate = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (2 if batch_idx % 2 else 1)


@pattern(BACKWARD_IN_STEP, **_ONE_LOSS)
class BackwardInStepOfWindow(Pattern):
    accumulate = 2
    referee = SecondLossDoubled

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        (loss / 2).backward(retain_graph=True)
        return loss


@pattern("views of weights in a hook, and hooks on the optimizer's step that read the weights afterwards", core=True)
class ViewsAcrossStep(Pattern):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rows = self.model.head.weight.detach().unbind()
        self.rows[0].mul_(0.9)

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.see("sum", self.model.head.weight.sum()))
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


NO_STATES = Refused("has states of DeepSpeed's flat parameters", "`state.clear()`; `fit(ckpt_path=...)`, FSDP")
STATES_OF_ONE = "an optimizer's states of single parameters in hooks: reset, scaled"
STATE_DICT = "an optimizer's `state_dict()` in hooks, kept and loaded again"


@pattern("an optimizer's `state.clear()` in hooks")
class StatesCleared(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            self.trainer.optimizers[0].state.clear()


@pattern(STATES_OF_ONE, core=True, zero2=NO_STATES, zero3=NO_STATES)
class StatesMadeAnew(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            for parameter in self.parameters():
                self.trainer.optimizers[0].state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@pattern(STATES_OF_ONE, zero2=NO_STATES, zero3=NO_STATES)
class StatesScaled(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.optimizers[0].state
        for parameter in self.parameters():
            if parameter in state:
                state[parameter]["momentum_buffer"].mul_(0.5)


@pattern(STATE_DICT, zero2=NO_STATES, zero3=NO_STATES)
class StatesRolledBack(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.global_step == 2:
            self.states = copy.deepcopy(optimizer.state_dict())
        if self.global_step == 5:
            optimizer.load_state_dict(self.states)


@pattern(STATE_DICT, zero2=NO_STATES, zero3=NO_STATES)
class StatesLoadedAtOnce(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.optimizers[0].load_state_dict(self.trainer.optimizers[0].state_dict())


ANEW = Refused("The optimizer was recreated during fit", "another `fit()`, or other values in `param_groups`")


@pattern("optimizers made anew in mid-training", zero2=ANEW, zero3=ANEW)
class OptimizerMadeAnew(Pattern):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [SGD(self.parameters(), lr=0.01, momentum=0.9)]


@pattern("optimizers made anew in mid-training", zero2=ANEW, zero3=ANEW)
class OptimizersSetUpAnew(Pattern):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


MANUAL = "manual optimization that changes weights and gradients between backwards: SAM, FGM, clipping"


class ManualPattern(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def first_backward(self, batch: Any) -> Any:
        """Return the optimizer, with gradients to step on."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        return optimizer


@pattern(MANUAL, core=True)
class SharpnessAware(ManualPattern):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.first_backward(batch)
        steps = climbed(self)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, step in steps:
                parameter.sub_(step)
        optimizer.step()


@pattern(MANUAL)
class EditsInManualSteps(ManualPattern):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.first_backward(batch)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.05, 0.05)
        optimizer.step()
        with torch.no_grad():
            self.first.weight[0].zero_()
            self.see("norm", sum(p.norm() for p in self.parameters()))


@pattern(MANUAL)
class LargerLimitAfterNoGradients(ManualPattern):
    """The first limit is that of a step without gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx % 2:
            self.first_backward(batch)
        self.clip_gradients(optimizer, 0.5 if batch_idx % 2 else 0.01, "norm")
        optimizer.step()
        optimizer.zero_grad()


@pattern(MANUAL)
class ClipsBiasesBeforeForward(ManualPattern):
    """As WGAN does with weights; DeepSpeed gathers some of them ahead when it meets them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters() if batch_idx > 1 else ():
                if name.endswith("bias"):
                    parameter.clamp_(-0.05, 0.05)
        self.first_backward(batch).step()


@pattern(MANUAL)
class EditsBeforeForwardByHand(InForwardHooks, ManualPattern):
    @staticmethod
    def change(module: Any, _: Any) -> None:
        module.weight.data.view(-1)[0] = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.first_backward(batch).step()


@pattern(MANUAL, core=True)
class AccumulatedByHand(ManualPattern):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        is_last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(batch) / 2)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


@pattern("a row of a weight that `training_step` keeps across an optimizer's step", core=True, zero3=LOST)
class RowKeptAcrossStep(ManualPattern):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.first_backward(batch)
        row = self.model.head.weight.data[0]
        optimizer.step()
        self.see("row", row.sum())
        row.mul_(0.5)


@pattern(MANUAL, core=True)
class GradientKeptAcrossClipping(ManualPattern):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.first_backward(batch)
        gradient: Any = self.model.head.weight.grad
        row = gradient[0]
        self.clip_gradients(optimizer, 0.05, "norm")
        self.see("sum", gradient.sum() + row.sum())
        row.mul_(0.5)
        optimizer.step()


@pattern(MANUAL)
class GradientsOfTwoLosses(ManualPattern):
    """Of the second loss' gradients, those against the first one's count alone (as PCGrad has it)."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.first_backward(batch)
        first: Any = [p.grad for p in self.parameters()]
        optimizer.zero_grad()
        self.manual_backward(0.1 * self.model(batch[0].flip(0)).square().mean())
        for parameter, gradient in zip(self.parameters(), first, strict=True):
            own: Any = parameter.grad
            parameter.grad = own + (gradient if (gradient * own).sum() > 0 else 0 * gradient)
        optimizer.step()


KEPT_GRADIENTS = "gradients of the step before, which a hook has kept without a copy"


@pattern(KEPT_GRADIENTS, core=True)
class GradientsComparedWithThoseBefore(Pattern):
    before: Any = ()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        now: Any = [p.grad for p in self.parameters()]
        for old, new in zip(self.before, now, strict=False):
            self.see("cosine", functional.cosine_similarity(old.flatten(), new.flatten(), 0))
            new.mul_(0.5 if torch.dot(old.flatten(), new.flatten()) > 0 else 1.0)
        self.before = now


@pattern("parameters told apart by `data_ptr()`, as tied ones are counted once", core=True)
class UniqueByAddress(Pattern):
    def groups(self) -> Any:
        return list({p.data_ptr(): p for p in self.parameters()}.values())

    def on_train_start(self) -> None:
        self.see("count", sum({p.data_ptr(): p.numel() for p in self.parameters()}.values()))
        self.see("same", self.model.head.weight.data.data_ptr() == self.model.head.weight.data_ptr())


@pattern("hooks that read rows of weights in `torch.inference_mode()`")
class ReadsInInferenceMode(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.inference_mode():
            self.see("row", self.model.head.weight[0].sum() + self.model.embed.weight.quantile(0.3))


SHARDED = Refused("is a sharded tensor, of which this process has a part", "`average[:].clone()`, `ShardedEMA`")


IN_CHECKPOINTS = "tensors made of weights that `on_save_checkpoint()` puts into the checkpoint"


@pattern(IN_CHECKPOINTS, fsdp1=SHARDED, fsdp2=SHARDED, zero3=SHARDED)
class AveragesInCheckpoint(Pattern):
    def on_train_start(self) -> None:
        self.average: Any = [p.detach().clone() for p in self.model.head.parameters()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average

    def on_train_end(self) -> None:
        folder = self.trainer.strategy.broadcast(tempfile.mkdtemp())
        self.trainer.save_checkpoint(f"{folder}/saved.ckpt")
        self.trainer.strategy.barrier()
        shutil.rmtree(folder, ignore_errors=True)


@pattern(MANUAL, core=True)
class FrozenLayersCalledTwice(ManualPattern):
    """As the features that a frozen network has of two images."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + functional.mse_loss(self.model(2 * batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.first_backward(batch).step()


ONE_OPTIMIZER = Refused("returned 2 optimizers, but a DeepSpeed engine has only one", "FSDP")


@pattern("two optimizers, each toggled, with accumulation", zero2=ONE_OPTIMIZER, zero3=ONE_OPTIMIZER)
class AccumulatedInTurns(ManualPattern):
    """As the networks of a GAN: each optimizer clears its gradients before the first backward."""

    leaves_unused = True

    def configure_optimizers(self) -> Any:
        net = self.model
        parts = [net.embed, net.blocks[0]], [net.blocks[1], net.head]
        return [SGD([p for one in part for p in one.parameters()], lr=0.05, momentum=0.9) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        is_last = batch_idx % 2 == 1
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            with optimizer.toggle_model(sync_grad=is_last):
                if not is_last:
                    optimizer.zero_grad()
                self.manual_backward(self.loss(batch) / 2)
                if is_last:
                    optimizer.step()


# ------------------------------------------------------------------ frozen and changed parts
FROZEN = "freezing and unfreezing between epochs; adapters (LoRA) merged in hooks"


@pattern(FROZEN)
class FrozenForAnEpoch(Pattern):
    epochs = 3
    leaves_unused = True

    def on_train_epoch_start(self) -> None:
        self.model.blocks.requires_grad_(self.current_epoch != 1)


class Adapted(nn.Linear):
    """A frozen linear layer with a trained addition of rank 2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.into, self.out = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))
        self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight + self.out @ self.into, self.bias)


@pattern(FROZEN)
class AdaptersMergedInTraining(Pattern):
    def build(self) -> Net:
        net = super().build()
        net.blocks[0].up, net.head = Adapted(WIDTH, HIDDEN), Adapted(WIDTH, OUTPUTS)
        return net

    def groups(self) -> Any:
        return [p for p in self.parameters() if p.requires_grad]

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, Adapted):
                    module.weight.add_(module.out @ module.into)
                    module.out.zero_()


# ------------------------------------------------------------------------------------------------
# Users' methods that are no hooks between steps: ``backward()``, schedules, what brings a batch, the end of a fit.


def numbers_of(module: Pattern) -> float:
    """Return something of whole weights, inside of units and outside."""
    units = sum(p.detach().norm() for p in module.model.blocks.parameters())
    return float(units) + float(module.model.head.weight.detach()[0].sum())


@pattern("`backward()` overridden, with weights read")
class BackwardThatReads(Pattern):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * (1.0 + 0.01 * numbers_of(self))).backward()


OWN_BACKWARD = "`backward()` overridden, with gradients read and changed after `loss.backward()`"
NOT_COMPLETE = Refused(r"p.grad was used in backward\(\)", "`on_after_backward`, `on_before_optimizer_step`")


@pattern(OWN_BACKWARD, core=True, fsdp1=NOT_COMPLETE)
class BackwardThatScales(Pattern):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        norm = sum(p.grad.norm() for p in self.parameters() if p.grad is not None)
        self.see("norm", norm)
        for p in self.parameters():
            p.grad = p.grad / (1.0 + norm)


@pattern(OWN_BACKWARD, fsdp1=NOT_COMPLETE)
class BackwardOfRows(Pattern):
    """In place, and by rows and columns."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        for p in self.parameters():
            if p.grad is not None and p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        head: Any = self.model.head
        self.first.weight.grad[:, 1] *= 0.5
        head.weight.grad[0] = 0.0


@pattern(OWN_BACKWARD, fsdp1=NOT_COMPLETE)
class BackwardInManualSteps(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self.see("gradients", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pattern("a learning rate schedule that reads weights of the module", core=True)
class ScheduleOfNorms(Pattern):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.groups(), lr=0.05, momentum=0.9)
        schedule = LambdaLR(optimizer, lambda _: 1.0 / (1.0 + numbers_of(self)))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class NormSchedule(LRScheduler):
    def get_lr(self) -> list[float | Tensor]:
        groups = self.optimizer.param_groups
        return [0.05 / (1.0 + sum(float(p.detach().norm()) for p in group["params"])) for group in groups]


FLAT_WEIGHTS = Refused("reduction of a flat parameter out of optimizer.param_groups", "`self.parameters()`")


@pattern("weights in `optimizer.param_groups`, read by a schedule", zero2=FLAT_WEIGHTS, zero3=FLAT_WEIGHTS)
class ScheduleClass(Pattern):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.groups(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": NormSchedule(optimizer), "interval": "step"}]


IN_GROUPS = "squares and moves of weights in `optimizer.param_groups`"


@pattern(IN_GROUPS, zero2=FLAT_WEIGHTS, zero3=FLAT_WEIGHTS)
class SquaresInGroups(Pattern):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        self.see("squares", sum(weight.pow(2).sum() for weight in weights))


@pattern(IN_GROUPS, zero2=FLAT_WEIGHTS, zero3=FLAT_WEIGHTS)
class MovesInGroups(Pattern):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def on_train_batch_end(self, *_: Any) -> None:
        now = [p.detach() for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
        moves = [one - old for one, old in zip(now, self.before, strict=True)]
        self.see("move", sum(move.norm() for move in moves))


BATCHES_FROM_WEIGHTS = "`on_after_batch_transfer` and the other hooks on batches, with weights read"


@pattern(BATCHES_FROM_WEIGHTS)
class BatchesFromWeights(Pattern):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * (1.0 + 0.1 * numbers_of(self)), batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.see("first", self.first.weight[0, 0])
        return [batch[0] + self.first.weight.detach().mean(), batch[1]]


@pattern("`on_fit_end` and `teardown`, with weights read")
class EndOfFit(Pattern):
    def on_fit_end(self) -> None:
        self.see("end", numbers_of(self))

    def teardown(self, stage: str) -> None:
        self.see("teardown", numbers_of(self))


IN_LOADERS = "weights in datasets, samplers and `collate_fn` of the main process, and in hooks of a DataModule"


class _Scaled(Dataset[Any]):
    """Samples that a weight's values scale."""

    def __init__(self, samples: Dataset[Any], module: Pattern) -> None:
        self.samples, self.module = samples, module

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.samples[index]
        weight = self.module.first.weight.detach()
        return inputs * float(weight[1].abs().max() + weight.norm()), targets


@pattern(IN_LOADERS)
class WeightsInDatasets(Pattern):
    validates = True

    def data(self, training: Any, validation: Any) -> dict[str, Any]:
        loaders = [DataLoader(_Scaled(one.dataset, self), one.batch_size) for one in (training, validation)]
        return super().data(*loaders)


class _Stream(IterableDataset[Any]):
    """Samples of a dataset, without a length: Lightning fetches a batch in advance."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))


@pattern(IN_LOADERS)
class WeightsInStreams(Pattern):
    validates = True

    def data(self, training: Any, validation: Any) -> dict[str, Any]:
        streams = [_Stream(_Scaled(one.dataset, self)) for one in (training, validation)]
        return super().data(*(DataLoader(one, training.batch_size) for one in streams))


@pattern(IN_LOADERS)
class WeightsInCollate(Pattern):
    num_workers = 0

    def collate(self, samples: Any) -> Any:
        inputs, targets = (each.to(self.device) for each in default_collate(samples))
        with torch.no_grad():
            return inputs / (1 + self.first.weight.norm() + self.model(inputs).mean()), targets

    def data(self, training: Any, validation: Any) -> dict[str, Any]:
        options: Any = {"collate_fn": self.collate, "num_workers": self.num_workers}
        if self.num_workers:
            options["multiprocessing_context"] = "fork"  # others pickle the module
        return super().data(DataLoader(training.dataset, training.batch_size, **options), validation)


class _Data(LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        return batch[0] / (1 + module.first.weight.detach().norm()), batch[1]


@pattern(IN_LOADERS)
class WeightsInDataModules(Pattern):
    def data(self, training: Any, validation: Any) -> dict[str, Any]:
        return {"datamodule": _Data(training)}


@pattern(IN_LOADERS)
class WorkersBesideWeightsInDatasets(Pattern):
    """Lightning starts the second loader's workers while it waits for that loader's first batch."""

    validates = True

    def data(self, training: Any, validation: Any) -> dict[str, Any]:
        first = DataLoader(_Scaled(validation.dataset, self), validation.batch_size)
        options: Any = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": _doubled}
        return super().data(training, [first, DataLoader(validation.dataset, validation.batch_size, **options)])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)


def _doubled(samples: Any) -> Any:
    inputs, targets = default_collate(samples)
    return 2 * inputs, targets


IN_WORKERS = Refused("forked, such as a worker", "a hook, or `num_workers=0`")


@pattern(
    "weights and modules in workers of a DataLoader", core=True, fsdp1=IN_WORKERS, fsdp2=IN_WORKERS, zero3=IN_WORKERS
)
class WeightsInWorkers(WeightsInCollate):
    num_workers = 1


class _Gated(Block):
    """Has a weight with fewer rows than there are processes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.gate(x))


REDUCED = "sums, means, norms and maxima of weights in the loss, also of weights with fewer rows than processes"


@pattern(REDUCED, core=True)
class SumsInLoss(Pattern):
    def build(self) -> Net:
        net = Net()
        net.blocks[0] = _Gated()
        return net

    @property
    def gate(self) -> Any:
        blocks: Any = self.model.blocks
        return blocks[0].gate

    def loss(self, batch: Any) -> Tensor:
        gate, up = self.gate, self.first
        sums = up.weight.sum() + up.bias.mean() + gate.weight.sum() + gate.weight.abs().sum() + gate.bias.abs().sum()
        return super().loss(batch) + 0.05 * (sums + gate.weight.square().mean() + gate.weight.norm())


@pattern(REDUCED)
class MaximaInLoss(SumsInLoss):
    def loss(self, batch: Any) -> Tensor:
        gate, up = self.gate, self.first
        largest = gate.weight.abs().max() + up.weight.max() + gate.weight.norm(float("inf")) - gate.bias.min()
        self.see("largest", largest.detach())
        return Pattern.loss(self, batch) + 0.05 * largest

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see("smallest", self.gate.weight.amin())
        with torch.no_grad():
            self.gate.weight.clamp_(-0.2, 0.2)


LATE = "weights in steps, forwards, hooks on modules and datasets, from the third batch on"


class LatePattern(Pattern):
    """Code that begins where nobody looks for it."""

    validates = True
    num_batches = 0

    @property
    def is_late(self) -> bool:
        return self.num_batches > 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_batches += 1
        return self.loss(batch)


@pattern(LATE, core=True)
class LateInSteps(LatePattern):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.is_late:
            self.see("norm", self.first.weight.detach().norm())
            loss = loss + 0.1 * self.first.weight.square().mean() + 0.1 * self.model.head.weight.norm()
        return loss


@pattern(LATE)
class LateWritesInSteps(LatePattern):
    def loss(self, batch: Any) -> Tensor:
        if self.is_late:
            with torch.no_grad():
                self.first.weight[1].zero_()
                second: Any = self.model.blocks[1]
                second.down.bias.clamp_(-0.05, 0.05)
        return super().loss(batch)


class _ReadsOther(Block):
    """Its forward scales with a weight of another unit."""

    pattern: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x / (1 + self.pattern[0].first.weight.detach().abs().norm()) if self.pattern[0].is_late else x


@pattern(LATE, core=True)
class LateInForwards(LatePattern):
    def build(self) -> Net:
        net = Net()
        net.blocks[1] = block = _ReadsOther()
        block.pattern = (self,)
        return net


@pattern(LATE)
class LateInForwardHooks(LatePattern):
    def __init__(self) -> None:
        super().__init__()
        self.model.head.register_forward_pre_hook(self.scale)

    def scale(self, module: nn.Module, args: Any) -> Any:
        return args[0] / (1 + self.first.weight.detach().norm()) if self.is_late else args[0]


class _LateScaled(_Scaled):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if self.module.is_late else self.samples[index]


@pattern(LATE)
class LateInDatasets(LatePattern):
    def data(self, training: Any, validation: Any) -> dict[str, Any]:
        late = [DataLoader(_LateScaled(one.dataset, self), one.batch_size) for one in (training, validation)]
        return super().data(*late)


@pattern(LATE)
class LateModulesInCollate(LatePattern):
    def collate(self, samples: Any) -> Any:
        inputs, targets = (each.to(self.device) for each in default_collate(samples))
        with torch.no_grad():
            return inputs / (1 + self.model(inputs).norm()) if self.is_late else inputs, targets

    def data(self, training: Any, validation: Any) -> dict[str, Any]:
        return super().data(DataLoader(training.dataset, training.batch_size, collate_fn=self.collate), validation)


IN_THREADS = Refused("A thread that a hook or a step has started used", "compute in the hook, give it the result")


class ThreadPattern(Pattern):
    def on_train_start(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def on_train_end(self) -> None:
        self.pool.shutdown()


@pattern("threads with what a hook has computed, and with modules of their own")
class ResultsInThreads(ThreadPattern):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm, layer, x = self.first.weight.detach().norm().cpu(), nn.Linear(2, 1), torch.ones(2)
        nn.init.ones_(layer.weight)
        self.see("norm", self.pool.submit(lambda: norm * layer(x).sum() - norm * layer.bias).result())


IN_THREADS_ROW = "weights and modules in threads"


@pattern(IN_THREADS_ROW, core=True, fsdp1=IN_THREADS, fsdp2=IN_THREADS, zero3=IN_THREADS)
class WeightsInThreads(ThreadPattern):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see("norm", self.pool.submit(lambda: self.first.weight.detach().norm()).result())


@pattern(IN_THREADS_ROW, fsdp1=IN_THREADS, fsdp2=IN_THREADS, zero3=IN_THREADS)
class ModulesInThreads(ThreadPattern):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.see("output", self.pool.submit(lambda: self.model(batch[0]).norm()).result())


@pattern(IN_THREADS_ROW, fsdp1=IN_THREADS, fsdp2=IN_THREADS, zero3=IN_THREADS)
class UnitsInThreads(ThreadPattern):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        x = torch.ones(1, WIDTH, device=self.device)
        with torch.no_grad():
            self.see("output", self.pool.submit(lambda: self.model.blocks[0](x).norm()).result())


@pattern(IN_THREADS_ROW, fsdp1=IN_THREADS, fsdp2=IN_THREADS, zero3=IN_THREADS)
class WeightsInThreadsOfSteps(Pattern):
    """No one asks the thread for its error."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found: list[Tensor] = []
        thread = Thread(target=lambda: self.timer(found))
        thread.start()
        thread.join()
        self.see("norm", found[0] if found else 0)
        return self.loss(batch)

    def timer(self, found: list[Tensor]) -> None:
        timer = Timer(0, lambda: found.append(self.first.weight.detach().norm()))  # a thread that a thread starts
        timer.start()
        timer.join()


@pattern("gradients in threads", fsdp1=IN_THREADS, fsdp2=IN_THREADS, zero2=IN_THREADS, zero3=IN_THREADS)
class GradientsInThreads(ThreadPattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.see("norm", self.pool.submit(lambda: self.first.weight.grad.norm()).result())


@pattern("weights in an overridden `state_dict()`")
class WeightsInStateDict(Pattern):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        self.seen["state"] = float(self.first.weight.norm() + state["model.head.weight"].norm())
        return state

    def on_train_epoch_end(self) -> None:
        self.trainer.strategy.lightning_module_state_dict()
        self.see("saved", self.seen["state"])


IN_IGNORED = "gradients of `ignored_modules` in `on_after_backward` and in the step of manual optimization"


@pattern(IN_IGNORED)
class IgnoredAfterBackward(Pattern):
    ignored = "model.head"

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(1 / (1 + parameter.grad.norm()))  # type: ignore[union-attr]
        self.see("norm", self.model.head.weight.grad.norm())  # type: ignore[union-attr]


@pattern(IN_IGNORED)
class IgnoredInLambdaCallback(Pattern):
    ignored = "model.head"

    def callbacks(self) -> list[Callback]:
        return [
            LambdaCallback(on_after_backward=lambda _, module: module.see("norm", module.model.head.bias.grad.norm()))
        ]


@pattern(IN_IGNORED)
class IgnoredInManualStep(ManualPattern):
    ignored = "model.head"

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.see("norm", self.model.head.weight.grad.norm())  # type: ignore[union-attr]
        self.model.head.bias.grad.mul_(1 / (1 + self.model.head.bias.grad.norm()))  # type: ignore[union-attr]
        optimizer.step()


@pattern(
    "gradients of `ignored_modules` in an overridden `backward()`",
    fsdp1=Refused("of ignored_modules was used in backward", "`on_after_backward`"),
    fsdp2=Refused("of ignored_modules was used in backward", "`on_after_backward`"),
)
class IgnoredInOwnBackward(Pattern):
    ignored = "model.head"

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self.see("norm", self.model.head.weight.grad.norm())  # type: ignore[union-attr]


@pattern("`ignored_modules` that some steps leave out")
class IgnoredAndLeftOut(Pattern):
    ignored = "model.extra"
    leaves_unused = True

    def build(self) -> Net:
        net = Net()
        net.extra = nn.Linear(OUTPUTS, OUTPUTS)
        return net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.model(batch[0])
        if batch_idx % 2 == 0:
            outputs = outputs + cast("nn.Linear", self.model.extra)(outputs)
        return functional.mse_loss(outputs, batch[1])


# ------------------------------------------------------------------ below all modes
OPTIMIZERS_IN_STEPS = "weights in `optimizer.param_groups` changed in `training_step`"


@pattern(OPTIMIZERS_IN_STEPS)
class GroupsChangedInSteps(Pattern):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data.clamp_(-0.3, 0.3)
        return self.loss(batch)


@pattern(OPTIMIZERS_IN_STEPS)
class GroupsChangedInLateSteps(GroupsChangedInSteps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx < 2 else super().training_step(batch, batch_idx)


TRANSFORMED = Refused("inside of torch.func.vmap, grad, jvp", "`full = weight[:]`, outside of the transform")


@pattern("`torch.func.vmap`, `grad`, `jvp` of weights", fsdp1=TRANSFORMED, fsdp2=TRANSFORMED, zero3=TRANSFORMED)
class TransformsOfWeights(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        self.see("norms", torch.func.vmap(torch.linalg.vector_norm, in_dims=1)(self.first.weight).sum())


@pattern("the same, of a whole weight taken before: `full = weight[:]`")
class TransformsOfWholeWeights(Pattern):
    def on_train_batch_end(self, *_: Any) -> None:
        full = self.first.weight[:].detach()
        self.see("norms", torch.func.vmap(torch.linalg.vector_norm, in_dims=1)(full).sum())


MOVED = Refused("A hook or a step changes parameters of the model", "`weight.double()`, or `Trainer(precision=...)`")


@pattern("`module.half()`, `double()`, `to(another)` in hooks", fsdp1=MOVED, fsdp2=MOVED, zero2=MOVED, zero3=MOVED)
class MovedInHooks(Pattern):
    def on_train_epoch_start(self) -> None:
        self.model.double().float()


@pattern("`module.to(device)`, `float()` in hooks and steps, which change nothing of parameters")
class MovedToWhereTheyAre(Pattern):
    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def on_train_start(self) -> None:
        self.model.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.float()
        self.see("dtype", self.model.head.weight.dtype == torch.float32)
        return self.loss(batch) * self.factor


class _InLateBatches(Pattern):
    """Changes a weight of the root's in steps and evaluations that begin late."""

    validates = True

    def change(self, weight: Tensor) -> None:
        """Change it."""

    def loss(self, batch: Any) -> Tensor:
        if self.global_step >= 3:
            with torch.no_grad():
                self.change(self.model.head.weight)
        return super().loss(batch)


@pattern("`w.data` written to, or assigned, in steps and evaluations, from any batch on", core=True)
class DataInLateBatches(_InLateBatches):
    def change(self, weight: Tensor) -> None:
        weight.data.mul_(0.9)
        weight.data = weight.data - 0.01


@pattern("the same through a view, `out=` and `torch._foreach_*`")
class ViewsInLateBatches(_InLateBatches):
    def change(self, weight: Tensor) -> None:
        weight[0].data.add_(0.1)
        torch.neg(weight.data, out=weight.data)
        torch._foreach_mul_([weight.data], 0.9)


@pattern("NumPy arrays of weights read in steps and evaluations")
class NumPyInLateBatches(Pattern):
    validates = True

    def loss(self, batch: Any) -> Tensor:
        for weight in (self.first.weight, self.model.head.weight):
            self.see("most", weight.detach().numpy().max())
        return super().loss(batch)


COPIED = Refused("the NumPy array of an unsharded parameter", "`weight[0] = 0.25`, or NumPy in a hook")


@pattern("the same, written to", fsdp1=COPIED, fsdp2=COPIED)
class NumPyWrittenInLateBatches(_InLateBatches):
    def change(self, weight: Tensor) -> None:
        weight.detach().numpy().fill(0.25)


@pattern("a NumPy array of a weight, or weights of the optimizer's groups, used after `optimizer.step()` in a step")
class NumPyOverManualSteps(Pattern):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        values = self.first.weight.detach().numpy()
        values[0] = 0.25
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
        self.see("stepped", values.mean())
        with torch.no_grad():
            self.first.weight.data.mul_(0.9)
            torch._foreach_mul_(optimizer.param_groups[0]["params"], 0.9)
        self.see("changed", self.first.weight.detach().sum())


def in_table(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return patterns by their rows in the docs, in the order of this file."""
    rows: dict[str, list[Entry]] = {}
    for entry in entries:
        rows.setdefault(entry.does, []).append(entry)
    return rows
