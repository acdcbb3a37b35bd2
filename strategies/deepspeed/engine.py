"""DeepSpeed's engine: started, kept between fits, driven from outside: the loop ends accumulation windows."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import itertools
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from ..common.broadcast import check_layout, send_from_rank_zero
from ..common.launch import RunSummary, Unit
from ..sharded_tensors.kept_tensors import OldMemory
from ..upstream.lightning import rank_zero_info
from ..upstream.patches import Patches
from .accumulation import GradientAccumulator, plain_norm, window_of
from .ds_config import DeepSpeedSettings, HfDeepSpeedConfig, untested_line
from .library import check_async_io, check_build_locks, deepspeed_library, ninja_on_path, ops_of_optimizer
from .optimizers import check_embeddings
from .zero_optimizer import (
    MasterWeights,
    State,
    clear_padding,
    is_partitioned_optimizer,
    pieces,
)


def start_engine(
    module: nn.Module,
    settings: DeepSpeedSettings,
    device: torch.device,
    *,
    optimizer: Any = None,
    parameters: Iterable[Any] = (),
    lr_scheduler: Any = None,
) -> Any:
    """Run ``deepspeed.initialize``; all ranks begin with rank 0's parameters and buffers.

    Args:
        module: The model; the engine shards it in place.
        settings: Of this engine; their config is handed on.
        device: Where this rank computes.
        optimizer: A real optimizer; None takes the config's, over ``parameters``.
        parameters: Parameters, or groups of them, for the config's optimizer.
        lr_scheduler: A callable that makes a schedule; None takes the config's, if it has one.

    Raises:
        ValueError: If DeepSpeed cannot train the model's embeddings.
        RuntimeError: On every rank, if the ranks have built different models; or if NVMe cannot be used here.
    """
    check_async_io(settings)
    parameters = list(parameters)
    if optimizer is not None or parameters:
        check_embeddings(module, settings)
    check_layout(dict(itertools.chain(module.named_parameters(), module.named_buffers())))
    send_from_rank_zero(module.buffers(), device)  # DeepSpeed broadcasts the parameters alone
    # The engine compares the rank of its device with 0, where Lightning has None for the CPU.
    arguments = argparse.Namespace(device_rank=0 if device.index is None else device.index)
    check_build_locks(*ops_of_optimizer(settings))
    if line := untested_line(HfDeepSpeedConfig(settings.config)):
        rank_zero_info(line)
    outputs = OpaqueOutputs(module) if settings.zero_stage == 3 else None
    old_memory = OldMemory.of(module)
    old_memory.take(module)
    with ninja_on_path(), readable_config_errors(), keeping_adagrad(optimizer):
        engine, *_ = deepspeed_library().initialize(
            args=arguments,
            config=settings.config,
            model=module,
            optimizer=optimizer,
            model_parameters=parameters,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
    if outputs is not None:
        outputs.attach(engine)
        clear_padding(engine.module, engine.optimizer)
        _hold_weakly(engine.module)
    old_memory.forget(module)
    drive_adagrad(engine)
    cast_inputs(engine)
    remember(engine, settings)
    return engine


def _hold_weakly(module: nn.Module) -> None:
    """Make DeepSpeed's list of running layers, in which the model stays, hold it weakly."""
    from deepspeed.runtime.zero import parameter_offload

    layers = parameter_offload.FWD_MODULE_STACK

    def remove(gone: Any) -> None:
        layers[:] = [each for each in layers if each is not gone]

    model = weakref.proxy(module)
    layers[:] = [model if each is module else each for each in layers]
    weakref.finalize(module, remove, model).atexit = False


