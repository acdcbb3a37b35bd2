"""When users' code runs, and when the library's does.

The Trainer runs each hook of the module and of callbacks inside ``trainer.profiler.profile(name)``. `UserCode` looks at
these names: inside hooks that users have written, operations on sharded tensors have their global meaning
(`GlobalTensors`). Whatever the strategy does meanwhile works on shards, see `library_code`.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ...checkpoint.names import clean_name
from ...state.process_group import require_group, timeout_of
from ...state.rendezvous import CollectiveOrderChecker
from ..upstream.lightning import (
    Callback,
    LambdaCallback,
    LightningDataModule,
    LightningModule,
    Trainer,
    TrainerFn,
    TrainerStatus,
    is_overridden,
)
from ..upstream.patches import Patches, replace_for_good
from ..upstream.torch_core import _get_current_function_mode, tree_map_only
from .global_tensors import UNREDUCED, WRITES_TO_COPY, GlobalTensors, ShardAccess, hands_out_memory
from .guards import (
    InThread,
    Watch,
    is_asked_by_library,
    is_in_call,
    is_method_called_by_user,
    is_recomputed,
    plainly,
    refuse_in_fork,
    uncounted_aliases,
    waiting,
)
from .kept_tensors import Aliases, OldMemory, has_storage, share_memory
from .shards import FlatShard, Sharded, gathered, local_part, part_of

_T = TypeVar("_T", bound=type)
_NOT_ABOUT_TENSORS = frozenset(
    [
        "prepare_data",
        "setup",
        "configure_model",
        "configure_sharded_model",
        "configure_callbacks",
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "forward",
        "on_load_checkpoint",
        "state_dict",
        "load_state_dict",
    ]
)
"""Methods that run before the model is sharded, or inside steps."""
_CALLS_USERS_CODE = frozenset(
    ["lr_scheduler_step", "on_validation_model_eval", "on_test_model_eval", "on_predict_model_eval"]
)
"""Methods that run users' code also where none overrides them: a schedule's functions, ``eval()`` of modules."""
_WAY_OUT = (
    "Reading a whole parameter or a gradient gathers it from all processes. Do it on every process, outside "
    "conditions such as `if trainer.is_global_zero:`; only logging the result belongs inside."
)
_MOVES = (
    "A hook or a step changes parameters of the model from {} to {} (module.to(), half(), double(), cpu(), "
    "cuda()): they lie where the engine keeps them. Convert what you compute from them, as in weight.double(), choose "
    "the precision with Trainer(precision=...), or convert the module in configure_model()."
)
_LIBRARIES = ("lightning.pytorch.", "pytorch_lightning.", "accelight.")


_ASSIGNS_VIEW = (
    "A step or a forward assigns a tensor to a parameter, as module.weight *= value does there: FSDP1 shows parameters "
    "as views of a flat one. Write module.weight.data.mul_(value)."
)
_running: list[GlobalTensors | None] = []
"""The code that runs now, outermost first: users' under a mode, or the library's (None); empty outside of both."""
_without_modules: set[int] = set()
"""Numbers of entries in `_running` up to and with those of `library_code`, in which no forward of a module runs."""


class UserCode:
    """Follows one Trainer; at most one is attached at a time.

    Args:
        access: Where the engine has its shards.
        called: Modules whose calls are the library's: what they need is unsharded by the engine.
        always_in_steps: Whether a sharded parameter in a training step could go unnoticed else.
    """

    def __init__(self, access: ShardAccess, called: Iterable[nn.Module], *, always_in_steps: bool = False) -> None:
        self.access = access
        aliases = Aliases()
        self._in_hooks = GlobalTensors(access, aliases=aliases)
        self._in_steps = GlobalTensors(access, in_step=True, aliases=aliases)
        self._in_backward = GlobalTensors(access, in_backward=True, aliases=aliases)
        self._in_fetches = GlobalTensors(access, aliases=aliases)
        self._modes = self._in_hooks, self._in_steps, self._in_backward, self._in_fetches
        self._aliases = aliases
        self.places: CollectiveOrderChecker | None = None
        """Compares the lines at which ranks gather; None on one rank."""
        self._called = WeakIdKeyDictionary(dict.fromkeys(called, True))
        self._call_hook: RemovableHandle | None = None
        self._registration_hooks: list[RemovableHandle] = []
        self._patches = Patches("user code")
        self._always_in_steps = always_in_steps
        self._in_modules = _InModules()
        self._has_compiled = False
        self._has_stepped = False
        self._fetch = ExitStack()
        self._error_in_thread: RuntimeError | None = None
        self._watch: Watch | None = None
        self._since_use: ExitStack | None = None
        self._trainer: Trainer | None = None

    # ------------------------------------------------------------------ attached
    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin to follow the Trainer's hooks, until `detach`."""
        global _attached
        if _attached is not None:
            _attached.detach()
        _attached, self._trainer = self, trainer
        if trainer.world_size > 1:
            timeout = timeout_of(require_group("A fit"))
            self.places = CollectiveOrderChecker(_WAY_OUT, timeout)
        for mode in self._modes:
            mode.places, mode.old_memory = self.places, OldMemory.of(module)
        own = {(module, name): each for module in self._called for name, each in module.named_parameters(recurse=False)}
        before_parameter = partial(self._before_parameter, own)
        self._registration_hooks = [
            register_module_buffer_registration_hook(self._before_buffer),  # type: ignore[arg-type]
            register_module_parameter_registration_hook(before_parameter),
        ]
        dtensors = [one for one in module.parameters() if isinstance(one, DTensor)]  # they need a mode on one rank, too
        if watched := self._sharded(module) or dtensors:  # else DeepSpeed partitions later, if at all
            self._watch = Watch(watched)
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            self._wrap_step(module, name)
        self._follow_hooks(trainer, module)
        self._follow_fetches(trainer)
        self._follow_threads(module)
        self._follow_moves(module)
        for name, value in uncounted_aliases().items():
            self._patches.put(Tensor, name, value)

    def _follow_hooks(self, trainer: Trainer, module: LightningModule) -> None:
        """Run users' hooks as such: all until the end of the run, those of a save as long as the Trainer lives."""
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if (before := _followed.pop(profiler, None)) is not None:
            before.remove()
        actions, last = _hooks_of_users(trainer, module), f"[LightningModule]{type(module).__name__}.teardown"
        followed = {*actions, last, "save_checkpoint"}
        profile, own, its_trainer = profiler.profile, ref(self), ref(trainer)

        @functools.wraps(profile)
        def profile_hook(action_name: str) -> AbstractContextManager[Any]:
            context = profile(action_name)
            if action_name not in followed:
                return context
            user_code, trainer = own(), its_trainer()
            if user_code is None or trainer is None:
                return context
            if action_name == "save_checkpoint":
                return user_code._save(context, trainer)
            if action_name in actions and _attached is user_code:
                context = user_code._hook(context, action_name.rpartition(".")[2])
            return user_code._until_detached(context) if action_name == last else context

        patches = _followed[profiler] = Patches("user code")
        patches.put(profiler, "profile", profile_hook)
        finalize(trainer, patches.remove)

    @contextmanager
    def _save(self, context: AbstractContextManager[Any], trainer: Trainer) -> Iterator[Any]:
        """Save a checkpoint, in a run or after it; Lightning does not report ``state_dict()`` of callbacks as hooks."""
        global _attached
        before, _attached = _attached, self
        own_classes = nullcontext() if self._watch is None else self._watch.switched(is_on=False)  # for pickle
        try:
            with own_classes, Patches("user code") as patches, context as value:
                for callback in _users_callbacks(trainer):
                    if is_overridden("state_dict", callback):
                        patches.put(callback, "state_dict", self.in_hook()(callback.state_dict))
                yield value
        finally:
            _attached = before

    def _follow_threads(self, module: LightningModule) -> None:
        """Make threads that users' code starts refuse sharded parameters: no other process gathers with them."""
        start, own = threading.Thread.start, threading.get_ident()

        def note(error: RuntimeError) -> None:
            self._error_in_thread = error

        @functools.wraps(start)
        def start_thread(thread: threading.Thread) -> None:
            mode = InThread.of_this_thread()
            if threading.get_ident() == own and is_user_code():
                with library_code():
                    sharded = self._sharded(module)
                if sharded or self.places is not None:  # one process of FSDP has all
                    mode = InThread(sharded, self.access.owns_gradient, note)
            if mode is not None:
                replace_for_good("user code", thread, run=partial(mode.run, thread.run))
            start(thread)

        self._patches.put(threading.Thread, "start", start_thread)

    def _follow_moves(self, module: LightningModule) -> None:
        """Keep ``module.to(...)`` and the like from parameters, and make ``nn.Parameter(weight)`` share its values.

        Both go below all modes.
        """
        new: Any = nn.Parameter.__new__

        def following(apply: Any) -> Callable[..., nn.Module]:
            @functools.wraps(apply)
            def apply_to_buffers(moved: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
                caller = sys._getframe(1)
                if caller.f_code is apply.__code__ or not is_method_called_by_user(caller):
                    return apply(moved, fn, recurse)
                own = set(map(id, module.parameters()))
                parameters = [one for one in moved.parameters(recurse) if id(one) in own]
                if not parameters:
                    return apply(moved, fn, recurse)
                with library_code():
                    for dtype, device in {(one.dtype, one.device) for one in parameters}:
                        one = fn(torch.empty(0, dtype=dtype, device=device))
                        if (one.dtype, one.device) != (dtype, device):
                            raise RuntimeError(_MOVES.format(f"{dtype} on {device}", f"{one.dtype} on {one.device}"))
                for each in moved.modules() if recurse else [moved]:
                    for name, buffer in each._buffers.items():
                        each._buffers[name] = None if buffer is None else fn(buffer)
                return moved

            return apply_to_buffers

        @functools.wraps(new)
        def new_parameter(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Any:
            if isinstance(data, nn.Parameter) and not is_asked_by_library(sys._getframe(1)):
                with library_code():  # torch knows no watched classes
                    data = self._in_hooks.data_of(data) if self._in_hooks.is_sharded(data) else data.detach()
            return new(cls, data, requires_grad)

        for cls in (nn.Module, FullyShardedDataParallel):  # which puts its own parameters aside first
            self._patches.put(cls, "_apply", following(cls._apply))
        self._patches.put(nn.Parameter, "__new__", new_parameter)

    def _raise_from_thread(self) -> None:
        """Raise what a thread has refused: its own error may have been printed alone."""
        if self._error_in_thread is not None:
            error, self._error_in_thread = self._error_in_thread, None
            raise error

    @contextmanager
    def _until_detached(self, context: AbstractContextManager[Any]) -> Iterator[Any]:
        """Run the last hook of a run."""
        try:
            with context as value:
                yield value
        finally:
            self.detach()

    def _follow_fetches(self, trainer: Any) -> None:
        """Run datasets, samplers and ``collate_fn`` of this process as users' code.

        Lightning reports each batch that it waits for: those of the first one of each epoch are looked at, and all once
        one has met shards, which parameters notice in the others. Of a loader without a length it fetches one more in
        advance, which it does not report.
        """
        start, stop = trainer.profiler.start, trainer.profiler.stop

        @functools.wraps(start)
        def start_action(name: str) -> None:
            start(name)
            if _is_fetch(name):
                is_to_look = self._in_fetches.has_met_shards or self._is_first_batch()
                context = self._in_code if is_to_look else self._watching
                self._fetch.enter_context(context(self._in_fetches))

        @functools.wraps(stop)
        def stop_action(name: str) -> None:
            if _is_fetch(name):
                self._fetch.close()
            stop(name)

        self._patches.put(trainer.profiler, "start", start_action)
        self._patches.put(trainer.profiler, "stop", stop_action)
        in_fetch = self._in_code(self._in_fetches)
        self._patches.put(trainer.fit_loop, "setup_data", in_fetch(trainer.fit_loop.setup_data))
        evaluations = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
        for loop in (trainer.fit_loop.epoch_loop.val_loop, *evaluations):
            self._patches.put(loop, "reset", in_fetch(loop.reset))

    @contextmanager
    def _in_code(self, mode: GlobalTensors) -> Iterator[None]:
        """Run users' code, and what the forwards of modules do in it; also a decorator."""
        with nullcontext() if self._has_compiled else self._in_modules, running(mode):
            yield

    @contextmanager
    def _watching(self, mode: GlobalTensors) -> Iterator[None]:
        """Run users' code under a mode from its first use of shards on."""
        before = self._since_use
        with ExitStack() as since_use, self._present_watch().until_end(partial(self._begin, mode)):
            self._since_use = since_use
            try:
                yield
            finally:
                self._since_use = before  # what ends a mode is the library's

    def _present_watch(self) -> Watch:
        if self._watch is None:
            sharded = [] if self._trainer is None else self._sharded(self._trainer.lightning_module)
            self._watch = Watch([*sharded, *self.access.optimizers_own()])
        return self._watch

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        before, self._since_use = self._since_use, None  # torch's backward drops modes that begin in it
        try:
            watch = self._present_watch() if self._always_in_steps else None
            with waiting(self._begin_again) if watch is None else watch.until_end(self._begin_again):
                yield
        finally:
            self._since_use = before

    def _begin_again(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._in_step():
            return self._begin(self._in_steps, func, args, kwargs)

    def _begin(self, mode: GlobalTensors, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the first use of shards in users' code that was not looked at; what follows runs under the mode, too."""
        if is_user_code():  # a mode looks at it
            return func(*args, **kwargs)
        meets_shards, is_in_forward = mode.meets_shards(func, args, kwargs), is_in_call(sys._getframe(2))
        result: Any = None
        if not meets_shards:  # such as a parameter of stage 3 that is gathered now
            is_step = mode is self._in_steps and hands_out_memory(func)  # a loader sees no unsharded memory
            if not is_step or (_is_called_by(mode) and not is_in_forward):  # an optimizer steps
                return plainly(func, args, kwargs)
            with running(mode):
                result = func(*args, **kwargs)
            if not mode.has_views:
                return result
        other: Any = _get_current_function_mode()  # type: ignore[no-untyped-call]  # the user's is left before ours
        with ExitStack() as this_use:
            contexts = this_use if other is not None or self._since_use is None else self._since_use
            self._look(contexts, mode, is_in_forward=is_in_forward)
            if not meets_shards:
                return result
            return self._in_modules.run(mode, func, args, kwargs) if is_in_forward else func(*args, **kwargs)

    def _look(self, contexts: ExitStack, mode: GlobalTensors, *, is_in_forward: bool) -> None:
        contexts.enter_context(running(mode))
        if is_in_forward:
            contexts.enter_context(call_of_module())
            contexts.enter_context(self._in_modules)

    def look_from_here(self) -> None:
        """Look at what is left of a step; not below a mode of the user's own, which is left first."""
        if self._since_use is not None and self.access.in_step and _callers_mode() is None:
            self.access.gave_states = True
            if _get_current_function_mode() is None:  # type: ignore[no-untyped-call]
                self._look(self._since_use, self._in_steps, is_in_forward=is_in_call(sys._getframe(1)))

    def end(self) -> None:
        """Detach at the end of a run: at once where an exception ends it, else after its last hook, `teardown`."""
        if self._trainer is None or self._trainer.state.status == TrainerStatus.INTERRUPTED:
            self.detach()

    def detach(self) -> None:
        """Undo `attach`."""
        global _attached
        self._trainer = self._watch = None
        self._patches.remove()
        self._fetch.close()
        _end_calls()
        self.follow_calls(follows=False)
        while self._registration_hooks:
            self._registration_hooks.pop().remove()
        if _attached is self:
            _attached = None

    def refuse_in_fork(self) -> None:
        """Make sharded parameters refuse all use, and modules that have some all calls, in this process."""
        module = None if self._trainer is None else self._trainer.lightning_module
        for mode in self._modes:
            mode.pause()
        self.follow_calls(follows=False)
        _running.clear()
        refuse_in_fork(() if module is None else self._sharded(module))

    def _sharded(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that this process does not have whole; none is gathered for that."""
        own = [one for one in module.parameters() if not isinstance(one, FlatParameter)]  # that one is torch's
        is_sharded = (lambda _: False) if self.places is None else self._in_hooks.is_sharded
        # Of stage 3 it is known, also on one process: to ask for its shard may wait for a gather.
        return [one for one in own if hasattr(one, "ds_tensor") or is_sharded(one)]

    def _wrap_step(self, module: LightningModule, name: str) -> None:
        step = getattr(module, name)

        @functools.wraps(inspect.unwrap(step))  # Lightning unwraps once, and looks whether it takes batch_idx
        def run_step(*args: Any, **kwargs: Any) -> Any:
            self._raise_from_thread()
            uses_kept = self._in_steps.old_memory.begin_step()
            is_to_look = uses_kept or name != "training_step" or self._is_in_steps(module)
            mode = running(self._in_steps) if is_to_look else nullcontext()
            try:
                with self._in_step(), self._looking_into_modules(), mode:
                    return step(*args, **kwargs)
            except ValueError as error:
                if self._in_steps.copies and "read-only" in str(error):
                    raise RuntimeError(WRITES_TO_COPY) from error
                raise
            except TypeError as error:
                if self.access.shows_shards and re.search("cannot assign .* as parameter", str(error)):
                    raise RuntimeError(_ASSIGNS_VIEW) from error
                raise
            finally:
                self._has_stepped = self._has_stepped or name == "training_step"

        self._patches.put(module, name, run_step)

    def _is_in_steps(self, module: LightningModule) -> bool:
        """Return whether to look at what a training step does with sharded parameters; an evaluation's always is.

        Always in manual optimization, where none is gathered, and where the engine asks for it. Else in the first batch
        of each epoch, and in all batches once a step has used a sharded parameter, which parameters notice.
        """
        if self._always_in_steps or self._in_steps.has_met_shards or not module.automatic_optimization:
            return True
        return bool(self._aliases.kept) or self._is_first_batch()

    def _is_first_batch(self) -> bool:
        """Return whether the batch is the first one of an epoch, of a run, or of a loader to evaluate."""
        if self._trainer is None:
            return False
        if self._trainer.training:
            return not self._has_stepped or self._trainer.fit_loop.epoch_loop.batch_idx <= 0
        loops: dict[Any, Any] = {
            TrainerFn.FITTING: self._trainer.fit_loop.epoch_loop.val_loop,
            TrainerFn.VALIDATING: self._trainer.validate_loop,
            TrainerFn.TESTING: self._trainer.test_loop,
            TrainerFn.PREDICTING: self._trainer.predict_loop,
        }
        return bool(loops[self._trainer.state.fn].batch_progress.current.ready <= 1)

    def _looking_into_modules(self) -> AbstractContextManager[Any]:
        """Look at what the forwards of modules do as well, in first batches, and in all once one has met shards.

        Not where a module is compiled: it would be compiled twice. Else parameters notice it.
        """
        is_first_batch = self._is_first_batch()
        if is_first_batch:
            self._has_compiled = any(map(_is_compiled, self._called))
        if (is_first_batch or self._in_modules.has_met_shards) and not self._has_compiled:
            return self._in_modules
        return self._watching(self._in_steps)

    @contextmanager
    def _hook(self, context: AbstractContextManager[Any], name: str) -> Iterator[Any]:
        if not torch.is_grad_enabled():  # an evaluation's
            self.access.release()
        self._raise_from_thread()
        self._in_hooks.hook = name
        with context as value, self._in_code(self._in_hooks):
            yield value

    @contextmanager
    def in_hook(self, *, ends_window: bool = False) -> Iterator[None]:
        """Run a method of the user's that the Trainer does not profile as a hook; also a decorator.

        Args:
            ends_window: Whether gradients that it asks for are those of a whole accumulation window.
        """
        before = self.access.ends_window, self._in_hooks.hook
        self.access.ends_window, self._in_hooks.hook = ends_window, ""
        try:
            with running(self._in_hooks):
                yield
        finally:
            self.access.ends_window, self._in_hooks.hook = before

    @contextmanager
    def in_own_backward(self, unreduced: Iterable[Tensor]) -> Iterator[None]:
        """Run a ``backward()`` that the user has written; what engines do in a backward of torch's is not of it.

        Args:
            unreduced: Parameters whose gradients are of this rank alone until it ends.
        """
        self._in_steps.unreduced = set(map(id, unreduced)) if self.places is not None else set()
        try:
            with running(self._in_steps):
                yield
        finally:
            self._in_steps.unreduced = set()

    @contextmanager
    def in_step_hooks(self, optimizer: Optimizer) -> Iterator[None]:
        """Run hooks on an optimizer's step (``register_step_pre_hook``, ``..._post_hook``) as users' code."""
        before, after = step_hooks(optimizer, "pre"), step_hooks(optimizer, "post")
        with _hooks_in(self.in_hook, [before]), _hooks_in(self._after_step, [after]), self.in_optimizer():
            yield

    @contextmanager
    def _after_step(self) -> Iterator[None]:
        note_changes()
        with self.in_hook():
            yield

    @contextmanager
    def in_gradient_hooks(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Run hooks on parameters (``register_hook``) as a step's code, where autograd reaches these parameters."""
        with _hooks_in(self._as_step, [hooks for each in parameters if (hooks := each._backward_hooks)]):
            yield

    @contextmanager
    def _as_step(self) -> Iterator[None]:
        with self._in_step(), running(self._in_steps):
            yield

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        before, self.access.in_step = self.access.in_step, True
        try:
            yield
        finally:
            self.access.in_step = before

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """Run an optimizer's step, after which users' code reads again what it has of parameters; all ranks call it."""
        try:
            with nullcontext() if self._watch is None else self._watch.switched(is_on=False):
                yield
        finally:
            note_changes()
            self._in_steps.old_memory.end_values()

    def follow_calls(self, *, follows: bool) -> None:
        """Run calls of modules as the library's from now on, or no more.

        No hook stands while the library runs: torch.compile would compile a module anew for each one.
        """
        if follows and self._call_hook is None and len(self._called):
            self._call_hook = register_module_forward_pre_hook(self._before_call)
        elif not follows and self._call_hook is not None:
            self._call_hook.remove()
            self._call_hook = None

    def _before_buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        """Turn a buffer that users' code makes from parameters into a full tensor, as each process has buffers."""
        if not isinstance(buffer, Sharded) or not is_user_code():
            return buffer
        if self.places is not None:
            self.places.compare_at_line(f"makes the buffer {name!r} from a sharded tensor")
        with library_code():
            return gathered(buffer)

    def _before_parameter(
        self, own: Mapping[tuple[nn.Module, str], Tensor], module: nn.Module, name: str, parameter: Any
    ) -> None:
        """Refuse another parameter in the place of a sharded one in a step: the engine would put its own back.

        One with the memory of the present one has its values (bitsandbytes gives weights in 4 bits their class back).
        """
        present, now = own.get((module, name)), module._parameters.get(name)
        if parameter is None or present is None or parameter is present or not self.access.in_step:
            return
        is_put_back = isinstance(present, DTensor) or hasattr(present, "ds_tensor") or self.access.shows_shards
        caller: Any = sys._getframe(1)
        while caller.f_code.co_name in ("register_parameter", "__setattr__"):  # of a class of the user's, too
            caller = caller.f_back
        if not is_put_back or not is_method_called_by_user(caller):
            return
        is_same = now is not None and has_storage(now) and share_memory(now, parameter)
        if not is_same and not self.access.lends(parameter):
            raise RuntimeError(
                f"A step or a forward replaces the parameter {name!r} of {type(module).__name__} by another, as in "
                f"module.{name} = nn.Parameter(value). The new one would be lost: the engine gathers its own. Change "
                f"the values: module.{name}.data.copy_(value). What no gradient reaches, such as a codebook, may be a "
                "buffer (register_buffer())."
            )

    def _before_call(self, module: nn.Module, _: Any) -> None:
        if is_library() or module not in self._called:
            return
        library = call_of_module()
        is_in_hook = _running[-1] is self._in_hooks
        library.__enter__()

        def leave() -> None:
            try:
                if is_in_hook:
                    self.access.release()
            finally:
                library.__exit__(None, None, None)

        after_call(module, leave)


class _InModules(TorchFunctionMode):
    """Runs users' code in forwards of modules, and in their hooks, as their caller's where it meets sharded tensors.

    Calls of modules are the library's (`UserCode.follow_calls`): what a module needs is unsharded, and a mode would
    slow each operation down. A forward that reads parameters of another unit, or ``self.parameters()``, meets shards.
    """

    has_met_shards = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        is_in_call = is_library() and len(_running) not in _without_modules
        mode = _callers_mode() if is_in_call and not is_asked_by_library(sys._getframe(1)) else None
        if mode is not None and mode.meets_shards(func, args, kwargs):
            return self.run(mode, func, args, kwargs)
        if mode is None or not (mode.has_views or hands_out_memory(func)):
            return func(*args, **kwargs)
        with running(mode, reads=False):  # torch's operations for a unit are not the same on all ranks
            return func(*args, **kwargs)

    def run(self, mode: GlobalTensors, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that meets shards."""
        self.has_met_shards = True
        if is_recomputed(sys._getframe(1)):
            raise RuntimeError(
                "A forward whose activations are recomputed reads a weight of another unit: in the backward it would "
                "see this process's part. Read the weight outside of the checkpointed part, and hand it in, or train "
                "without activation checkpointing."
            )
        with running(mode):
            return func(*args, **kwargs)


def _is_fetch(action: str) -> bool:
    """Return whether an action of Lightning's profilers is the wait for a batch."""
    return action.endswith("_next") and action.startswith("[")


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")


def step_hooks(optimizer: Optimizer | None, when: Literal["pre", "post"]) -> dict[int, Callable[..., Any]]:
    """Return the hooks that users have registered with ``register_step_pre_hook`` or ``register_step_post_hook``."""
    name = "_optimizer_step_pre_hooks" if when == "pre" else "_optimizer_step_post_hooks"
    hooks: dict[int, Callable[..., Any]] = getattr(optimizer, name, {})  # a class of one's own has none
    return hooks


_attached: UserCode | None = None
_followed: WeakKeyDictionary[Any, Patches] = WeakKeyDictionary()
"""The patches that follow hooks of a Trainer, by its profiler."""


@contextmanager
def _hooks_in(context: Callable[[], Any], found: Sequence[MutableMapping[int, Any]]) -> Iterator[None]:
    """Run each of these hooks in a context of its own."""
    before = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.update({key: context()(hook) for key, hook in hooks.items()})
    try:
        yield
    finally:
        for hooks, own in zip(found, before, strict=True):
            hooks.update({key: hook for key, hook in own.items() if key in hooks})


def _refuse_in_fork() -> None:
    """Make a process that this one has just forked, a loader's worker as a rule, refuse what is sharded here."""
    if _attached is not None:
        _attached.refuse_in_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_fork)


def in_backward() -> AbstractContextManager[None]:
    """Run hooks of the user's on a gradient, in the midst of a backward: sharded tensors are full there."""
    return nullcontext() if _attached is None else running(_attached._in_backward)


def recomputing() -> AbstractContextManager[None]:
    """Run a backward, and what users' code in forwards that it recomputes does, as a step."""
    return nullcontext() if _attached is None else _attached._recomputing()


def is_library() -> bool:
    """Return whether the library's own code runs, and no hook of a user inside of it."""
    return bool(_running) and _running[-1] is None


def is_user_code(access: ShardAccess | None = None) -> bool:
    """Return whether a hook or a step of a user runs under a mode: of any engine, or of the one with this access."""
    is_its_own = access is None or (_attached is not None and _attached.access is access)
    return is_its_own and bool(_running) and _running[-1] is not None


def look_from_here() -> None:
    """Look at what is left of a user's step, if one runs: it uses an optimizer's states, which nobody watches."""
    if _attached is not None and _attached._since_use is not None:
        _attached.look_from_here()


def is_hook() -> bool:
    """Return whether a hook of a user runs, and neither a step nor the library."""
    return _attached is not None and bool(_running) and _running[-1] is _attached._in_hooks


def is_step() -> bool:
    """Return whether a step of a user runs, or a ``backward()`` that the user has written."""
    return _attached is not None and bool(_running) and _running[-1] is _attached._in_steps


@contextmanager
def running(mode: GlobalTensors | None, *, reads: bool = True) -> Iterator[None]:
    """Run users' code under a mode, or the library's under none, until the context ends.

    Args:
        mode: The one.
        reads: See `GlobalTensors.enter`.
    """
    num_calls = len(_calls)
    _switch(_running[-1] if _running else None, mode, reads=reads)
    _running.append(mode)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _end_calls(num_calls)
        raise
    finally:
        ended = _running.pop()  # hooks of a module may end what they began in another order
        _switch(ended, _running[-1] if _running else None)
        if mode is not None and mode not in _running:
            mode.write_back()


def _switch(before: GlobalTensors | None, after: GlobalTensors | None, *, reads: bool = True) -> None:
    if before is after:
        return
    if _attached is not None:
        _attached.follow_calls(follows=after is not None)
    if before is not None:
        before.leave()
        before.write_back(forget=False)
    if after is not None:
        after.enter(reads=reads)


@contextmanager
def library_code() -> Iterator[None]:
    """Run the library's own code: parameters are the shards that they are."""
    with running(None):
        place = len(_running)
        _without_modules.add(place)
        try:
            yield
        finally:
            _without_modules.discard(place)


def call_of_module() -> AbstractContextManager[None]:
    """Run a module's call as the library's; what its forward does with other parameters is users' code."""
    return running(None)


_calls: list[Callable[[], None]] = []
"""What ends the calls that are under way, the outermost first."""
_failed: list[RemovableHandle] = []
"""Of hooks on calls that an error has ended."""


def after_call(
    module: nn.Module, end: Callable[[], None], succeed: Callable[[nn.Module, Any, Any], Any] | None = None
) -> None:
    """Run hooks once, at the end of the call of a module that begins.

    Args:
        module: Whose forward pre-hooks run.
        end: Run whether the call succeeds or fails.
        succeed: A forward hook, run before if the call succeeds.
    """
    while _failed:
        _failed.pop().remove()
    handles: list[RemovableHandle] = []

    def run_end(*_: Any) -> None:
        if sys.exc_info()[0] is None:
            for handle in handles:
                handle.remove()
        else:  # torch iterates over the module's hooks, not over a copy
            _failed.extend(handles)
        if run_end in _calls:
            _calls.remove(run_end)
            end()

    def run_succeed(*args: Any) -> Any:
        return None if succeed is None or run_end not in _calls else succeed(*args)

    handles.append(module.register_forward_hook(run_succeed))
    handles.append(module.register_forward_hook(run_end, always_call=True))
    _calls.append(run_end)


def _end_calls(number: int = 0) -> None:
    """End all but the outermost ``number`` calls, after an interrupt, for which torch runs no hooks."""
    while len(_calls) > number:
        with call_of_module():  # what ends a call sets parameters
            _calls[-1]()


@contextmanager
def callers_code() -> Iterator[None]:
    """Run a closure that users' code has handed to the library, which is code of theirs."""
    mode, watch = _callers_mode(), None if _attached is None else _attached._watch
    as_callers = running(mode) if is_library() and mode is not None else nullcontext()
    with nullcontext() if watch is None else watch.switched(is_on=True), as_callers:
        yield


def _is_called_by(mode: GlobalTensors) -> bool:
    """Return whether the library's code runs, and users' code under a mode has called it."""
    return is_library() and _callers_mode() is mode


def _callers_mode() -> GlobalTensors | None:
    return next((each for each in reversed(_running) if each is not None), None)


def write_back_views() -> None:
    """Copy what users' code has written to full tensors to the shards, before a function that reads the shards."""
    modes = [each for each in _running if each is not None]
    if modes:
        with library_code():
            for each in modes:
                each.write_back()


def running_as_library(*methods: str) -> Callable[[_T], _T]:
    """Run these methods of a class as `library_code`, whoever calls them."""

    def decorate(cls: _T) -> _T:
        for name in methods:
            setattr(cls, name, as_library(getattr(cls, name)))
        return cls

    return decorate


def as_library(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``method`` as `library_code`."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_library():
            return method(*args, **kwargs)
        with running(None):
            try:
                return method(*args, **kwargs)
            finally:
                note_changes()

    return run


def note_changes() -> None:
    """Take note that the library may have changed shards, of which users' code may have views; all ranks call it."""
    for mode in () if _attached is None else _attached._modes:
        mode.num_changes += 1


def lose_gradients(parameters: Iterable[Tensor]) -> None:
    """Let gradients that users' code has kept live on, which the library clears now; all ranks call it."""
    if _attached is not None:
        _attached._in_hooks.lose_gradients(parameters)


def _hooks_of_users(trainer: Trainer, module: LightningModule) -> frozenset[str]:
    """Return the names under which the Trainer profiles hooks that users have written."""
    names = _written_hooks(LightningModule, module) | _CALLS_USERS_CODE
    found = {f"[LightningModule]{type(module).__name__}.{hook}" for hook in names}
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        names = _written_hooks(LightningDataModule, data)
        names |= {"state_dict"} if is_overridden("state_dict", data) else set()
        found |= {f"[LightningDataModule]{type(data).__name__}.{hook}" for hook in names}
    for callback in _users_callbacks(trainer):
        found |= {f"[Callback]{callback.state_key}.{hook}" for hook in _written_hooks(Callback, callback)}
    return frozenset(found)


def _users_callbacks(trainer: Trainer) -> list[Callback]:
    return [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, LambdaCallback) or not type(callback).__module__.startswith(_LIBRARIES)
    ]


def _written_hooks(cls: type, instance: Any) -> set[str]:
    """Return the hooks of one of Lightning's classes that an object's own class has written."""
    return {name for name in dir(cls) if _is_hook(cls, name) and is_overridden(name, instance)}


def _is_hook(cls: type, name: str) -> bool:
    return not name.startswith("_") and name not in _NOT_ABOUT_TENSORS and callable(getattr(cls, name, None))


# ------------------------------------------------------------------------------------------------
# ``state_dict()`` and ``load_state_dict()`` that users call on a sharded module, or on any part of it.
#
# A state dict holds sharded tensors of the full shape: DTensors (FSDP2) or `FlatShard` (FSDP1, ZeRO-3). No rank waits
# for another, and a shard refuses to be pickled alone; ``strategy.full_state_dict()`` gathers. Loading takes full
# tensors or shards, under the names that the model had, and each rank keeps its own part.


_MARK = "_accelight_state_dicts"


def follow_state_dicts(modules: Iterable[nn.Module], access: ShardAccess) -> None:
    """Make these modules save and load shards when users call them.

    Args:
        modules: Those with sharded parameters of their own.
        access: Where the shards are.
    """
    for module in modules:
        if _MARK not in module.__dict__:
            module.register_state_dict_post_hook(_after_saving)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
        module.__dict__[_MARK] = access


class OwnStateDict:
    """A ``state_dict()`` of a LightningModule that the user has written: the library runs it in saves, as users' code.

    Args:
        module: Sharded.
        access: Where the shards are.
    """

    def __init__(self, module: LightningModule, access: ShardAccess) -> None:
        self.access = access
        self._module, self._own = module, module.state_dict
        self._is_saving = False

    @classmethod
    def attach(cls, module: LightningModule, access: ShardAccess) -> None:
        """Put one in place, once, where the user has written the method; extra states of modules see whole tensors."""
        for each in module.modules():
            for name in ("get_extra_state", "set_extra_state"):
                method = getattr(type(each), name)
                if method is not getattr(nn.Module, name):
                    run = partial(_run_in_save, access, method, each)
                    replace_for_good("sharded modules", each, **{name: run})
        if (found := cls.of(module)) is not None:
            found.access = access
        elif is_overridden("state_dict", module):
            replace_for_good("sharded modules", module, state_dict=cls(module, access))

    @classmethod
    def of(cls, model: nn.Module) -> OwnStateDict | None:
        """Return the one of a LightningModule, or of the one in a wrapper."""
        found = (vars(module).get("state_dict") for module in model.modules())
        return next((one for one in found if isinstance(one, cls)), None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the method."""
        if not is_library():
            return self._own(*args, **kwargs)
        if not self._is_saving:
            return nn.Module.state_dict(self._module, *args, **kwargs)
        plain, shards = nn.Module.state_dict(self._module), {}

        def note(_: nn.Module, found: dict[str, Any], prefix: str, __: Any) -> None:
            shards.update({id(value): (value, name.removeprefix(prefix)) for name, value in found.items()})

        state = self._run(note, *args, **kwargs)
        for name, value in state.items():
            if isinstance(value, FlatShard):  # of stage 3, whose weights DeepSpeed saves elsewhere
                state[name] = plain[shards[id(value)][1]] if id(value) in shards else gathered(value)
        return state

    def _run(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
        with running(GlobalTensors(self.access)):
            handle = self._module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
            try:
                return self._own(*args, **kwargs)
            finally:
                handle.remove()

    @classmethod
    @contextmanager
    def in_save(cls, model: nn.Module) -> Iterator[None]:
        """Mark the library's calls of ``model.state_dict()`` as those of a save."""
        own = cls.of(model)
        if own is not None:
            own._is_saving = True
        try:
            yield
        finally:
            if own is not None:
                own._is_saving = False

    def applied_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the method's result for a state dict of the library's, which ``super().state_dict()`` gives it."""

        def replace(_: nn.Module, found: dict[str, Any], prefix: str, __: Any) -> None:
            found.clear()
            found.update({f"{prefix}{name}": value for name, value in state.items()})

        return dict(self._run(replace))

    def gathered(self, shown: dict[str, Any] | None, *, on_rank_zero: bool) -> dict[str, Any]:
        """Return the method's result for whole tensors; all ranks must call it.

        Args:
            shown: What ``super().state_dict()`` gives it; None for shards that it sees as whole tensors, which ranks
                gather afterwards, one after the other.
            on_rank_zero: Whether rank 0 alone has the result, in host memory; else each rank has it where shards are.
        """
        if shown is None:
            with running(GlobalTensors(self.access)):
                state = self._own()
        else:
            state = self.applied_to(shown)
        found = {}
        for name, value in state.items():
            whole = gathered(value) if isinstance(value, Tensor) else value
            if not on_rank_zero or dist.get_rank() == 0:
                found[clean_name(name)] = tree_map_only(Tensor, Tensor.cpu, whole) if on_rank_zero else whole
        return found

    def load(self, state: dict[str, Any], *, strict: bool) -> None:
        """Load into the user's module what `applied_to` has returned, or what was read in its place."""
        with running(GlobalTensors(self.access)):
            self._module.load_state_dict(state, strict=strict)


def _run_in_save(access: ShardAccess, method: Callable[..., Any], *args: Any) -> Any:
    with running(GlobalTensors(access)) if is_library() else nullcontext():
        return method(*args)


def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Put shards into a state dict of users'."""
    if is_library() or is_user_code():  # under a mode, detach() has done it
        return
    access: ShardAccess = module.__dict__[_MARK]
    for name, parameter in module._parameters.items():
        is_flat = parameter is None or isinstance(parameter, FlatParameter)  # the flat one is torch's business
        shard = None if parameter is None or is_flat else access.shard_of(parameter)
        if shard is not None and state_dict.get(prefix + name, parameter) is not parameter:
            state_dict[prefix + name] = shard


def _before_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut full tensors to this rank's part."""
    if is_library() or is_user_code():  # under a mode, copy_() does it
        return
    access: ShardAccess = module.__dict__[_MARK]
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if parameter is None or not isinstance(value, Tensor):
            continue
        known: Any = parameter
        shard = known if isinstance(known, Sharded) else access.shard_of(parameter)
        if shard is None or value.shape != shard.shape or (isinstance(value, DTensor) and shard is known):
            continue
        part = value if isinstance(value, Sharded) else part_of(value, shard)
        if isinstance(known, Sharded):
            state_dict[prefix + name] = part
        elif local_part(shard).shape == parameter.shape:
            state_dict[prefix + name] = local_part(part)
        else:  # ZeRO-3, whose parameter shows nothing
            local_part(shard).copy_(local_part(part))
            state_dict[prefix + name] = parameter.detach()


def refuse_copies(modules: Iterable[nn.Module]) -> None:
    """Make ``copy.deepcopy()`` of sharded modules, or of what has them, say what to do instead."""
    for module in modules:
        replace_for_good("sharded modules", module, __deepcopy__=partial(_refuse_copy, type(module).__name__))


def _refuse_copy(name: str, _: dict[int, Any]) -> nn.Module:
    raise RuntimeError(
        f"copy.deepcopy() of a sharded module ({name}): a copy would not be sharded like its original. Copy the module "
        "in __init__() or configure_model(), before it is sharded, as a submodule; or load "
        "strategy.full_state_dict(module) into a new one."
    )


def replace_in_user_code(hooks: MutableMapping[int, Any], other: Callable[..., Any]) -> None:
    """Run ``other`` in place of torch's own hooks while users' code runs under a mode."""
    for key, hook in list(hooks.items()):
        if getattr(hook, _MARK, None) is None:
            hooks[key] = _choosing(hook, other)


def _choosing(hook: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        return other(*args, **kwargs) if is_user_code() else hook(*args, **kwargs)

    setattr(run, _MARK, True)
    return run


# ------------------------------------------------------------------------------------------------
# Full parameters, gradients and state dicts on request, with any strategy.
#
# With the strategies of accelight the ranks gather what is sharded, and each writes its own part back when the context
# ends. With any other strategy of Lightning (``ddp``, one device) tensors are whole already, so one script runs with
# all.


Modules = nn.Module | Iterable[nn.Module] | None


class FullTensors:
    """Methods of the strategies of accelight."""

    _user_code: UserCode | None

    @property
    def shard_access(self) -> ShardAccess:
        """The access to the shards.

        Raises:
            RuntimeError: Before the model is sharded.
        """
        if self._user_code is None:
            raise RuntimeError("There is no sharded model yet: it exists only after the strategy's setup.")
        return self._user_code.access

    def full_parameters(
        self, modules: Modules = None, *, writeback: bool = True
    ) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """See `full_parameters`."""
        return full_parameters(self, modules, writeback=writeback)

    def full_gradients(
        self, modules: Modules = None, *, writeback: bool = True
    ) -> AbstractContextManager[dict[str, Tensor]]:
        """See `full_gradients`."""
        return full_gradients(self, modules, writeback=writeback)

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Any]:
        """See `full_state_dict`."""
        return full_state_dict(self, module)


@contextmanager
def full_parameters(
    strategy: Any, modules: Modules = None, *, writeback: bool = True
) -> Generator[dict[str, nn.Parameter], None, None]:
    """Give modules full, writable parameters inside this context; every rank enters it.

    Do not call the modules inside: their forward gathers and frees parameters itself.

    Args:
        strategy: The Trainer's (``trainer.strategy``).
        modules: A module or several; default: the LightningModule. Parameters of modules inside them are included.
        writeback: Whether each rank's part of the values at the end is what trains on. All ranks must have written the
            same; under ``ddp`` ranks that write different values diverge in the same way.

    Yields:
        The parameters by their names in ``modules``, without the names of wrappers; on the device of the shards.

    Raises:
        RuntimeError: Before the model is sharded.
        ValueError: If parameters of two modules have one name; enter a context for each then.
    """
    found = list(_modules(strategy, modules))
    names = _by_name(found)
    if not hasattr(strategy, "shard_access"):
        yield names
        return
    _check_same_line(strategy, "calls full_parameters()")
    access: ShardAccess = strategy.shard_access
    with library_code():
        shards: dict[int, tuple[Sharded, nn.Parameter]] = {}
        places = list(_places(found))
        for _, _, _, parameter in places:
            shard = _shard(access, parameter)
            if shard is not None and isinstance(parameter, FlatParameter):
                raise RuntimeError(
                    "full_parameters() cannot show original parameters with use_orig_params=False, where modules "
                    "have none. Set use_orig_params=True (the default)."
                )
            if shard is not None and id(parameter) not in shards:
                shards[id(parameter)] = shard, nn.Parameter(gathered(shard), parameter.requires_grad)
        for _, owner, name, parameter in places:
            if id(parameter) in shards:
                owner._parameters[name] = shards[id(parameter)][1]
    try:
        yield {name: shards[id(one)][1] if id(one) in shards else one for name, one in names.items()}
    finally:
        with library_code(), torch.no_grad():
            for _, owner, name, parameter in places:
                owner._parameters[name] = parameter
            for shard, full in shards.values() if writeback else ():
                local_part(shard).copy_(local_part(part_of(full.detach(), shard)))
            note_changes()


@contextmanager
def full_gradients(
    strategy: Any, modules: Modules = None, *, writeback: bool = True
) -> Generator[dict[str, Tensor], None, None]:
    """Give the full, reduced gradients of modules, to look at or to change in place; every rank enters it.

    Use it where gradients are complete: in ``on_before_optimizer_step`` and, in the last micro-batch of an accumulation
    window, in ``on_after_backward``.

    Args:
        strategy: The Trainer's (``trainer.strategy``).
        modules: A module or several; default: the LightningModule.
        writeback: Whether the optimizer steps on the values that the gradients have at the end.

    Yields:
        The gradients by their parameters' names in ``modules``, tied ones under each name; parameters without a
        gradient on any rank are left out.

    Raises:
        RuntimeError: Before the model is sharded, or while gradients are not reduced yet.
        ValueError: If parameters of two modules have one name; enter a context for each then.
    """
    names = _by_name(_modules(strategy, modules))
    if not hasattr(strategy, "shard_access"):
        yield {name: one.grad for name, one in names.items() if one.grad is not None}
        return
    _check_same_line(strategy, "calls full_gradients()")
    access: ShardAccess = strategy.shard_access
    with library_code():
        gradients: dict[nn.Parameter, Tensor] = {}
        for parameter in dict.fromkeys(names.values()):
            if access.is_unreduced(parameter):
                raise RuntimeError(f"full_gradients() was called {UNREDUCED}")
            gradient = access.gradient_of(parameter) if access.owns_gradient(parameter) else parameter.grad
            if gradient is not None:
                gradients[parameter] = gradient
        full = {parameter: gathered(one) for parameter, one in gradients.items()}
    yield {name: full[parameter] for name, parameter in names.items() if parameter in full}
    with library_code(), torch.no_grad():
        for parameter, gradient in gradients.items() if writeback else ():
            if isinstance(gradient, Sharded):
                local_part(gradient).copy_(local_part(part_of(full[parameter], gradient)))
        note_changes()


def full_state_dict(strategy: Any, module: nn.Module | None = None) -> dict[str, Any]:
    """Return ``module.state_dict()`` with full tensors; every rank calls it, and each gets all.

    The tensors stay on the device of the shards. For large models save a sharded checkpoint or
    ``strategy.save_safetensors()``, where no rank holds everything.

    Args:
        strategy: The Trainer's (``trainer.strategy``).
        module: Default: the LightningModule.

    Raises:
        RuntimeError: Before the model is sharded; with ``use_orig_params=False``.
    """
    chosen: nn.Module = strategy.lightning_module if module is None else module
    if not hasattr(strategy, "shard_access"):
        return dict(chosen.state_dict())
    if any(isinstance(one, FlatParameter) for one in chosen.parameters()):
        raise RuntimeError(
            "full_state_dict() cannot show original parameters with use_orig_params=False, where modules have none. "
            "Set use_orig_params=True (the default), or save the weights: trainer.save_checkpoint(), "
            "strategy.save_safetensors()."
        )
    _check_same_line(strategy, "calls full_state_dict()")
    with running(GlobalTensors(strategy.shard_access)):
        state = chosen.state_dict()
    with library_code():
        return {clean_name(key): gathered(one) if isinstance(one, Tensor) else one for key, one in state.items()}


def _check_same_line(strategy: Any, action: str) -> None:
    """Come to the user's line, before ranks gather: one that is there alone says so."""
    user_code: UserCode | None = getattr(strategy, "_user_code", None)
    if user_code is not None and user_code.places is not None:
        user_code.places.compare_at_line(action)
    with library_code():
        strategy.shard_access.sync_to_model()


def _modules(strategy: Any, modules: Modules) -> Iterable[nn.Module]:
    if modules is None:
        return [strategy.lightning_module]
    return [modules] if isinstance(modules, nn.Module) else modules


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield each parameter with its name, and the module and the attribute that have it; ties under each name."""
    for module in modules:
        for prefix, owner in module.named_modules():
            own: Mapping[str, nn.Parameter | None] = owner._parameters
            for name, parameter in own.items():
                if parameter is not None:
                    yield clean_name(f"{prefix}.{name}".lstrip(".")), owner, name, parameter


def _by_name(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    names: dict[str, nn.Parameter] = {}
    for name, _, _, parameter in _places(modules):
        if names.setdefault(name, parameter) is not parameter:
            raise ValueError(f"Two of the modules have a parameter named {name!r}: enter a context for each module.")
    return names


def _shard(access: ShardAccess, parameter: nn.Parameter) -> Sharded | None:
    return parameter if isinstance(parameter, Sharded) else access.shard_of(parameter)
