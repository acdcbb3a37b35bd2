"""The source of the optimizer and the schedule: the code, or the DeepSpeed config through dummies; never both."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...state.process_group import is_planned
from ..common.modules import IN_REAL_NUMBERS, sparse_embeddings
from ..optimizers.classes import try_on_owners, try_on_pieces
from ..sharded_tensors.user_code import step_hooks
from ..upstream.lightning import (
    LightningModule,
    LRSchedulerConfig,
    _call_lightning_module_hook,
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
    _validate_optimizers_attached,
    rank_zero_info,
)
from .ds_config import DeepSpeedSettings, DummyOptim, DummyScheduler, HfDeepSpeedConfig, check_optimizer_and_scheduler
from .library import check_build_locks, ninja_on_path

_log = logging.getLogger(__name__)


@dataclass
class Chosen:
    """The result of ``configure_optimizers``, with its dummies, checked against the config."""

    optimizer: Optimizer | DummyOptim | None = None
    """None where the config alone says everything."""
    scheduler: Any = None
    """A dummy, or a real schedule."""
    configs: list[LRSchedulerConfig] = field(default_factory=list)
    """When each schedule steps."""

    @property
    def real(self) -> Optimizer | None:
        """The optimizer of the code, if it is no dummy."""
        return self.optimizer if isinstance(self.optimizer, Optimizer) else None

    def parameters(self, module: nn.Module) -> list[Any]:
        """Return the config's optimizer's parameters: the dummy's parameters or groups, else all that are trained."""
        if isinstance(self.optimizer, DummyOptim):
            return list(self.optimizer.params)
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def groups(self, module: nn.Module) -> list[list[nn.Parameter]]:
        """Return the parameters of each of the optimizer's groups, before DeepSpeed takes them over."""
        given: list[Any] = self.parameters(module) if self.real is None else self.real.param_groups
        in_groups: list[list[nn.Parameter]] = [each["params"] for each in given if isinstance(each, dict)]
        return in_groups or [given]

    @property
    def scheduler_callable(self) -> Callable[[Any], Any] | None:
        """The function that makes the schedule, where a dummy has one."""
        return self.scheduler.lr_scheduler_callable if isinstance(self.scheduler, DummyScheduler) else None

    def take_schedule(self, engine: Any) -> None:
        """Take over the schedule that the engine made: the Trainer steps it, so the engine must not."""
        schedule, engine.lr_scheduler = engine.lr_scheduler, None
        if schedule is None:
            return
        if not self.configs:
            self.configs = [LRSchedulerConfig(schedule, interval="step")]
        self.configs[0].scheduler = schedule


def choose(module: LightningModule, config: HfDeepSpeedConfig) -> Chosen:
    """Call ``configure_optimizers`` and check its result against the DeepSpeed config.

    Raises:
        ValueError: If both or neither define the optimizer, both define the schedule, a dummy has nothing to stand
            for, or there are several optimizers.
    """
    returned = _call_lightning_module_hook(module.trainer, "configure_optimizers", pl_module=module)
    found = Chosen() if returned is None else _parse(module, returned)
    check_optimizer_and_scheduler(config, found.optimizer, found.scheduler)
    return found


def _parse(module: LightningModule, returned: Any) -> Chosen:
    """Make Lightning parse all the forms it knows: real optimizers replace the dummies meanwhile."""
    stand_ins = _StandIns()
    optimizers, schedulers, monitor = _configure_optimizers(stand_ins.put_in(returned))
    make = _configure_schedulers_automatic_opt if module.automatic_optimization else None
    configs = make(schedulers, monitor) if make else _configure_schedulers_manual_opt(schedulers)
    if len(optimizers) != 1:
        raise ValueError(
            f"configure_optimizers() returned {len(optimizers)} optimizers, but a DeepSpeed engine has only one. Use "
            "one optimizer with several parameter groups; for models trained against each other, create one engine "
            "per model with strategy.prepare_model()."
        )
    _validate_optimizers_attached(optimizers, configs)
    schedules = [stand_ins.schedulers.get(id(each.scheduler), each.scheduler) for each in configs]
    if len(schedules) > 1 and any(isinstance(schedule, DummyScheduler) for schedule in schedules):
        raise ValueError(
            f"configure_optimizers() returned {len(schedules)} schedules, a DummyScheduler among them. The DeepSpeed "
            "config defines one schedule: return only that DummyScheduler, or only real schedules."
        )
    optimizer = stand_ins.optimizers.get(id(optimizers[0]), optimizers[0])
    return Chosen(optimizer, schedules[0] if schedules else None, configs)