@contextmanager
def gradients_scaled(engine: Any, factor: float) -> Iterator[None]:
    """Make the engine's step inside this context use its gradients multiplied by ``factor``.

    ZeRO's optimizers divide their gradients by the loss scale, wherever they keep them (flat partitions, host memory,
    files): a scale smaller by ``factor`` is one way for all.
    """
    scaler = getattr(engine.optimizer, "loss_scaler", None) if engine.zero_optimization() else None
    if factor == 1.0 or scaler is None:  # plain gradients are multiplied already
        yield
        return
    before = scaler.cur_scale
    scaled = scaler.cur_scale = before / factor
    try:
        yield
    finally:  # a dynamic scale may have moved in between, by a factor of its own; a product would round the others
        scaler.cur_scale = before if scaler.cur_scale == scaled else scaler.cur_scale * factor


def step(engine: Any, window: GradientAccumulator, **kwargs: Any) -> torch.Tensor | None:
    """Scale the window's gradients by its factor, and let the optimizer step on them.

    Returns:
        The gradients' global norm before clipping; None without any, or where DeepSpeed is set not to compute it.
    """
    window.complete()
    with gradients_scaled(engine, window.factor):
        norm = plain_norm(engine) if window.norm is None and not engine.zero_optimization() else window.norm
        window.step(**kwargs)
    norm = engine.get_global_grad_norm() if norm is None else norm
    return None if norm is None or not window.has_stepped else torch.as_tensor(norm).detach().float().reshape(())


# ------------------------------------------------------------------------------------------------
# The state that an optimizer has when an engine takes it: of an earlier fit, of plain steps, or from its making.
#
# ZeRO lets the optimizer step on flat tensors. What it has for the parameters themselves would be left behind, and what
# it has for the flat tensors of one engine means nothing to the next.


@contextmanager
def keeping_adagrad(optimizer: Any) -> Iterator[None]:
    """Keep DeepSpeed from replacing the user's Adagrad while it makes an engine in this context.

    It would make one for the state on flat tensors, without the groups, their options and their schedule.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Adagrad):
        yield
        return
    with Patches("ZeRO optimizers") as patches:
        patches.put(optimizer, "__class__", type(kind.__name__, (Optimizer,), {}))
        yield


def drive_adagrad(engine: Any) -> None:
    """Attach schedules that were made for the config's Adagrad to the one with which DeepSpeed has replaced it."""
    stepping, made = getattr(engine.optimizer, "optimizer", None), engine.basic_optimizer
    if isinstance(stepping, Adagrad) and isinstance(made, Adagrad) and stepping is not made:
        stepping.param_groups = made.param_groups


