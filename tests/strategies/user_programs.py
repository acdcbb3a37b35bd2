"""Random programs of users' code: some lines of `user_lines`, each in a random place, in random training."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from tests.strategies.trained_patterns import problems
from tests.strategies.user_lines import IN_GRADIENT_HOOKS, IN_HOOKS, IN_STATES, answers_to, run_line
from tests.strategies.user_patterns import PATTERNS, Entry, Net, Pattern, Stopped

_LOSSES = ("plain", "plain", "two forwards", "block twice", "penalty", "recomputed", "target")
"""What a step computes."""
_MODELS = (*["plain"] * 4, "frozen", "freezes", "buffers", "tied", "groups", "optimizers", "unused")
"""What is trained."""
_ON_BUFFERS = (
    "s.model.blocks[0].norm.mean.mul_(0.9)",
    "s.model.blocks[0].norm.mean[0] = 1.5",
    "s.model.blocks[0].norm.mean.data.copy_(w.data.mean())",
    "s.model.blocks[1].norm.mean = s.model.blocks[1].norm.mean * 0.5",
    "s.model.blocks[1].norm.calls.zero_()",
    "see(s.model.blocks[0].norm.mean.sum() + s.model.blocks[0].norm.calls)",
    "see(sum(each.sum() for each in s.buffers()))",
    "s.model.blocks[1].norm.load_state_dict(s.model.blocks[0].norm.state_dict())",
)
_IN_STEPS = ("training_step", "in_forward", "after_forward", "validation_step")
_PLACES = (
    *_IN_STEPS,
    *("on_train_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_before_optimizer_step", "on_train_epoch_start", "on_fit_start", "on_train_end"),
    *("before_optimizer_step", "after_optimizer_step", "step_pre_hook", "step_post_hook", "after_zero_grad"),
    *("before_backward", "after_backward", "in_gradient_hook"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_epoch_end"),
)
_WITH_GRADIENTS = ("on_before_optimizer_step", "before_clipping", "after_clipping")
_WITH_LAST_GRADIENTS = ("on_after_backward", "after_backward", "step_pre_hook")
"""The same, outside of accumulation windows; the last runs before the closure, on what the step before has left."""
_STOPS = (
    *("training_step", "in_forward", "after_forward", "before_backward", "after_backward", "in_gradient_hook"),
    *("on_before_optimizer_step", "after_clipping", "step_pre_hook", "after_optimizer_step", "on_train_batch_end"),
)
_LAYERS = ("blocks.0.up", "blocks.1.down", "head", "embed")
_NOT_ALONE = ("zero_grad", "numpy", "dlpack")
"""Words of lines that mean something else, or are refused, in some place."""

_IN_BACKWARD = ("see(", "w.", "w[")
"""How lines begin that read, or change their own weight alone: others may be in use."""
_IN_OWN_BACKWARD = ("in_gradient_hook", "before_backward", "after_backward")
"""Where modules cannot be called."""
_FOR_BUFFERS = tuple(each for each in _PLACES if each not in _IN_OWN_BACKWARD)
_FOR_STATES = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_optimizer_step", "step_pre_hook"),
    *("step_post_hook", "before_optimizer_step", "after_optimizer_step", "on_validation_epoch_end", "training_step"),
)
"""Where a program's line on the optimizer's states runs, in the last batches of an epoch: an optimizer has stepped."""
_NOT_AFTER_FORWARDS = (".data = ", 'setattr(q, "data"')
"""Words of lines after which ``ddp`` computes some gradients with old values, as the guides say."""
_ERRORS = (
    *("ddp cannot train it", "modified by an inplace operation", "changed inside a forward"),
    *("between a forward and its backward", "was used in a loss", "whose activations are recomputed"),
    *(
        "which held frozen parameters",
        "which was frozen when fit() started",
        "returned 2 optimizers, but a DeepSpeed engine has only one",
    ),
    *("was used in backward(): with FSDP1", "DeepSpeed has freed the gradients", "assigns a tensor to a parameter"),
    "as it was when a training step had gathered it",
)
"""No program of ours, torch's own error (ZeRO-3's linear layers keep weights for all gradients), or refusals."""


@dataclass(frozen=True)
class _Line:
    place: str
    code: str
    layer: str
    batches: frozenset[int]
    """Of an epoch, in which it runs."""


@dataclass(frozen=True)
class Program:
    """Lines, and how the model is trained."""

    lines: tuple[_Line, ...]
    accumulate: int
    is_manual: bool
    clips: bool
    loss: str
    model: str
    fits: int
    resumes: str = ""
    """The form of the checkpoint from which a new module trains on; "" where the same module does."""
    accumulate_later: int | None = None
    toggles: bool = False
    """Whether each of several optimizers has a backward of its own, as the networks of a GAN."""
    stops_in: str = ""
    """The place in which the first of two fits fails; "" for none."""
    stops_at: int = 0
    """The batch in which it does."""
    is_evaluated: bool = False
    """Whether the module is validated between its fits."""

    @staticmethod
    def drawn(seed: int, *, with_states: bool = False) -> Program:
        """Draw one; ``with_states`` for an engine whose optimizers have states of single parameters in hooks."""
        draw = random.Random(seed)
        accumulate, is_manual = draw.choice((1, 1, 2, 3)), draw.random() < 0.25
        lines = tuple(_line(draw, accumulate) for _ in range(draw.choice((1, 2, 2, 3))))
        clips = not is_manual and draw.random() < 0.4
        loss, model = draw.choice(_LOSSES), draw.choice(_MODELS)
        if model == "optimizers":
            is_manual, clips = True, False
        if model == "buffers":
            lines += (_Line(draw.choice(_FOR_BUFFERS), draw.choice(_ON_BUFFERS), "head", frozenset(range(4))),)
        fits = draw.choice((1, 1, 1, 2))
        if with_states and draw.random() < 0.4:
            lines += (_Line(draw.choice(_FOR_STATES), draw.choice(IN_STATES), draw.choice(_LAYERS), frozenset((2, 3))),)
        more = random.Random(f"{seed}, second fits")  # what was drawn above stays as it was
        resumes = more.choice(("", "full_state_dict", "sharded_state_dict")) if more.random() < 0.5 else ""
        later = more.choice((None, 1, 2)) if accumulate > 1 else None  # lines were drawn for it
        toggles = model == "optimizers" and more.random() < 0.5
        fits = 2 if resumes else fits
        stops_in = more.choice(_STOPS) if not resumes and more.random() < 0.3 else ""
        fits = 2 if stops_in else fits
        stops_at, is_evaluated = more.choice((1, 2, 3)), fits == 2 and more.random() < 0.5
        return Program(
            *(lines, accumulate, is_manual, clips, loss, model, fits, resumes, later, toggles, stops_in, stops_at),
            is_evaluated=is_evaluated,
        )


def _line(draw: random.Random, accumulate: int) -> _Line:
    if draw.random() < 0.4:
        place = draw.choice((*_WITH_GRADIENTS, *(_WITH_LAST_GRADIENTS if accumulate == 1 else ())))
        lines = IN_GRADIENT_HOOKS
    else:
        place = draw.choice(_PLACES)
        words = (*_NOT_ALONE, *(_NOT_AFTER_FORWARDS if place == "after_forward" else ()))
        lines = [one for one in IN_HOOKS if not any(word in one for word in words)]
        if place == "in_gradient_hook":
            lines = [one for one in lines if one.startswith(_IN_BACKWARD) and "see(m" not in one]
        if place in _IN_OWN_BACKWARD:
            lines = [one for one in lines if "(torch.ones(2, w.shape[1]))" not in one]
    where = "validation" if place in _IN_STEPS else "hooks"
    code = draw.choice([one for one in lines if not answers_to(one, where)])
    batches = draw.choice((range(4), range(4), range(1), range(2, 4)))
    return _Line(place, code, draw.choice(_LAYERS), frozenset(batches))


class _Centred(nn.Module):
    """Subtracts a mean that forwards move: dividing by the deviation of two samples would magnify roundings."""

    mean: Tensor
    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.mean.lerp_(x.mean(0), 0.2)
                self.calls += 1
            mean = self.mean.clone()  # a second forward moves it before the backward of the first
        return self.scale * (x - mean)


class _Drawn(Pattern):
    """Runs the lines of a program in their places."""

    program: ClassVar[Program]
    compiled: ClassVar[list[tuple[_Line, Any]]]

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.program.is_manual
        self.batch_idx = 0
        self.will_stop = bool(self.program.stops_in)
        blocks: Any = self.model.blocks
        if self.program.model == "frozen":
            blocks[0].up.weight.requires_grad_(False)
        if self.program.model == "tied":
            blocks[1].up.weight = blocks[0].up.weight
        for name in _LAYERS:
            layer: Any = self.model.get_submodule(name)
            layer.register_forward_pre_hook(partial(self.in_forward, name))
            is_hooked = any(line.place == "in_gradient_hook" and line.layer == name for line in self.program.lines)
            is_hooked |= self.program.stops_in == "in_gradient_hook" and name == "blocks.1.down"
            if is_hooked and layer.weight.requires_grad:
                layer.weight.register_hook(partial(self.in_gradient_hook, name))
        if self.program.loss == "recomputed":
            for block in self.model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def build(self) -> Net:
        return Net(_Centred) if self.program.model == "buffers" else super().build()

    def parts(self) -> list[list[nn.Parameter]]:
        """Return the parameters of the blocks, and the others."""
        net = self.model
        return [list(net.blocks.parameters()), [*net.embed.parameters(), *net.head.parameters()]]

    def groups(self) -> Any:
        if self.program.model != "groups":
            return super().groups()
        blocks, rest = self.parts()
        return [{"params": blocks, "lr": 0.02, "weight_decay": 0.1}, {"params": rest}]

    def net(self, inputs: Tensor) -> Tensor:
        net = self.model
        leaves_out = self.program.model == "unused" and self.trainer.training and self.batch_idx % 2
        return net.head(net.blocks[0](net.embed(inputs))) if leaves_out else net(inputs)

    def run(self, place: str, layers: Sequence[str] = _LAYERS) -> None:
        where = (self.program.stops_in, self.program.stops_at)
        if self.will_stop and (place, self.batch_idx) == where and self.trainer.training:
            self.will_stop = False
            raise Stopped(place)
        for line, code in self.compiled:
            if line.place == place and line.layer in layers and self.batch_idx in line.batches:
                run_line(self, code, line.layer)

    def loss(self, batch: Any) -> Tensor:
        (inputs, targets), net, kind = batch, self.model, self.program.loss
        if kind == "block twice":
            return functional.mse_loss(net.head(net.blocks(net.blocks[0](net.embed(inputs)))), targets)
        loss = functional.mse_loss(self.net(inputs), targets)
        if kind == "two forwards":
            return loss + functional.mse_loss(self.net(2 * inputs), targets)
        if kind == "penalty":
            return loss + 0.01 * torch.stack([each.square().sum() for each in self.parameters()]).sum()
        if kind == "target":
            with torch.no_grad():
                targets = self.net(inputs + 1)
            return loss + functional.mse_loss(self.net(inputs), targets)
        return loss

    def in_forward(self, layer: str, *_: Any) -> None:
        self.run("in_forward", [layer])

    def in_gradient_hook(self, layer: str, gradient: Tensor) -> Tensor:
        self.run("in_gradient_hook", [layer])
        return gradient.clamp(-0.01, 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        self.run("training_step")
        loss = self.loss(batch)
        self.run("after_forward")
        if self.automatic_optimization:
            return loss
        optimizers: Any = self.optimizers()
        is_last = (batch_idx + 1) % self.program.accumulate == 0
        if self.program.toggles:
            for optimizer in optimizers:
                with optimizer.toggle_model(sync_grad=is_last):
                    self.manual_backward(self.loss(batch) / self.program.accumulate)
                    if is_last:
                        optimizer.step()
                        optimizer.zero_grad()
            return None
        self.manual_backward(loss / self.program.accumulate)
        for optimizer in (optimizers if isinstance(optimizers, list) else [optimizers]) if is_last else ():
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_train_epoch_start(self) -> None:
        if self.program.model == "freezes" and self.current_epoch == 1:
            self.model.get_parameter("blocks.1.down.weight").requires_grad_(False)
        self.run("on_train_epoch_start")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batch_idx = batch_idx
        self.run("validation_step")
        super().validation_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.run("before_backward")
        super().backward(loss, *args, **kwargs)
        self.run("after_backward")

    def configure_optimizers(self) -> Any:
        if self.program.model == "optimizers":
            optimizers = [SGD(part, lr=0.05, momentum=0.9) for part in self.parts()]
        else:
            optimizers = [super().configure_optimizers()]
        places = {*(line.place for line in self.program.lines), self.program.stops_in}
        for place in {each for each in places if each.startswith("step_")}:
            getattr(optimizers[0], f"register_{place}")(lambda *_, place=place: self.run(place))
        return optimizers

    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self.run("before_clipping")
        if self.program.clips:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.run("after_clipping")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.run("before_optimizer_step")
        super().optimizer_step(*args, **kwargs)
        self.run("after_optimizer_step")

    def optimizer_zero_grad(self, *args: Any) -> None:
        super().optimizer_zero_grad(*args)
        self.run("after_zero_grad")


def _pattern(program: Program) -> type[Pattern]:
    places = {*(line.place for line in program.lines), program.stops_in}
    hooks = {each for each in places if each.startswith("on_")} - {"on_train_epoch_start"}
    attributes: dict[str, Any] = {place: lambda self, *_, _place=place, **__: self.run(_place) for place in hooks}
    attributes |= {
        "program": program,
        "fits": program.fits,
        "compiled": [(line, compile(line.code, f"<{line.place}>", "exec")) for line in program.lines],
        "accumulate": 1 if program.is_manual else program.accumulate,
        "accumulate_later": program.accumulate_later,
        "resumes": program.resumes,
        "is_evaluated": program.is_evaluated,
        "leaves_unused": program.toggles or program.model in ("freezes", "unused"),
        "validates": program.is_evaluated or any("validation" in line.place for line in program.lines),
    }
    return type("Drawn", (_Drawn,), attributes)


def problems_of_programs(engine: str, seeds: Iterable[int]) -> list[str]:
    """Train programs under an engine and under ddp on this rank; return those that differ, or that only ddp trains."""
    found = []
    for seed in seeds:
        with_states = engine.startswith("fsdp")
        program = Program.drawn(seed, with_states=with_states)
        if engine.startswith("zero3") and program.loss == "penalty":
            program = replace(program, loss="two forwards")
        name = f"program {seed}, {program.loss}{', states' if with_states else ''}"  # what ddp trains is kept by name
        PATTERNS[name] = Entry(_pattern(program), "lines", {}, core=False)
        found += [f"{one}\n{program}" for one in problems([name], engine) if not any(each in one for each in _ERRORS)]
    return found