class _StandIns:
    """Real optimizers and schedules in the place of dummies, for Lightning's own checks."""

    def __init__(self) -> None:
        self.optimizers: dict[int, DummyOptim] = {}
        self.schedulers: dict[int, DummyScheduler] = {}
        self._made: dict[int, Any] = {}

    def put_in(self, value: Any) -> Any:
        """Return ``value`` with stand-ins."""
        if isinstance(value, DummyOptim):
            return self._optimizer(value)
        if isinstance(value, DummyScheduler):  # a schedule of DeepSpeed's counts steps, not epochs
            return {"scheduler": self._scheduler(value), "interval": "step"}
        if isinstance(value, dict):
            if isinstance(value.get("scheduler"), DummyScheduler):
                return {"interval": "step", **value, "scheduler": self._scheduler(value["scheduler"])}
            return {key: self.put_in(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.put_in(inner) for inner in value]
        return value

    def _optimizer(self, dummy: DummyOptim) -> Optimizer:
        if id(dummy) not in self._made:
            parameters = dummy.params or [nn.Parameter(torch.zeros(()))]
            copies = [{**each} if isinstance(each, dict) else each for each in parameters]  # SGD adds its own options
            stand_in = self._made[id(dummy)] = SGD(copies, lr=dummy.lr)
            self.optimizers[id(stand_in)] = dummy
        return self._made[id(dummy)]

    def _scheduler(self, dummy: DummyScheduler) -> LambdaLR:
        optimizer = dummy.optimizer
        real = self._optimizer(optimizer) if isinstance(optimizer, DummyOptim) else optimizer
        groups = [dict(group) for group in real.param_groups]
        stand_in = LambdaLR(real, lambda _: 1.0)
        for group, before in zip(real.param_groups, groups, strict=True):  # a schedule writes into them
            group.clear()
            group.update(before)
        self.schedulers[id(stand_in)] = dummy
        self._made[id(stand_in)] = stand_in
        return stand_in


def check_parameters(chosen: Chosen, module: nn.Module, stage: int) -> None:
    """Check that an optimizer trains parameters of the module, which alone DeepSpeed follows, in each group.

    Raises:
        ValueError: If it has another, or a group has none; it says where.
    """
    own, groups = set(module.parameters()), chosen.groups(module)
    optimizer = "The config's optimizer" if chosen.optimizer is None else type(chosen.optimizer).__name__
    strange = [(group, place) for group, each in enumerate(groups) for place, one in enumerate(each) if one not in own]
    if strange:
        group, place = strange[0]
        raise ValueError(
            f"{optimizer} has {len(strange)} parameters that do not belong to {type(module).__name__} "
            f"(the first: group {group}, place {place}), but DeepSpeed trains only the module's parameters. Register "
            "their module as a submodule, or build the optimizer over self.parameters() in configure_optimizers()."
        )
    for group, each in enumerate(groups):
        if not any(one.requires_grad or stage not in (1, 2) for one in each):
            is_frozen = bool(each)
            raise ValueError(
                f"{optimizer}: group {group} has no parameters{' that train' if is_frozen else ''}, and "
                f"DeepSpeed cannot keep it. Omit it{', or freeze them in on_train_start()' if is_frozen else ''}."
            )


def check_real(module: nn.Module) -> None:
    """Check that there are no complex parameters, which DeepSpeed would make real.

    Raises:
        ValueError: If there is one; it names the first.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ValueError(f"{name}: DeepSpeed makes {parameter.dtype} parameters real. {IN_REAL_NUMBERS}")


def check_embeddings(module: nn.Module, settings: DeepSpeedSettings) -> None:
    """Check that no embedding has sparse gradients, unless the config says that stage 0 reduces them.

    Raises:
        ValueError: If one has.
    """
    problems = list(sparse_embeddings(module))
    if problems and (settings.zero_stage or not settings.config.get("sparse_gradients")):
        raise ValueError("\n".join([f"DeepSpeed cannot train this {type(module).__name__}:", *problems]))


@contextmanager
def step_hooks_aside(optimizer: Optimizer | None) -> Iterator[None]:
    """Keep users' hooks on an optimizer's step from running inside.

    ZeRO calls the step of the user's optimizer for each of its flat parameters, after the backward and before the model
    has the new weights.
    """
    found = [step_hooks(optimizer, "pre"), step_hooks(optimizer, "post")]
    before = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(found, before, strict=True):
            hooks.update(own)


def check_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Check that an optimizer can step on flat pieces of parameters, which is what the stages 1 to 3 give it.

    Raises:
        ValueError: If its class treats elements otherwise there, or needs a closure; or if it is LBFGS, in any stage.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS evaluates its closure several times in a step, and needs scalar products over all parameters: no "
            "ZeRO stage supports that. Use another optimizer, or train with Trainer(strategy='ddp')."
        )
    if not stage or type(optimizer).__module__.startswith("deepspeed") or is_planned():
        return
    verdict = try_on_pieces(optimizer)
    if verdict.needs_closure and verdict.problem is None:
        raise ValueError(
            f"{name} steps only with a closure, but DeepSpeed calls its step() without one. Use an optimizer whose "
            "step() needs none (AdamW, SGD), or AccelFSDPStrategy."
        )
    if verdict.problem is not None:
        raise ValueError(
            f"{name} cannot train with ZeRO stage {stage}, which lets it step on flat parts of parameters: "
            f"{verdict.problem}. Use {'' if verdict.needs_closure else 'stage 0, '}{_with_fsdp(optimizer)}an "
            "element-wise optimizer (AdamW, SGD), or Trainer(strategy='ddp')."
        )


def _with_fsdp(optimizer: Optimizer) -> str:
    """Return how FSDP trains with it, if it can step on each whole parameter apart."""

    def shape_of(parameter: torch.Tensor) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    if try_on_owners(optimizer, shape_of, keeps_shapes=False).problem is not None:
        return ""
    return "AccelFSDPStrategy(fsdp_version=2, whole_tensor_optimizers=True), "


def for_offload(optimizer: Optimizer, settings: DeepSpeedSettings) -> tuple[Optimizer, DeepSpeedSettings]:
    """Return the optimizer that steps on offloaded state: DeepSpeed's own Adam on the CPU in the place of torch's.

    It shares the parameter groups of the one it replaces, so a schedule that was made for that drives it.

    Returns:
        The optimizer, and settings that allow it.

    Raises:
        RuntimeError: If the op cannot be compiled.
    """
    name = type(optimizer).__name__
    if not (settings.offloads_optimizer and settings.forces_deepspeed_cpu_optimizer):
        return optimizer, settings
    if type(optimizer) in (Adam, AdamW):
        return _cpu_adam(optimizer), settings
    if "DeepSpeedCPU" in name:
        return optimizer, settings
    _log.info("%s steps on offloaded state without replacement: DeepSpeed has no version of it for the CPU.", name)
    return optimizer, settings.changed({"zero_force_ds_cpu_optimizer": False})


def _cpu_adam(optimizer: Optimizer) -> Optimizer:
    groups = optimizer.param_groups
    is_decoupled, *others = {bool(group["decoupled_weight_decay"]) for group in groups}
    if others or any(group["amsgrad"] or group["maximize"] for group in groups):
        raise ValueError(
            "DeepSpeed's Adam on the CPU supports neither amsgrad, maximize, nor groups that differ in "
            "decoupled_weight_decay. Remove them, stop offloading, or set 'zero_force_ds_cpu_optimizer': false in the "
            "DeepSpeed config to keep torch's."
        )
    for group in groups:
        group.setdefault("bias_correction", True)
    compiled_cpu_adam()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made = DeepSpeedCPUAdam([*groups[0]["params"]], adamw_mode=is_decoupled)
    made.param_groups = groups
    optimizer._opt_called = True  # type: ignore[attr-defined] # else its schedule warns that it never steps
    return made


def prefer_torch_adam(settings: DeepSpeedSettings, device: torch.device) -> DeepSpeedSettings:
    """Use torch's Adam for the config's where DeepSpeed would compile one in vain, unless the config says otherwise.

    On the CPU that takes half a minute for what torch has ready; on CUDA it needs nvcc, which few installations have. A
    parameter that torch's does not take leaves everything as it is.
    """
    known = {"lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode"}
    if settings.offloads_optimizer or not settings.defines_adam or not set(settings.optimizer_params) <= known:
        return settings
    if device.type == "cuda" and not _has_fused_adam():
        rank_zero_info(
            "torch's Adam is used: DeepSpeed would have to compile its fused Adam, but nvcc is not available."
        )
    elif device.type != "cpu":
        return settings
    return settings.changed({"optimizer.params.torch_adam": True})


def _has_fused_adam() -> bool:
    """Return whether DeepSpeed's Adam for CUDA is there, or can be compiled."""
    from deepspeed.git_version_info import installed_ops
    from torch.utils import cpp_extension

    return bool(installed_ops.get("fused_adam")) or cpp_extension.CUDA_HOME is not None


@functools.cache
def compiled_cpu_adam() -> None:
    """Compile DeepSpeed's Adam for the CPU, which takes half a minute the first time on a machine.

    Raises:
        RuntimeError: If that fails; the message has the ways out.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    rank_zero_info("Compiling or loading DeepSpeed's Adam for the CPU (the first time takes about half a minute).")
    check_build_locks("cpu_adam")
    try:
        with ninja_on_path():
            CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        raise RuntimeError(
            "DeepSpeed's Adam for the CPU could not be compiled: it needs a C++ compiler (g++) and ninja "
            "(pip install ninja). Install them, or stop offloading, or set 'zero_force_ds_cpu_optimizer': false in the "
            f"DeepSpeed config to use torch's Adam. The compiler said: {error}"
        ) from error
