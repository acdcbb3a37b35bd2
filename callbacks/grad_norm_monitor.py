"""`GradNormMonitor`: logs the norm of the gradients, in total and for each group of parameters."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from ..checkpoint.names import clean_name
from ..state.utils import check_count, named_arguments
from ..strategies.common.grads import (
    dtype_of_powers,
    global_norm,
    gradients_of,
    norm_powers,
    parameters_of,
    reduce_powers,
)
from ..strategies.deepspeed.strategy import AccelDeepSpeedStrategy
from ..strategies.fsdp.sharded_model import unwrap_root
from ..strategies.fsdp.strategy import AccelFSDPStrategy
from ..strategies.sharded_tensors.shards import local_part
from ..strategies.upstream.lightning import (
    Callback,
    DeepSpeedStrategy,
    FSDPStrategy,
    GradClipAlgorithmType,
    LightningModule,
    Trainer,
    check_trainer,
    is_overridden,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        check_count("every_n_steps", every_n_steps)
        if not norm_type > 0:
            raise ValueError(f"norm_type must be > 0, got {norm_type!r}. Use 2.0, or inf for the largest value.")
        self.groups = dict(groups or {})
        self.every_n_steps = every_n_steps
        self.norm_type = float(norm_type)
        self.log_name = log_name
        self.last: dict[str, Tensor] = {}
        """The values logged last, by name."""
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
        elif deepspeed or will_clip_by_norm(trainer, pl_module):
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
                    f"{type(trainer.strategy).__name__} computed no gradient norm in this step. Keep DeepSpeed's "
                    "norm computation enabled; clip with self.clip_gradients or strategy.clip_grad_norm."
                )
            self._measured[self._awaited], self._awaited, self._known = torch.as_tensor(norm), None, norm
        if self._measured:
            self.last, self._measured = self._measured, {}
            pl_module.log_dict(dict(self.last), on_step=True, on_epoch=False, batch_size=1)

    def _measure(self, trainer: Trainer, optimizer: Optimizer, name: str) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            norms = norms_by_label(_deepspeed_gradients(trainer), self._labels, self.norm_type)
        elif self.groups:
            root = trainer.strategy.model or trainer.lightning_module
            norms = norms_by_label(named_gradients(root, parameters_of(optimizer)), self._labels, self.norm_type)
        else:
            norms = {"": total_norm(trainer, optimizer, self.norm_type)}
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
        raise ValueError(f"groups[{label!r}]: {pattern!r} is not a regular expression: {error}.") from error
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


def will_clip_by_norm(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Tell whether the strategy will compute the norm in this step, between this hook and the optimizer."""
    return (
        hasattr(trainer.strategy, "last_grad_norm")
        and pl_module.automatic_optimization
        and bool(trainer.gradient_clip_val)
        and trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
        and not is_overridden("configure_gradient_clipping", pl_module)
        and not is_overridden("clip_gradients", pl_module)
    )