class OptimizerStateTransfer:
    """Carries the state of the user's optimizer from engine to engine."""

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None
        self._groups: list[list[nn.Parameter]] = []
        self._whole: dict[nn.Parameter, State] = {}
        self._of_engines: dict[Optimizer, tuple[list[list[nn.Parameter]], Any]] = {}
        self._parts: dict[nn.Parameter, tuple[int, State, State]] | None = {}

    def keep(self, engine: Any) -> None:
        """Note what is in the optimizer of an engine that is about to end: this rank's part."""
        window = window_of(engine)
        if window is None or window.given is None or window.is_plain:
            return
        optimizer, groups = window.given
        parts = None
        if window.steps is not None and not getattr(engine.optimizer, "swap_optimizer", False):
            parts = {piece.parameter: (piece.start, spread, own) for piece, spread, own in window.steps.states()}
        self._of_engines[optimizer] = groups, parts

    def take(self, optimizer: Optimizer | None) -> None:
        """Take the state out of the optimizer that the next engine gets, which has the module's parameters then.

        Raises:
            ValueError: If an earlier engine had it, whose state cannot be reached.
        """
        self._optimizer = optimizer
        if optimizer is None:
            return
        if optimizer in self._of_engines:
            groups, self._parts = self._of_engines[optimizer]
            if self._parts is None:
                raise ValueError(
                    f"This {type(optimizer).__name__} has stepped in an earlier fit() with DeepSpeed, whose state "
                    "(on NVMe, or of stage 0 in half precision) cannot be transferred. Create a new optimizer in "
                    "configure_optimizers()."
                )
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = list(parameters)
        else:
            self._whole = {each: state for each, state in optimizer.state.items() if state}  # type: ignore[misc]
        optimizer.state.clear()
        self._groups = [list(group["params"]) for group in optimizer.param_groups]

    def give(self, window: GradientAccumulator) -> None:
        """Give the state to the optimizer of the next engine; every rank must call it.

        Raises:
            ValueError: If that cannot take any.
        """
        if self._optimizer is None:
            return
        window.given = self._optimizer, self._groups
        if window.is_plain:
            for parameter, state in self._full(window.device):
                self._optimizer.state[parameter] = state
        elif window.steps is not None:
            window.steps.take_states(self._full(window.device))
        elif any(True for _ in self._full(window.device)):
            raise ValueError(
                f"This {type(self._optimizer).__name__} has stepped before, but DeepSpeed's stage 0 in half "
                "precision accepts no state. Create a new optimizer in configure_optimizers(), or use stage 1."
            )

    def _full(self, device: torch.device) -> Iterator[tuple[nn.Parameter, State]]:
        """Yield each parameter that has state, with all of it, one after the other in one order on all ranks."""
        yield from self._whole.items()
        parameters = [each for group in self._groups for each in group]
        parts = self._parts or {}
        mine = {
            place: ({key: value.dtype for key, value in spread.items()}, counted)
            for place, parameter in enumerate(parameters)
            if parameter in parts
            for _, spread, counted in [parts[parameter]]
        }
        of_all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all_ranks, mine)
        for place, parameter in enumerate(parameters):
            known = next((each[place] for each in of_all_ranks if place in each), None)
            if known is None or not (known[0] or known[1]):
                continue
            shape = getattr(parameter, "ds_shape", parameter.shape)
            state = dict(known[1])
            for key, dtype in known[0].items():
                full = torch.zeros(shape, dtype=dtype, device=device)
                if parameter in parts:
                    start, spread, _ = parts[parameter]
                    full.view(-1)[start : start + spread[key].numel()] = spread[key].to(device)
                dist.all_reduce(full)
                state[key] = full
            yield parameter, state


# ------------------------------------------------------------------------------------------------
# The DeepSpeed engine of each module: the next one has to end it first, whichever strategy made it.
#
# An engine stays on its module after fit(): it evaluates and saves what it has trained. If it were still there when the
# next engine trains, its hooks on parameters and layers would reduce gradients twice and gather parameters for nobody.


_ENGINES: weakref.WeakKeyDictionary[Any, DeepSpeedSettings] = weakref.WeakKeyDictionary()
_HOOKS: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Handles of our own hooks on an engine's module."""
_OF_LAYERS = ("pre_bwd_fn", "post_bwd_fn")  # functions of one engine, which the next would take over
_OF_PARAMETERS = {
    *("all_gather", "all_gather_coalesced", "partition", "reduce_gradients_at_owner", "partition_gradients", "item"),
    *("aligned_size", "padding_size", "partition_numel", "convert_to_zero_parameters", "_orig_item", "nvme_swapper"),
    *("is_external_param", "_z3_optimizer", "grad_accum"),
}
"""Attributes that DeepSpeed's stage 3 adds to parameters, besides those named ``ds_...``."""


@dataclass(frozen=True)
class Kept:
    """The state that ended engines hand to the next."""

    masters: MasterWeights = field(default_factory=MasterWeights)
    """The fp32 weights of what was trained in 16 bits."""
    states: OptimizerStateTransfer = field(default_factory=OptimizerStateTransfer)
    """Of the optimizers of the user's code."""


def remember(engine: Any, settings: DeepSpeedSettings) -> None:
    """Note that an engine is on its module, made with these settings."""
    _ENGINES[engine] = settings


def keep_hooks(engine: Any, handles: Iterable[Any]) -> None:
    """Take hooks on an engine's module, which end with the engine."""
    _HOOKS.setdefault(engine, []).extend(handles)


def engine_of(module: nn.Module) -> tuple[Any, DeepSpeedSettings] | None:
    """Return the engine whose module this is and its settings, or None."""
    return next((found for found in _ENGINES.items() if found[0].module is module), None)


