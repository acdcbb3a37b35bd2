"""Optimizers, how each engine trains with them, and the training that shows it: with clipping, a save and a resume."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytorch_optimizer
import schedulefree
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.gpu import share_a_device
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer

ENGINES = ("fsdp1", "fsdp2", "zero1", "zero2", "zero3")
Answer = Literal["right", "whole", "refused"]
"""``whole``: right with ``whole_tensor_optimizers=True``, and refused without it."""
STEPS, SAVED_AFTER, SAMPLES = 6, 3, 6
MAX_NORM = 0.7
"""Clips some of the steps."""


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization, as a step that evaluates its closure twice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        moves = [one.grad * (0.05 / norm) for one in held]
        for one, move in zip(held, moves, strict=True):
            one.add_(move)
        evaluate()
        for one, move in zip(held, moves, strict=True):
            one.sub_(move)
        super().step()
        return loss


class SumsFromTheStart(torch.optim.Optimizer):
    """Divides by the root of summed squares, which its constructor makes, as `Adagrad`'s did before torch 2.12."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["sum"] = torch.full_like(one, 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    total = self.state[one]["sum"].addcmul_(one.grad, one.grad)
                    one.addcdiv_(one.grad, total.sqrt(), value=-group["lr"])
        return loss


def adamw_of_torchao(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Make an optimizer whose states have 8 bits."""
    from torchao.optim import AdamW8bit  # not in `dev`: transformers would load its kernels with each import

    return AdamW8bit(params, **options)


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    """From the parameters."""
    options: dict[str, Any]
    fsdp1: Answer = "right"
    fsdp2: Answer = "right"
    zero: Answer = "right"
    matrices_alone: bool = False
    """Whether it trains matrices, and nothing trains the rest."""
    core: bool = False
    """Whether `make test` trains it."""
    needs: str = ""
    """A package that may be missing."""
    why: dict[str, str] = field(default_factory=dict)
    """A part of the refusal, by engine."""

    def answer(self, engine: str) -> Answer:
        """Return what the table says."""
        return self.zero if engine.startswith("zero") else getattr(self, engine)

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model."""
        return self.make(
            [one for one in module.parameters() if one.ndim == 2 or not self.matrices_alone], **self.options
        )


def _elementwise(name: str, make: Any, core: bool = False, **options: Any) -> Entry:
    return Entry(name, make, options, core=core)


def _by_parameter(name: str, make: Any, **options: Any) -> Entry:
    """States have the shapes of parameters."""
    return Entry(name, make, options, fsdp1="whole", fsdp2="whole", zero="refused")


_ENTRIES = [
    _elementwise("`SGD` with momentum", torch.optim.SGD, lr=0.1, momentum=0.9),
    _elementwise("`AdamW`", torch.optim.AdamW, lr=0.02, weight_decay=0.1, core=True),
    _elementwise("`AdamW(foreach=True)`", torch.optim.AdamW, lr=0.02, foreach=True),
    _elementwise("`AdamW(fused=True)`", torch.optim.AdamW, lr=0.02, fused=True),
    _elementwise("`Adagrad`", torch.optim.Adagrad, lr=0.05),
    _elementwise("`RMSprop`", torch.optim.RMSprop, lr=0.01, momentum=0.9),
    _elementwise("one whose constructor makes its states", SumsFromTheStart, lr=0.05),
    _elementwise("Lion (pytorch-optimizer)", pytorch_optimizer.Lion, lr=0.01),
    _elementwise("`AdamWScheduleFree` (schedulefree)", schedulefree.AdamWScheduleFree, lr=0.02),
    Entry(
        "`Muon`, over matrices",
        torch.optim.Muon,
        {"lr": 0.02},
        zero="refused",
        matrices_alone=True,
        core=True,
    ),
    Entry("`Adafactor`", torch.optim.Adafactor, {"lr": 0.05}, "refused", "whole", "refused", core=True),
    Entry(
        "`Adafactor` (transformers)",
        transformers.Adafactor,
        {"lr": 0.02, "relative_step": False, "scale_parameter": True},
        "refused",
        "whole",
        "refused",
    ),
    _by_parameter("LAMB (pytorch-optimizer)", pytorch_optimizer.Lamb, lr=0.02),
    _by_parameter("LARS (pytorch-optimizer)", pytorch_optimizer.LARS, lr=0.02),
    Entry("Shampoo (pytorch-optimizer)", pytorch_optimizer.Shampoo, {"lr": 0.02}, "refused", "whole", "refused"),
    Entry("SAM (its closure runs twice)", SAM, {"lr": 0.1, "momentum": 0.9}, "refused", "right", "refused"),
    Entry("`AdamW8bit` (torchao)", adamw_of_torchao, {"lr": 0.02}, "refused", "refused", "refused", needs="torchao"),
    Entry("`LBFGS`", torch.optim.LBFGS, {"lr": 0.1}, "refused", "refused", "refused"),
]
OPTIMIZERS = {re.sub(r"\W+", "_", entry.name).strip("_"): entry for entry in _ENTRIES}
"""By the names of the tests."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def _model() -> Net:
    torch.manual_seed(1)
    return Net()


def _batches() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(STEPS, SAMPLES, 8, generator=generator, dtype=torch.float32)
    return numbers[..., :5], numbers[..., 5:]


class Module(LightningModule):
    """Sees the same batches whatever the number of processes is."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.model, self.entry = _model(), entry

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        share = SAMPLES // self.trainer.world_size
        own = slice(self.global_rank * share, (self.global_rank + 1) * share)
        inputs, targets = (each[batch_idx, own].to(self.device, self.model.last.weight.dtype) for each in _batches())
        return functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = self.entry.build(self.model)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(STEPS, 1)))


