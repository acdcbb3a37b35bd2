"""Random programs of users' code: some lines of `user_lines`, each in a random place, in random training."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tests.strategies.trained_patterns import problems
from tests.strategies.user_lines import IN_GRADIENT_HOOKS, IN_HOOKS, answers_to, run_line
from tests.strategies.user_patterns import PATTERNS, Entry, Pattern

_IN_STEPS = ("training_step", "in_forward", "after_forward", "validation_step")
_PLACES = (
    *_IN_STEPS,
    *("on_train_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_before_optimizer_step"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_epoch_end"),
)
_WITH_GRADIENTS = ("on_before_optimizer_step", "on_after_backward")
_LAYERS = ("blocks.0.up", "blocks.1.down", "head", "embed")
_NOT_ALONE = ("zero_grad", "numpy", "dlpack")
"""Words of lines that mean something else, or are refused, in some place."""

_NOT_AFTER_FORWARDS = (".data = ", 'setattr(q, "data"')
"""Words of lines after which ``ddp`` computes some gradients with old values, as the guides say."""
_ERRORS = (
    *("ddp cannot train it", "modified by an inplace operation", "changed in place inside a forward"),
    "between a forward and its backward",
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

    @staticmethod
    def drawn(seed: int) -> Program:
        """Draw one."""
        draw = random.Random(seed)
        accumulate, is_manual = draw.choice((1, 1, 2, 3)), draw.random() < 0.25
        lines = tuple(_line(draw, accumulate) for _ in range(draw.choice((1, 2, 2, 3))))
        return Program(lines, accumulate, is_manual, clips=not is_manual and draw.random() < 0.4)


def _line(draw: random.Random, accumulate: int) -> _Line:
    if draw.random() < 0.4:
        place = draw.choice(_WITH_GRADIENTS if accumulate == 1 else _WITH_GRADIENTS[:1])
        lines = IN_GRADIENT_HOOKS
    else:
        place = draw.choice(_PLACES)
        words = (*_NOT_ALONE, *(_NOT_AFTER_FORWARDS if place == "after_forward" else ()))
        lines = [one for one in IN_HOOKS if not any(word in one for word in words)]
    where = "validation" if place in _IN_STEPS else "hooks"
    code = draw.choice([one for one in lines if not answers_to(one, where)])
    batches = draw.choice((range(4), range(4), range(1), range(2, 4)))
    return _Line(place, code, draw.choice(_LAYERS), frozenset(batches))


def _pattern(program: Program) -> type[Pattern]:
    compiled = [(line, compile(line.code, f"<{line.place}>", "exec")) for line in program.lines]

    class Drawn(Pattern):
        accumulate = 1 if program.is_manual else program.accumulate
        validates = any("validation" in line.place for line in program.lines)

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not program.is_manual
            self.batch_idx = 0
            for name in _LAYERS:
                self.model.get_submodule(name).register_forward_pre_hook(partial(self.in_forward, name))

        def run(self, place: str, layers: Sequence[str] = _LAYERS) -> None:
            for line, code in compiled:
                if line.place == place and line.layer in layers and self.batch_idx in line.batches:
                    run_line(self, code, line.layer)

        def in_forward(self, layer: str, *_: Any) -> None:
            self.run("in_forward", [layer])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batch_idx = batch_idx
            self.run("training_step")
            loss: Tensor = self.loss(batch)
            self.run("after_forward")
            if not program.is_manual:
                return loss
            optimizer: Any = self.optimizers()
            self.manual_backward(loss / program.accumulate)
            if (batch_idx + 1) % program.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.batch_idx = batch_idx
            self.run("validation_step")
            super().validation_step(batch, batch_idx)

        def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
            if program.clips:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    for place in {line.place for line in program.lines if line.place.startswith("on_")}:
        setattr(Drawn, place, lambda self, *_, _place=place, **__: self.run(_place))
    return Drawn


def problems_of_programs(engine: str, seeds: Iterable[int]) -> list[str]:
    """Train programs under an engine and under ddp on this rank; return those that differ, or that only ddp trains."""
    found = []
    for seed in seeds:
        program = Program.drawn(seed)
        name = f"program {seed}"
        PATTERNS[name] = Entry(_pattern(program), "lines", {}, core=False)
        found += [f"{one}\n{program}" for one in problems([name], engine) if not any(each in one for each in _ERRORS)]
    return found