def end_engines_on(module: nn.Module, *, stage: int) -> Kept:
    """End every engine that has a parameter of this module.

    Parameters keep their values. Those that stage 3 has partitioned stay partitioned for another engine of that stage;
    for any other, every rank gets the full parameters back.

    Args:
        module: The module that gets another engine.
        stage: The next engine's ZeRO stage.

    Returns:
        What the next engine continues with.
    """
    mine, kept = set(module.parameters()), Kept()
    for engine in [each for each in list(_ENGINES) if not mine.isdisjoint(each.module.parameters())]:
        window = window_of(engine)
        if window is not None and window.changes is not None:  # written in the last hook, or left by an exception
            window.changes.sync_to_model()
        kept.masters.keep(engine)
        kept.states.keep(engine)
        end_engine(engine)
    if stage != 3:
        unpartition(module)
    return kept


def end_engine(engine: Any) -> None:
    """Take an engine's hooks off its module."""
    _ENGINES.pop(engine, None)
    window = window_of(engine)
    if window is not None:
        window.forget()
    release_parameters(engine)
    engine.destroy()
    for handle in _HOOKS.pop(engine, []):
        handle.remove()
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        if hasattr(engine, name):
            getattr(engine, name).remove()
    for layer in engine.module.modules():
        for name in _OF_LAYERS:
            layer.__dict__.pop(name, None)
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_persist"):
            parameter.ds_persist = parameter.is_external_param = False  # the next engine has its own


_IMPORTED_IN_DESTROY = "deepspeed.module_inject.auto_ep_comm", "deepspeed.utils.pin_memory"
"""A collection of garbage may run it in the midst of another import, which raises KeyError in Python 3.11."""


def free_with_last_reference(engine: Any) -> None:
    """Release an engine and its model to the garbage collector; call it after the last backward.

    torch does not see that a hook on a gradient and its weight hold each other, and DeepSpeed keeps layers in a cache.
    """
    if engine not in _ENGINES:
        return
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    for hook in getattr(engine.optimizer, "_grad_acc_hooks", ()):
        hook.remove()
    for name in _IMPORTED_IN_DESTROY:
        with suppress(ImportError):
            importlib.import_module(name)
    method: Any = Coordinator._PartitionedParameterCoordinator__params_to_release
    cached: Any = inspect.getclosurevars(method).nonlocals.get("func")  # under a decorator
    if hasattr(cached, "cache_clear"):
        cached.cache_clear()


def release_parameters(engine: Any) -> None:
    """Make stage 3 release all parameters, even after an exception in the middle of a forward or backward."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if not hasattr(offload, "partition_all_parameters"):
        return
    from deepspeed.runtime.zero import parameter_offload

    models = [weakref.proxy(each.module) for each in _ENGINES]  # each object has one
    parameter_offload.FWD_MODULE_STACK[:] = [
        layer for layer in parameter_offload.FWD_MODULE_STACK if any(layer is model for model in models)
    ]
    for layer in engine.module.modules():
        if hasattr(layer._parameters, "_in_forward"):
            layer._parameters._in_forward = False
        layer.__dict__.pop("applied_pre_backward_ref_cnt", None)
        layer.__dict__.pop("ds_grads_remaining", None)
    offload.release_backward_leftovers()
    parameters: list[Any] = list(engine.module.parameters())
    ours = [each for each in parameters if hasattr(each, "ds_id")]
    if len(ours) == len(parameters):
        offload.partition_all_parameters()
        return
    for each in ours:  # users' code added a layer, which is the error that is on its way
        each.ds_active_sub_modules.clear()
    ours[0].partition(param_list=ours)


def unpartition(module: nn.Module) -> None:
    """Undo stage 3's partitioning; every rank must call it."""
    for layer in module.modules():
        if "_original_parameters" in layer.__dict__:
            del layer.__dict__["_original_parameters"]
            layer._parameters = dict(layer._parameters)
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed_library().zero.GatheredParameters([parameter]):
                full = parameter.data.clone()
            for name in [name for name in vars(parameter) if name.startswith("ds_") or name in _OF_PARAMETERS]:
                delattr(parameter, name)
            parameter.data = full


