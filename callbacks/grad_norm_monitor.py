"""`GradNormMonitor`: logs the norm of the gradients, of all and of groups of parameters."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..state.arguments import named_arguments
from ..strategies.gradient_norms import Belongs, NamedGradient, named_gradients, norms_by_label
from ..strategies.upstream.lightning import (
    Callback,
    DeepSpeedStrategy,
    GradClipAlgorithmType,
    LightningModule,
    Trainer,
    is_overridden,
)
from .trainer_package import check_trainer


@named_arguments
class GradNormMonitor(Callback):
    r"""Logs the global norm of the gradients at each optimizer step: whole, averaged over processes, before clipping.

    The same number on every process, equal to that of one process that has the whole model. Where the strategy computes
    the norm anyway (`AccelFSDPStrategy` clipping by norm, DeepSpeed), that one is logged and nothing more is reduced.
    Otherwise there is one reduction of a few numbers, and none at all where each process has all gradients.

    Logged as ``log_name``, groups as ``log_name/LABEL``, with several optimizers ``log_name/INDEX`` and
    ``log_name/INDEX/LABEL``; they are in ``trainer.callback_metrics`` and in `last`.

    Args:
        groups: Label to a regular expression that is searched in the parameters' names, such as
            ``{"embedding": "embed", "first": r"blocks\.0\."}``. Gradients are then always reduced here, all groups
            together. Under DeepSpeed each gradient is gathered for that, which is slow.
        every_n_steps: Optimizer steps from one measurement to the next.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
        log_name: Name in the logs.

    Raises:
        ValueError: If an argument is out of its range; while training, if a group has no gradient.
    """

    def __init__(
        self,
        groups: Mapping[str, str] | None = None,
        every_n_steps: int = 1,
        norm_type: float = 2.0,
        log_name: str = "grad_norm",
    ) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be an int >= 1, got {every_n_steps!r}.")
        if not norm_type > 0:
            raise ValueError(f"norm_type must be > 0, got {norm_type!r}. Use 2.0, or inf for the largest value.")
        self.groups = dict(groups or {})
        self.every_n_steps = every_n_steps
        self.norm_type = float(norm_type)
        self.log_name = log_name
        self.last: dict[str, Tensor] = {}
        """What was logged last, by name."""
        self._labels: dict[str, Belongs] = {"": None}
        for label, pattern in self.groups.items():
            self._labels[label] = _belonging(label, pattern)
        self._start(None)

    def _start(self, known: Any) -> None:
        self._num_steps: dict[str, int] = {}
        self._measured: dict[str, Tensor] = {}
        self._awaited: str | None = None
        self._known = known

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(_norm_of(trainer))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        deepspeed = isinstance(trainer.strategy, DeepSpeedStrategy)
        # Lightning's own strategy comes here at every micro-batch, and lets the engine count.
        counts = deepspeed and trainer.strategy.handles_gradient_accumulation
        if counts and not _engine(trainer).is_gradient_accumulation_boundary():
            return  # it is called for each micro-batch there
        name = self._name_for(trainer, optimizer)
        self._num_steps[name] = self._num_steps.get(name, trainer.global_step // len(trainer.optimizers)) + 1
        if self._num_steps[name] % self.every_n_steps:
            return
        ready = _norm_of(trainer)
        if self.groups or self.norm_type != 2.0:
            self._measure(trainer, optimizer, name)
        elif not pl_module.automatic_optimization and not deepspeed and ready is not self._known:  # clipped by hand
            self._measured[name] = ready
        elif deepspeed or _will_clip_by_norm(trainer, pl_module):
            self._awaited = name
        else:
            self._measure(trainer, optimizer, name)
        self._known = ready

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._awaited is not None:
            norm = _norm_of(trainer)
            if norm is None or (isinstance(norm, Tensor) and norm is self._known):
                raise RuntimeError(
                    f"{type(trainer.strategy).__name__} has computed no gradient norm in this step. Leave DeepSpeed's "
                    "computation of the norm switched on; clip with self.clip_gradients or strategy.clip_grad_norm."
                )
            self._measured[self._awaited], self._awaited, self._known = torch.as_tensor(norm), None, norm
        if self._measured:
            self.last, self._measured = self._measured, {}
            pl_module.log_dict(dict(self.last), on_step=True, on_epoch=False, batch_size=1)

    def _measure(self, trainer: Trainer, optimizer: Optimizer, name: str) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            gradients = _deepspeed_gradients(trainer)
        else:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients = named_gradients(trainer.strategy.model or trainer.lightning_module, parameters)
        norms = norms_by_label(gradients, self._labels, self.norm_type)
        self._measured |= {f"{name}/{label}" if label else name: norm for label, norm in norms.items()}

    def _name_for(self, trainer: Trainer, optimizer: Optimizer) -> str:
        if len(trainer.optimizers) == 1:
            return self.log_name
        index = next(index for index, other in enumerate(trainer.optimizers) if other is optimizer)
        return f"{self.log_name}/{index}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last": {name: float(norm) for name, norm in self.last.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last = {name: torch.tensor(norm) for name, norm in state_dict["last"].items()}


def _belonging(label: str, pattern: str) -> Belongs:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"groups[{label!r}]: {pattern!r} is no regular expression: {error}.") from error
    return functools.partial(_occurs, pattern)  # not a closure: a Trainer may have to pickle its callbacks


@functools.cache
def _occurs(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


def _engine(trainer: Trainer) -> Any:
    """Return DeepSpeed's engine."""
    return trainer.model


def _norm_of(trainer: Trainer) -> Any:
    """Return the norm that the strategy computed last, None where it computes none."""
    strategy = trainer.strategy
    if not hasattr(strategy, "last_grad_norm") and isinstance(strategy, DeepSpeedStrategy):
        return _engine(trainer).get_global_grad_norm()
    return getattr(strategy, "last_grad_norm", None)


def _will_clip_by_norm(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Tell whether the strategy will compute the norm in this step, between this hook and the optimizer."""
    return (
        hasattr(trainer.strategy, "last_grad_norm")
        and pl_module.automatic_optimization
        and bool(trainer.gradient_clip_val)
        and trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
        and not is_overridden("configure_gradient_clipping", pl_module)
        and not is_overridden("clip_gradients", pl_module)
    )


def _deepspeed_gradients(trainer: Trainer) -> Iterator[NamedGradient]:
    from deepspeed.utils import safe_get_full_grad

    engine = _engine(trainer)
    if engine.fp16_enabled() and not engine.zero_optimization():
        raise NotImplementedError(
            "GradNormMonitor(groups=...) under DeepSpeed with fp16 needs ZeRO: the gradients of stage 0 are scaled. "
            "Use stage 1 to 3, or bf16, or leave groups out."
        )
    scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter.requires_grad and (gradient := safe_get_full_grad(parameter)) is not None:
            yield NamedGradient(name, gradient if scale == 1.0 else gradient.float() / scale)