class Saving(Callback):
    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self._path)


def _trained(
    key: str, engine: str, folder: str, *, resumes: bool, whole: bool | None, **options: Any
) -> dict[str, Tensor] | str:
    """Return the weights that a fit leaves, or why it was refused."""
    zero = engine.startswith("zero")
    module = Module(OPTIMIZERS[key]).to(torch.float32 if zero else torch.float64)
    strategy: Any = (
        AccelDeepSpeedStrategy(zero_stage=int(engine[-1]))
        if zero
        else AccelFSDPStrategy(
            fsdp_version=int(engine[-1]),
            auto_wrap_policy={nn.Linear},
            state_dict_type="sharded_state_dict",
            whole_tensor_optimizers=whole,
        )
    )
    trainer = quiet_trainer(
        strategy,
        dist.get_world_size(),
        max_epochs=1,
        gradient_clip_val=MAX_NORM,
        use_distributed_sampler=False,
        plugins=[] if zero else [DoublePrecision()],
        callbacks=[] if resumes else [Saving(f"{folder}/saved.ckpt")],
        **options,
    )
    try:
        trainer.fit(module, ckpt_path=f"{folder}/saved.ckpt" if resumes else None)
    except ValueError as error:
        return str(error)
    with strategy.full_parameters(module):
        return {name: one.detach().double().cpu().clone() for name, one in module.model.named_parameters()}


@cache
def _expected(key: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what a plain loop leaves."""
    model = _model().to(dtype)
    optimizer = OPTIMIZERS[key].build(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    inputs, targets = (each.to(dtype) for each in _batches())
    held = [one for group in optimizer.param_groups for one in group["params"]]
    for step in range(STEPS):

        @torch.enable_grad()
        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(inputs[step]), targets[step])
            loss.backward()
            nn.utils.clip_grad_norm_(held, MAX_NORM)
            return loss

        step_with_closure: Any = optimizer.step
        step_with_closure(closure)
    return {name: one.detach().double() for name, one in model.named_parameters()}


def problem(key: str, engine: str, folder: Path, *, on_gpu: bool = False) -> str:
    """Train a cell of the table, and return how it differs from what the table says.

    A run on two processes saves; one on three (with ZeRO on two: DeepSpeed's states stay with their number) resumes.
    """
    entry, zero = OPTIMIZERS[key], engine.startswith("zero")
    answer = entry.answer(engine)
    if answer != "right":
        [refusal, *_] = run_on_ranks(2, _run, key, engine, str(folder), False, None, on_gpu, timeout_s=120)
        if not isinstance(refusal, str):
            return "was not refused"
        if type(entry.make).__name__ != "function" and entry.make.__name__ not in refusal:
            return f"is refused without its name: {refusal}"
        if (answer == "whole") != ("(whole_tensor_optimizers=True)" in refusal):
            return f"is refused with another way out: {refusal}"
        if answer == "refused":
            return ""
    whole = True if answer == "whole" else None
    expected = _expected(key, torch.float32 if zero else torch.float64)
    tolerance = 2e-5 if zero else 1e-9  # sums over ranks have another order
    for resumes, num_ranks in ((False, 2), (True, 2 if zero else 3)):
        for weights in run_on_ranks(num_ranks, _run, key, engine, str(folder), resumes, whole, on_gpu, timeout_s=120):
            if isinstance(weights, str):
                return f"is refused: {weights}"
            far = {name: float((weights[name] - one).abs().max()) for name, one in expected.items()}
            if not max(far.values()) <= tolerance:
                return f"{'resumed on other processes' if resumes else 'trained'}, differs by {max(far.values()):.1e}"
    return ""


def _run(
    key: str, engine: str, folder: str, resumes: bool, whole: bool | None, on_gpu: bool
) -> dict[str, Tensor] | str:
    options = share_a_device() if on_gpu else {}
    return _trained(key, engine, folder, resumes=resumes, whole=whole, **options)