# ------------------------------------------------------------------------------------------------
# Inputs that the user's own code gives to a model in half precision, in hooks or after training: cast to its dtype.
#
# The Trainer casts batches. What else is given to the module, or to a module that it holds directly, is cast here, as
# FSDP's units do it. Inside of a forward nothing is: models compute in fp32 in some places on purpose.


def cast_inputs(engine: Any) -> None:
    """Cast what an engine's module is given, if it computes in half precision."""
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return
    caster, root = _Caster(), engine.module
    handles = [
        *(one.register_forward_hook(caster.leave, always_call=True) for one in (engine, root)),
        engine.register_forward_pre_hook(caster.enter),
        root.register_forward_pre_hook(caster.cast_and_enter, with_kwargs=True),
        *(child.register_forward_pre_hook(caster.cast, with_kwargs=True) for child in root.children()),
    ]
    keep_hooks(engine, handles)


class _Caster:
    def __init__(self) -> None:
        self._depth = 0

    def enter(self, *_: Any) -> None:
        self._depth += 1

    def cast_and_enter(self, root: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        given = self.cast(root, args, kwargs)
        self.enter()
        return given

    def leave(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)  # with always_call, also where `enter` was not reached

    def cast(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
        if self._depth or dtype is None:
            return None

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if torch.is_floating_point(tensor) else tensor

        return apply_to_collection((args, kwargs), Tensor, convert)


# ------------------------------------------------------------------------------------------------
# Outputs of layers that stage 3 cannot traverse: objects without ``__dict__``, such as dataclasses with slots.
#
# DeepSpeed 0.19 takes any output that is no tensor, list, tuple or dict for an object with ``__dict__`` and ends in
# ``vars()`` otherwise. A hook before its own hands it the tensors inside, as a list; a hook after it puts back into the
# object what became of them, and returns the object.


class OpaqueOutputs:
    """Lets stage 3 see into what the layers of a module return.

    Args:
        module: Before its engine is made, so that the hooks come before DeepSpeed's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._passages = {layer: _Passage() for layer in module.modules()}
        self._handles = [layer.register_forward_hook(passage.open) for layer, passage in self._passages.items()]

    def attach(self, engine: Any) -> None:
        """Put the hooks that come after DeepSpeed's; they go with the engine."""
        closing = [layer.register_forward_hook(passage.close) for layer, passage in self._passages.items()]
        keep_hooks(engine, [*self._handles, *closing])


class _Passage:
    """One layer's output on its way through DeepSpeed's hooks."""

    def __init__(self) -> None:
        self._whole: Any = None
        self._names: list[str] = []

    def open(self, layer: nn.Module, args: Any, output: Any) -> list[torch.Tensor] | None:
        self._whole = None
        if output is None or isinstance(output, torch.Tensor | list | tuple | dict) or hasattr(output, "__dict__"):
            return None
        self._whole = output
        self._names = [name for name, value in _slots(output) if _has_graph(value)]
        return [getattr(output, name) for name in self._names]

    def close(self, layer: nn.Module, args: Any, output: Any) -> Any:
        whole, self._whole = self._whole, None
        if whole is None:
            return None
        for name, tensor in zip(self._names, output, strict=True):
            object.__setattr__(whole, name, tensor)  # frozen dataclasses, too
        return whole


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _slots(output: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(output).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(output, name):
                yield name, getattr(output, name)


# ------------------------------------------------------------------------------------------------
# DeepSpeed's complaints about a config, in one line for each key.


@contextmanager
def readable_config_errors() -> Iterator[None]:
    """Translate DeepSpeed's complaints about the config of an engine that is made in this context.

    Raises:
        ValueError: With each key that DeepSpeed does not know, and the one that was meant, or does not take; or if the
            device lacks the precision.
    """
    try:
        yield
    except ValueError as error:
        if lacking := re.fullmatch(r"Type (\w+) is not supported on your device\.", str(error)):
            raise ValueError(
                f"DeepSpeed does not compute in {lacking[1]} on this device. Use another Trainer(precision=...), "
                "'bf16-mixed' or '32-true', and remove the fp16 section from the DeepSpeed config, or use another "
                "device."
            ) from None
        if type(error).__name__ != "ValidationError" or not hasattr(error, "errors"):  # pydantic's
            raise
        known = _keys_of(error)
        lines = [_line(found, known) for found in error.errors()]
        raise ValueError("\n".join(["DeepSpeed rejects this config:", *lines])) from None


def _line(found: dict[str, Any], known: list[str]) -> str:
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] != "extra_forbidden":
        return f"- {key}: {found['input']!r}. {found['msg']}."
    near = difflib.get_close_matches(key, known, n=1)
    return f"- {key}: there is no such key." + (f" Did you mean {near[0]!r}?" if near else "")


def _keys_of(error: Any) -> list[str]:
    """Return the keys of the section that the error is about."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return list(DeepSpeedZeroConfig.model_fields) if error.title == DeepSpeedZeroConfig.__name__ else []


# ------------------------------------------------------------------------------------------------
# The summary of a fit with DeepSpeed at its start.


def summarise_run(
    strategy: str, engine: Any, settings: DeepSpeedSettings, device: torch.device, precision: str, saved_by: str
) -> RunSummary:
    """Return the summary of a fit.

    Args:
        strategy: Name of its class.
        engine: DeepSpeed's.
        settings: Of the engine.
        device: Of this process.
        precision: The Trainer's.
        saved_by: Who writes checkpoints, empty if training does.
    """
    whole = sum(_numel(one) for one in engine.module.parameters())
    here = sum(_held(one) for one in engine.module.parameters())
    parts = [f"{whole:,} parameters, {here:,} of them on rank 0"]
    if is_partitioned_optimizer(engine.optimizer):
        stepped = sum(piece.numel for piece in pieces(engine.optimizer))
        parts.append(f"optimizer state of {stepped:,} on rank 0")
    offloads = {"optimizer": settings.offload_optimizer_device, "parameters": settings.offload_param_device}
    return RunSummary(
        strategy=strategy,
        engine=f"ZeRO-{settings.zero_stage} of DeepSpeed {deepspeed_library().__version__}",
        device=device,
        world_size=dist.get_world_size(),
        details=[f"{what} offloaded to {where}" for what, where in offloads.items() if where != "none"],
        parts=parts,
        precision=precision,
        checkpoints=f"folder of DeepSpeed's{saved_by}",
    )


def describe_units(engine: Any) -> list[Unit]:
    """Return the modules whose parameters ZeRO-3 gathers together, with this process's shards; other stages have none.

    Args:
        engine: DeepSpeed's.
    """
    from deepspeed.utils import z3_leaf_module

    found = []
    known: set[nn.Parameter] = set()

    def visit(name: str, module: nn.Module) -> None:
        is_leaf = z3_leaf_module(module)
        own = [one for one in module.parameters(recurse=is_leaf) if hasattr(one, "ds_tensor") and one not in known]
        known.update(own)  # a tied one is counted where it is met first
        if own:
            numel, held = sum(map(_numel, own)), sum(one.ds_tensor.nbytes for one in own)
            gathered = sum(_numel(one) * one.ds_tensor.element_size() for one in own)
            found.append(Unit(name, type(module).__name__, numel, held, gathered))
        for child_name, child in () if is_leaf else module.named_children():
            visit(f"{name}.{child_name}".lstrip("."), child)

    visit("", engine.module)
    return found


def _numel(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _held(parameter: nn.Parameter) -> int:
    """Return the number of elements that this process holds at rest, with padding."""
    partition = getattr(parameter, "ds_tensor", None)
    return parameter.numel() if partition is None else int(partition.ds_numel)
