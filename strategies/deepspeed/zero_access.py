"""Access of users' code to this rank's parts of ZeRO's parameters and gradients, see `GlobalTensors`.

Stage 3 shows nothing of a partitioned parameter: its values are in ``ds_tensor``. The stages 1 to 3 have no gradient
where torch has it: the reduced ones lie in partitions, from the end of an accumulation window to the step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...checkpoint.names import clean_name
from ..common.grads import gradients_of
from ..sharded_tensors.kept_tensors import OldMemory, has_storage, share_memory, storage_of
from ..sharded_tensors.optimizer_states import OptimizerStates
from ..sharded_tensors.shards import FlatLayout, FlatShard
from ..sharded_tensors.user_code import (
    as_library,
    follow_state_dicts,
    is_user_code,
    library_code,
    look_from_here,
    note_changes,
    refuse_copies,
)
from ..upstream.patches import replace_for_good
from . import zero_optimizer
from .accumulation import GradientAccumulator, finish_gather, partition, window_of
from .library import is_gathered_by_user

_IS_LIBRARY = "_accelight_is_library"


class ZeroAccess:
    """The `ShardAccess` of one module, from before its engine exists.

    Args:
        module: That DeepSpeed trains or evaluates.
        device: Where this rank computes.
    """

    shows_shards, gave_states = False, False

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._parameters: dict[int, nn.Parameter] = {id(each): each for each in module.parameters()}
        self._engine: Any = None
        self._window: GradientAccumulator | None = None
        self.in_step = self.ends_window = False
        self._pieces: dict[int, zero_optimizer.Piece] = {}
        self._places: dict[nn.Parameter, tuple[int, tuple[int, int]]] = {}
        """As `zero_optimizer.places` returns them."""
        self._of_flat = WeakIdKeyDictionary()
        """Tensors that users' code has computed from the optimizer's flat parameters."""

    def resume(self, engine: Any) -> None:
        """Find parameters in an engine that another access has followed before."""
        self._engine, self._window = engine, window_of(engine)
        if self._is_partitioned:
            self._pieces = {id(each.parameter): each for each in zero_optimizer.pieces(engine.optimizer)}
            self._places = zero_optimizer.places(engine.optimizer)

    def attach(self, engine: Any) -> None:
        """Find parameters in a new engine, and take gradients from its window."""
        self.resume(engine)
        if engine.zero_optimization_stage() == 3:
            partitioned = [each for each in engine.module.modules() if each._parameters]
            follow_state_dicts(partitioned, self)
            refuse_copies(partitioned)
            old_memory = OldMemory.of(self._module)
            for name, parameter in self._module.named_parameters():
                _gather_as_library(parameter, old_memory, clean_name(name))
        if self._is_partitioned:
            self._refuse_state_dicts(engine.optimizer)

    @property
    def _is_partitioned(self) -> bool:
        return self._window is not None and zero_optimizer.is_partitioned_optimizer(self._engine.optimizer)

    def _refuse_state_dicts(self, zero: Any) -> None:
        """Make users' code get an error for state dicts that are not those of an optimizer of torch's."""

        def refused(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def run(*args: Any, **kwargs: Any) -> Any:
                look_from_here()
                if is_user_code(self):
                    raise self._no_states(f"optimizer.{name}()", "neither 'state' nor 'param_groups'")
                return method(*args, **kwargs)

            return run

        methods = {name: refused(name, getattr(zero, name)) for name in ("state_dict", "load_state_dict")}
        replace_for_good("ZeRO optimizers", zero, **methods)

    def _checked_key(self, key: object) -> object:
        """Return ``key``, one of the optimizer's states, which belong to DeepSpeed's flat parameters.

        Raises:
            RuntimeError: If it is a parameter of the module, for which users' code asks.
        """
        if id(key) in self._parameters and is_user_code(self):
            name = next(name for name, each in self._module.named_parameters() if each is key)
            raise self._no_states(f"optimizer.state[{clean_name(name)}]", "no states of single parameters")
        return key

    def _no_states(self, what: str, lacks: str) -> RuntimeError:
        return RuntimeError(
            f"{what} in a hook or a step: under ZeRO-{self._engine.zero_optimization_stage()} the optimizer has "
            f"states of DeepSpeed's flat parameters, this process's part of them, and {lacks}. To keep all states, "
            "call trainer.save_checkpoint(path) on all processes; to go back to them, trainer.fit(ckpt_path=path); "
            "to reset them, optimizer.state.clear(). AccelFSDPStrategy has them as torch has."
        )

    def begin(self) -> None:
        """Follow the optimizer's states, which a load replaces."""
        base = getattr(getattr(self._engine, "optimizer", None), "optimizer", None)
        if self._pieces and base is not None:
            OptimizerStates.follow([base], self._checked_key)

    def end(self) -> None:
        """Do nothing."""

    # ------------------------------------------------------------------ parameters
    def shard_of(self, tensor: Tensor) -> FlatShard | None:
        """Return this rank's partition of a parameter of stage 3; None for any other tensor.

        Raises:
            RuntimeError: If it is on NVMe.
        """
        parameter: Any = self._parameters.get(id(tensor))
        if parameter is None or not hasattr(parameter, "ds_tensor"):
            return None
        if parameter.ds_status.name == "INFLIGHT":
            finish_gather(self._engine, parameter)
        if parameter.ds_status.name == "AVAILABLE":
            is_automatic = getattr(self._module, "automatic_optimization", True)
            if is_gathered_by_user(parameter) or (self.in_step and is_automatic) or parameter.ds_active_sub_modules:
                return None  # in a step, or for a module that runs, DeepSpeed has gathered it and takes its gradient
            partition(self._engine, parameter)  # else a copy of it would stay as it is
        held: Tensor = parameter.ds_tensor
        if held.numel() < parameter.partition_numel():
            raise RuntimeError(
                "A parameter that stage 3 keeps on NVMe was used in a hook. Use it inside 'with "
                "strategy.full_parameters(module):', on every rank."
            )
        start, count = zero_optimizer.range_in_partition(parameter, held.numel())
        layout = self._layout(parameter, parameter.ds_process_group, start, count, (0, held.numel()))
        return FlatShard(held.detach().narrow(0, 0, count), layout)

    def check_whole(self, tensor: Tensor) -> None:
        """Check that a reduction, or a row, is not of a flat parameter of the optimizer, of its state, or a result.

        Raises:
            RuntimeError: If it is.
        """
        if self._is_of_flat(tensor) or any(each is tensor for each in self._flat_states()):
            raise RuntimeError(
                "A norm, a sum or another reduction of a flat parameter out of optimizer.param_groups, or of its "
                "state, or a row of them, was computed: under ZeRO it is this process's part of several of the model's "
                "parameters. Use self.parameters(); AccelFSDPStrategy has states of each."
            )

    def note_result(self, result: Any, inputs: Iterable[Tensor]) -> None:
        """Take note of results of flat parameters: they are this rank's part as well."""
        if self._pieces and isinstance(result, Tensor | list | tuple) and any(map(self._is_of_flat, inputs)):
            for one in [result] if isinstance(result, Tensor) else result:
                if isinstance(one, Tensor) and not any(share_memory(each, one) for each in self.optimizers_own()):
                    self._of_flat[one] = True

    def _is_of_flat(self, tensor: Tensor) -> bool:
        return any(share_memory(each, tensor) for each in [*self.optimizers_own(), *self._of_flat])

    def _flat_states(self) -> Iterator[Tensor]:
        """Yield the optimizer's states for each element of its flat parameters."""
        states = getattr(getattr(self._engine.optimizer, "optimizer", None), "state", {}) if self._pieces else {}
        for flat in self.optimizers_own():
            for value in states[flat].values() if flat in states else ():
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    yield value

    def parameter_shards(self) -> dict[str, tuple[Tensor, bool]]:
        """Return this rank's part of what is stepped on for each parameter, sharing memory, and whether it trains.

        Raises:
            RuntimeError: If it is on NVMe.
        """
        zero: Any = None if self._window is None else self._engine.optimizer
        masters: dict[int, FlatShard] = {}
        if self._window is not None and self._is_partitioned:
            self._window.follow_changed_weights()
            masters = self._master_shards(zero)
        found: dict[str, tuple[Tensor, bool]] = {}
        for name, parameter in self._module.named_parameters():
            shard = masters[id(parameter)] if id(parameter) in masters else self.shard_of(parameter)
            found[clean_name(name)] = parameter.detach() if shard is None else shard, parameter.requires_grad
        return found

    def _master_shards(self, zero: Any) -> dict[int, FlatShard]:
        found: dict[int, FlatShard] = {}
        for parameter, (index, cut) in self._places.items():
            flat, piece = zero_optimizer.masters(zero)[index].detach(), self._pieces.get(id(parameter))
            start, flat_start, count = (0, 0, 0) if piece is None else (piece.start, piece.flat_start, piece.numel)
            if flat.numel() < flat_start + count:
                raise RuntimeError(
                    "ShardedEMA cannot average weights that are on NVMe. Offload the optimizer to 'cpu'."
                )
            layout = self._layout(parameter, zero_optimizer.process_group(zero, index), start, count, cut)
            found[id(parameter)] = FlatShard(flat.narrow(0, flat_start, count), layout)
        return found

    def push_parameter_shards(self) -> None:
        """Copy changes of `parameter_shards` to the weights that the model computes with; every rank calls it."""
        if self._window is not None and self._window.changes is not None:
            self._window.changes.push()

    def _layout(self, parameter: Any, group: Any, start: int, count: int, cut: tuple[int, int]) -> FlatLayout:
        shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= max(1, size)
        start = start if count else 0
        return FlatLayout(shape, tuple(strides), tuple(range(len(shape))), start, count, 0, 1, group, self._device, cut)

    def writable(self, tensor: Tensor, *, assigns: bool) -> Tensor | None:
        """Return the target of an assignment in DeepSpeed's memory, a whole parameter or a flat one; else None."""
        if not assigns or self._window is None:
            return None
        is_whole = id(tensor) in self._parameters and not hasattr(tensor, "ds_tensor")
        return tensor if is_whole or self._is_flat(tensor) else None

    def release(self) -> None:
        """Partition what stage 3 has left gathered after a forward without a backward."""
        for each in self._parameters.values():
            parameter: Any = each
            is_left = not getattr(parameter, "ds_persist", True) and parameter.ds_status.name == "AVAILABLE"
            if is_left and not parameter.ds_active_sub_modules:
                partition(self._engine, parameter)

    def sync_to_model(self) -> None:
        """Copy changes of the weights that the optimizer steps on to the model's."""
        if self._window is not None and self._window.changes is not None:
            self._window.changes.sync_to_model()

    def sync_to_optimizer(self, tensor: Tensor) -> None:
        """Copy changes of the model's parameters to a flat parameter before it is used."""
        if self._window is not None and self._is_flat(tensor):
            self._window.sync_to_optimizer()

    def note_write(self, tensor: Tensor) -> None:
        """Note that users' code writes to a gathered parameter, whose partition takes the change over later."""
        if self._window is not None and self._window.gathered_changes is not None:
            for parameter in self._gathered_at(tensor):
                self._window.gathered_changes.note(parameter)

    def _gathered_at(self, tensor: Tensor) -> Iterator[nn.Parameter]:
        """Yield the gathered parameters of stage 3 in whose memory a tensor lies."""
        storage = storage_of(tensor)
        for each in self._parameters.values():
            parameter: Any = each
            is_gathered = hasattr(parameter, "ds_status") and parameter.ds_status.name == "AVAILABLE"
            if is_gathered and storage_of(parameter) == storage:
                yield parameter

    def lends(self, tensor: Tensor) -> bool:
        """Return False: a view keeps the memory of a gathered parameter alive."""
        return False

    def note_alias(self, tensor: Tensor) -> None:
        """Note an alias of a gathered parameter, which is compared with its partition from now on."""
        if self._window is not None and self._window.gathered_changes is not None and has_storage(tensor):
            for parameter in self._gathered_at(tensor):
                self._window.gathered_changes.compare(parameter)

    def note_write_to_shard(self, tensor: Tensor) -> None:
        """Copy a flat parameter to the model; in stage 3 users' code writes to the partition itself."""
        if self._is_flat(tensor):
            self.sync_to_model()

    def is_unreduced(self, tensor: Tensor) -> bool:
        """Return False: `gradient_of` refuses what is not reduced."""
        return False

    @property
    def has_deferred(self) -> bool:
        """Whether DeepSpeed's step is to clip or multiply gradients."""
        return self._window is not None and self._window.is_to_multiply

    def apply_deferred(self) -> None:
        """Do it now."""
        self._complete_window()

    def linked(self, full: Tensor, tensor: Tensor) -> Tensor:
        """Refuse a loss over partitioned parameters.

        Raises:
            RuntimeError: Always.
        """
        name = next((name for name, each in self._module.named_parameters() if each is tensor), "a parameter")
        raise RuntimeError(
            f"{name} was used in a loss while ZeRO-3 has it partitioned: its gradient would not reach it. For an L2 "
            "penalty, set the optimizer's weight_decay; for any other penalty use zero_stage=2, or compute it in "
            "the forward of the module that has the parameter. To read only its value, use parameter.detach()."
        )

    # ------------------------------------------------------------------ gradients
    def owns_gradient(self, tensor: Tensor) -> bool:
        """Return whether DeepSpeed keeps the gradient of ``tensor`` in a partition."""
        window = self._window
        return window is not None and (window.keeps(tensor) or window.leaves_out(tensor) or self._is_flat(tensor))

    def _is_flat(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is one of DeepSpeed's flat parameters."""
        return any(each is tensor for each in self.optimizers_own())

    def optimizers_own(self) -> Iterator[Tensor]:
        """Yield the flat parameters that a ZeRO optimizer has in its groups."""
        for group in self._engine.optimizer.param_groups if self._pieces else ():
            yield from group["params"]

    def _check_not_flat(self, tensor: Tensor) -> None:
        if self._is_flat(tensor):
            raise RuntimeError(
                "p.grad of a parameter in optimizer.param_groups was used in a hook or a step: under "
                f"ZeRO-{self._engine.zero_optimization_stage()} these are DeepSpeed's flat parameters, which have no "
                "gradients there. Use those of the module's parameters: for p in self.parameters(): p.grad."
            )

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's part of the reduced gradient; None if no rank has one.

        Raises:
            RuntimeError: Before the window's last backward has reduced it, after the step, if it is multiplied by a
                loss scale, or if the parameter is the optimizer's own.
        """
        self._check_not_flat(parameter)
        if self._window is None or self._window.leaves_out(parameter):
            return None
        window = self._complete_window()
        if window is None and self._window.is_stale and not _is_asked_by_torch():
            raise RuntimeError(
                "p.grad was used in a hook after the optimizer step: DeepSpeed has freed the gradients in it. Use it "
                "in on_before_optimizer_step()."
            )
        return self._part(parameter) if window is not None and parameter in window.used else None

    def place_of_gradient(self, parameter: Tensor) -> FlatShard | None:
        """Return this rank's part of a gradient, whether any rank has one or not.

        Raises:
            RuntimeError: Where `gradient_of` does, before a backward has run, and of a parameter that DeepSpeed's
                optimizer does not hold.
        """
        self.gradient_of(parameter)
        if self._window is not None and self._window.leaves_out(parameter):
            raise RuntimeError(
                f"p.grad = value of {self._window.names[cast('nn.Parameter', parameter)]}, which was frozen when fit() "
                "started: DeepSpeed's optimizer does not hold it and would never step on the gradient. Start fit() "
                "with it unfrozen, or change its values."
            )
        if self._complete_window() is None:
            raise RuntimeError(
                "p.grad = value: DeepSpeed has no place for a gradient before a backward has run, nor after "
                "zero_grad(). Assign it in on_after_backward() or on_before_optimizer_step()."
            )
        return self._part(parameter)

    @torch.no_grad()
    def set_gradient(self, parameter: Tensor, gradient: FlatShard | None) -> None:
        """Replace the gradient that the optimizer steps on."""
        self._check_not_flat(parameter)
        if self._window is None or self._window.leaves_out(parameter):
            return
        window = self._complete_window()
        if window is None:
            return
        part = self._part(parameter)
        if gradient is None:
            part.held.zero_()
            window.used.discard(parameter)
        else:
            part.held.copy_(gradient.held)
            window.used.add(cast("nn.Parameter", parameter))

    def _complete_window(self) -> GradientAccumulator | None:
        window = self._window
        if window is None or not window.has_begun:
            return None
        if not window.is_complete and (self.ends_window or not getattr(self._module, "automatic_optimization", True)):
            with library_code():
                window.complete()
        if not window.is_complete:
            raise RuntimeError(
                "p.grad was used in a hook while gradients accumulate: DeepSpeed reduces them in the last micro-batch "
                "of the accumulation window. Use it in on_before_optimizer_step()."
            )
        if window.loss_scale != 1.0:
            raise RuntimeError(
                f"p.grad was used in a hook while it is multiplied by the loss scale, {window.loss_scale:g}: DeepSpeed "
                "unscales gradients in its step. Use precision='bf16-mixed' or '32-true' to work on gradients."
            )
        if window.is_to_multiply:
            with library_code():
                window.clip_now()
                window.apply_factor()
                note_changes()
        return window

    def _part(self, parameter: Tensor) -> FlatShard:
        window: Any = self._window
        zero: Any = window.engine.optimizer
        index, cut = self._places[cast("nn.Parameter", parameter)]
        group, piece = zero_optimizer.process_group(zero, index), self._pieces.get(id(parameter))
        if piece is None:  # this rank has no part of it
            held = torch.empty(0, dtype=zero_optimizer.gradient_dtype(zero), device=self._device)
            return FlatShard(held, self._layout(parameter, group, 0, 0, cut))
        held = zero_optimizer.gradient_piece(zero, piece)
        return FlatShard(held, self._layout(parameter, group, piece.start, piece.numel, cut))


def _is_asked_by_torch() -> bool:
    """Return whether ``zero_grad()`` of a module, or what moves one, asks for a gradient: None is right for them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in (nn.Module.zero_grad.__code__, nn.Module._apply.__code__):
        frame = frame.f_back
    return frame is not None


def _gather_as_library(parameter: Any, old_memory: OldMemory, name: str) -> None:
    """Make DeepSpeed itself set a parameter's data, also where users' code causes it: by an attribute, by a context."""
    gather, partition = (getattr(parameter, each, None) for each in ("all_gather", "partition"))
    if gather is None or partition is None or hasattr(partition, _IS_LIBRARY):
        return

    @as_library
    @functools.wraps(partition)
    def partition_as_library(*args: Any, **kwargs: Any) -> Any:
        with old_memory.partitioning(parameter, name, parameter.ds_tensor):
            return partition(*args, **kwargs)

    setattr(partition_as_library, _IS_LIBRARY, True)
    replace_for_good("ZeRO-3 gathering", parameter, all_gather=as_library(gather), partition=partition_as_library)


# ------------------------------------------------------------------------------------------------
# Clipping by torch's functions in the user's own code, which does not see the gradients that DeepSpeed keeps.


def refuse_norm(module: nn.Module, gradients: Sequence[Tensor], norm_type: float) -> None:
    """Refuse to take a norm of gradients of ``module`` while DeepSpeed trains it; others are torch's business.

    Raises:
        RuntimeError: If they are some of the module's, or none outside of hooks: parameters have none that DeepSpeed
            has taken.
    """
    if any(isinstance(gradient, FlatShard) for gradient in gradients):  # hooks see those of the stages 1 to 3
        return
    if not gradients and is_user_code():  # none of a frozen parameter
        return
    own = {id(gradient) for gradient in gradients_of(module.parameters())}
    if gradients and not any(id(gradient) in own for gradient in gradients):
        return
    raise RuntimeError(
        "torch.nn.utils.clip_grad_norm_ (or get_total_norm) would clip nothing: DeepSpeed keeps the gradients of "
        f"{type(module).__name__} in buffers of its own. Use self.clip_gradients(optimizer, gradient_clip_val=...), in "
        "configure_gradient_clipping() too, or Trainer(gradient_clip_val=...); the norm is strategy.last_grad_norm."
    )


def refuse_change(module: nn.Module, function: str, parameters: Sequence[Tensor]) -> None:
    """Refuse a function of torch that is to change gradients of ``module`` while DeepSpeed trains it.

    Raises:
        RuntimeError: If one of the parameters is the module's.
    """
    if is_user_code() and all(isinstance(parameter.grad, FlatShard | None) for parameter in parameters):
        return
    own = {id(parameter) for parameter in module.parameters()}
    if not any(id(parameter) in own for parameter in parameters):
        return
    raise RuntimeError(
        f"torch.nn.utils.{function} would change nothing: DeepSpeed keeps the gradients of {type(module).__name__} in "
        "buffers of its own, and clips them by their norm only. Use self.clip_gradients(optimizer, "
        "gradient_clip_val=...), in configure_gradient_clipping() too, or Trainer(gradient_clip_val=...)."
    )