def total_norm(trainer: Trainer, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
    """Return the norm of an optimizer's gradients, before its step and outside of DeepSpeed; every process calls it.

    Returns:
        float32 or float64 scalar. The same on every process, except for gradients that differ there under ``ddp``.
    """
    strategy = trainer.strategy
    parameters = parameters_of(optimizer)
    if isinstance(strategy, AccelFSDPStrategy):
        return strategy.grad_norm(optimizer, norm_type)
    if isinstance(strategy, FSDPStrategy):  # Lightning's own, whose gradients do not show that they are sharded
        gradients = named_gradients(strategy.model or trainer.lightning_module, parameters)
        return norms_by_label(gradients, {"": None}, norm_type)[""]
    return global_norm(gradients_of(parameters), norm_type)


def _deepspeed_gradients(trainer: Trainer) -> Iterator[NamedGradient]:
    from deepspeed.utils import safe_get_full_grad

    engine, strategy = _engine(trainer), trainer.strategy
    if engine.fp16_enabled() and not engine.zero_optimization():
        raise NotImplementedError(
            "GradNormMonitor(groups=...) under DeepSpeed with fp16 needs ZeRO: the gradients of stage 0 are scaled. "
            "Use stage 1 to 3, or bf16, or omit groups."
        )
    if isinstance(strategy, AccelDeepSpeedStrategy):
        scale = strategy.gradient_scale
    else:
        scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter.requires_grad and (gradient := safe_get_full_grad(parameter)) is not None:
            yield NamedGradient(name, gradient if scale == 1.0 else gradient.float() / scale)


# ------------------------------------------------------------------------------------------------
# Norms of gradients by parameter name, for FSDP1, FSDP2, other DTensors and plain parameters.


Belongs = Callable[[str], bool] | None


@dataclass(frozen=True)
class NamedGradient:
    """One process's part of a parameter's gradient."""

    name: str
    """Name of the original parameter in the LightningModule."""
    values: Tensor
    """This process's part, maybe empty."""
    groups: tuple[ProcessGroup, ...] = ()
    """Groups over whose processes the gradient is spread; none where each process has all of it."""


def named_gradients(root: nn.Module, parameters: Collection[Tensor]) -> Iterator[NamedGradient]:
    """Yield the gradients of ``parameters`` by the names of the original parameters, in the same order on all ranks.

    Args:
        root: The strategy's model: sharded, wrapped, or as it is.
        parameters: What an optimizer holds; flat parameters in FSDP1 without ``use_orig_params``.
    """
    chosen = {id(parameter) for parameter in parameters}
    flattened: set[int] = set()
    for prefix, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield from _of_handle(prefix, module._handle, chosen, flattened)
    plain = root.module if isinstance(root, DistributedDataParallel) else unwrap_root(root)
    for name, parameter in plain.named_parameters():
        if id(parameter) in chosen and id(parameter) not in flattened and parameter.grad is not None:
            yield NamedGradient(clean_name(name), local_part(parameter.grad), _groups_of(parameter.grad))


def _of_handle(prefix: str, handle: Any, chosen: set[int], flattened: set[int]) -> Iterator[NamedGradient]:
    """Yield the gradients of one FSDP1 unit; empty ones where this rank's shard has nothing of a parameter."""
    flat = handle.flat_param
    flattened.add(id(flat))
    groups = (handle.process_group,) if handle.uses_sharded_strategy else ()
    for index, (fqn, place) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
        name = clean_name(f"{prefix}.{fqn}" if prefix else fqn)
        if handle._use_orig_params:
            original = flat._params[index]
            flattened.add(id(original))
            if id(original) in chosen and original.requires_grad:
                yield NamedGradient(name, flat.new_empty(0) if original.grad is None else original.grad, groups)
        elif id(flat) in chosen and flat.requires_grad:
            values = flat.new_empty(0)
            if flat.grad is not None and place.in_shard:
                values = flat.grad.narrow(0, place.offset_in_shard, place.numel_in_shard)
            yield NamedGradient(name, values, groups)


def _groups_of(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    placements = enumerate(gradient.placements)
    return tuple(mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


@torch.no_grad()
def norms_by_label(
    gradients: Iterator[NamedGradient], labels: Mapping[str, Belongs], norm_type: float = 2.0
) -> dict[str, Tensor]:
    """Return a norm for each label, over the gradients whose names belong to it.

    All labels travel in one reduction for each set of groups that gradients are spread over; plain FSDP has one.

    Args:
        gradients: As `named_gradients` yields them.
        labels: For each label a test of whether a name belongs to it, None for all names. A name may belong to
            several labels, or to none.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        float32 scalars, the same on every rank.

    Raises:
        ValueError: If a label has no gradient; the message has the names there are.
    """
    by_groups: dict[tuple[ProcessGroup, ...], list[NamedGradient]] = defaultdict(list)
    for gradient in gradients:
        by_groups[gradient.groups].append(gradient)
    names = [gradient.name for members in by_groups.values() for gradient in members]
    for label, belongs in labels.items():
        if belongs is not None and not any(map(belongs, names)):
            found = ", ".join(names) or "nothing"
            raise ValueError(f"No gradient belongs to {label!r}. The gradients belong to {found}.")
    if not names:
        return dict.fromkeys(labels, torch.tensor(0.0))
    powers = [_powers(members, groups, labels, norm_type) for groups, members in by_groups.items()]
    stacked = torch.stack([power.to(powers[0].device) for power in powers])
    norms = stacked.amax(0) if math.isinf(norm_type) else stacked.sum(0) ** (1.0 / norm_type)
    return dict(zip(labels, norms.float().unbind(), strict=True))


def _powers(
    members: list[NamedGradient],
    groups: tuple[ProcessGroup, ...],
    labels: Mapping[str, Belongs],
    norm_type: float,
) -> Tensor:
    """Return norm**p (the norm itself for inf) of each label, over all processes of the groups."""
    infinite = math.isinf(norm_type)
    filled = [member for member in members if member.values.numel()]  # an empty part has no largest value
    if filled:
        own = norm_powers([part.values for part in filled], norm_type)
        mask = torch.tensor([[belongs is None or belongs(part.name) for part in filled] for belongs in labels.values()])
        # Not by a product with the mask: an infinite norm would turn every label into NaN.
        rows = torch.where(mask.to(own.device), own, torch.zeros_like(own))
        powers = rows.amax(1) if infinite else rows.sum(1)
    else:
        device = members[0].values.device
        powers = torch.zeros(len(labels), dtype=dtype_of_powers(device), device=device)
    reduce_powers(powers, groups, norm_type)
    return powers
