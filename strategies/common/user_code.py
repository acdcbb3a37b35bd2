"""When users' code runs, and when the library's does.

The Trainer runs each hook of the module and of callbacks inside ``trainer.profiler.profile(name)``. `UserCode` looks at
these names: inside hooks that users have written, operations on sharded tensors have their global meaning
(`GlobalTensors`). Whatever the strategy does meanwhile works on shards, see `library_code`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ...state.process_group import require_group, timeout_of
from ..upstream.lightning import Callback, LightningModule, Trainer, is_overridden
from .compared_actions import ComparedPlaces
from .flat_shards import FlatShard
from .global_tensors import GlobalTensors, ShardAccess

_T = TypeVar("_T", bound=type)
_NOT_ABOUT_TENSORS = frozenset(
    [
        "prepare_data",
        "setup",
        "configure_model",
        "configure_sharded_model",
        "configure_callbacks",
        "train_dataloader",
        "val_dataloader",
        "test_dataloader",
        "predict_dataloader",
        "transfer_batch_to_device",
        "on_before_batch_transfer",
        "on_after_batch_transfer",
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
        "forward",
        "teardown",
        "on_load_checkpoint",
        "state_dict",
        "load_state_dict",
    ]
)
"""Methods that run before the model is sharded, on data alone, or inside steps."""
_WAY_OUT = (
    "What looks at a whole parameter, or at a gradient, gathers it from all processes. Do it on every process, outside "
    "of conditions such as `if trainer.is_global_zero:`; only logging the result belongs inside."
)
_LIBRARIES = ("lightning.pytorch.", "pytorch_lightning.", "accelight.")


_running: list[GlobalTensors | None] = []
"""What runs now, outermost first: users' code under a mode, or the library's (None); empty outside of both."""


class UserCode:
    """Follows one Trainer; at most one is attached at a time.

    Args:
        access: Where the engine has its shards.
        called: Modules whose calls are the library's: what they need is unsharded by the engine.
        always_in_steps: Whether a sharded parameter in a training step could go unnoticed else.
    """

    def __init__(self, access: ShardAccess, called: Iterable[nn.Module], *, always_in_steps: bool = False) -> None:
        self.access = access
        self._in_hooks, self._in_steps = GlobalTensors(access), GlobalTensors(access, in_step=True)
        self.places: ComparedPlaces | None = None
        """Compares the lines at which ranks gather; None on one rank."""
        self._called = WeakIdKeyDictionary(dict.fromkeys(called, True))
        self._call_hook: RemovableHandle | None = None
        self._profiler: Any = None
        self._module: LightningModule | None = None
        self._always_in_steps = always_in_steps

    # ------------------------------------------------------------------ attached
    def attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Begin to follow the Trainer's hooks, until `detach`."""
        global _attached
        if _attached is not None:
            _attached.detach()
        _attached = self
        if trainer.world_size > 1:
            timeout = timeout_of(require_group("A fit"))
            self.places = self._in_hooks.places = self._in_steps.places = ComparedPlaces(_WAY_OUT, timeout)
        self._wrap_training_step(module)
        actions = _hooks_of_users(trainer, module)
        self._profiler = profiler = trainer.profiler  # type: ignore[attr-defined]
        profile = profiler.profile

        @functools.wraps(profile)
        def profile_hook(action_name: str) -> AbstractContextManager[Any]:
            context = profile(action_name)
            return self._hook(context) if action_name in actions else context

        self._profiler.__dict__["profile"] = profile_hook

    def detach(self) -> None:
        """Undo `attach`."""
        global _attached
        if self._profiler is not None:
            self._profiler.__dict__.pop("profile", None)
            self._profiler = None
        if self._module is not None:
            self._module.__dict__.pop("training_step", None)
            self._module = None
        self.follow_calls(follows=False)
        if _attached is self:
            _attached = None

    def _wrap_training_step(self, module: LightningModule) -> None:
        self._module, step = module, module.training_step

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not self._is_in_steps(module):
                return step(*args, **kwargs)
            self.access.in_step = True
            try:
                with running(self._in_steps):
                    return step(*args, **kwargs)
            finally:
                self.access.in_step = False

        module.__dict__["training_step"] = training_step

    def _is_in_steps(self, module: LightningModule) -> bool:
        """Return whether to look at what a training step does with sharded parameters.

        Always in manual optimization, where none is gathered, and where the engine asks for it. Else in the first batch
        of each epoch, and in all batches once a step has used a sharded parameter.
        """
        if self._always_in_steps or self._in_steps.has_met_shards or not module.automatic_optimization:
            return True
        return module.trainer.fit_loop.epoch_loop.batch_idx == 0

    @contextmanager
    def _hook(self, context: AbstractContextManager[Any]) -> Iterator[Any]:
        if not torch.is_grad_enabled():  # an evaluation's
            self.access.release()
        with context as value, running(self._in_hooks):
            yield value

    @contextmanager
    def in_hook(self, *, ends_window: bool = False) -> Iterator[None]:
        """Run a method of the user's that the Trainer does not profile as a hook.

        Args:
            ends_window: Whether gradients that it asks for are those of a whole accumulation window.
        """
        self.access.ends_window = ends_window
        try:
            with running(self._in_hooks):
                yield
        finally:
            self.access.ends_window = False

    def follow_calls(self, *, follows: bool) -> None:
        """Run calls of modules as the library's from now on, or no more.

        No hook stands while the library runs: torch.compile would compile a module anew for each one.
        """
        if follows and self._call_hook is None and len(self._called):
            self._call_hook = register_module_forward_pre_hook(self._before_call)
        elif not follows and self._call_hook is not None:
            self._call_hook.remove()
            self._call_hook = None

    def _before_call(self, module: nn.Module, _: Any) -> None:
        if is_library() or module not in self._called:
            return
        library = running(None)
        is_in_hook = _running[-1] is self._in_hooks
        library.__enter__()

        def leave(*_: Any) -> None:
            handle.remove()
            if is_in_hook:
                self.access.release()
            library.__exit__(None, None, None)

        handle = module.register_forward_hook(leave, always_call=True)


_attached: UserCode | None = None


def is_library() -> bool:
    """Return whether the library's own code runs, and no hook of a user inside of it."""
    return bool(_running) and _running[-1] is None


def is_user_code() -> bool:
    """Return whether a hook or a step of a user runs under a mode."""
    return bool(_running) and _running[-1] is not None


@contextmanager
def running(mode: GlobalTensors | None) -> Iterator[None]:
    """Run users' code under a mode, or the library's under none, until the context ends."""
    _switch(_running[-1] if _running else None, mode)
    _running.append(mode)
    try:
        yield
    finally:
        ended = _running.pop()  # hooks of a module may end what they began in another order
        _switch(ended, _running[-1] if _running else None)
        if mode is not None and mode not in _running:
            mode.write_back()


def _switch(before: GlobalTensors | None, after: GlobalTensors | None) -> None:
    if before is after:
        return
    if _attached is not None:
        _attached.follow_calls(follows=after is not None)
    if before is not None:
        before.leave()
        before.write_back(forget=False)
    if after is not None:
        after.enter()


def with_plain_states(optimizer: Optimizer) -> None:
    """Let states that an optimizer made in users' code be what its step computes with: plain parts of this rank."""
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, FlatShard):
                state[key] = value.held


def library_code() -> AbstractContextManager[None]:
    """Run the library's own code: parameters are the shards that they are."""
    return running(None)


def running_as_library(*methods: str) -> Callable[[_T], _T]:
    """Let these methods of a class run as `library_code`, whoever calls them."""

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
            return method(*args, **kwargs)

    return run


def _hooks_of_users(trainer: Trainer, module: LightningModule) -> frozenset[str]:
    """Return the names under which the Trainer profiles hooks that users have written."""
    found = {
        f"[LightningModule]{type(module).__name__}.{hook}"
        for hook in dir(LightningModule)
        if _is_hook(LightningModule, hook) and is_overridden(hook, module)
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not type(callback).__module__.startswith(_LIBRARIES):
            hooks = [hook for hook in dir(Callback) if _is_hook(Callback, hook)]
            found |= {f"[Callback]{callback.state_key}.{hook}" for hook in hooks if is_overridden(hook, callback)}
    return frozenset(found)


def _is_hook(cls: type, name: str) -> bool:
    return not name.startswith("_") and name not in _NOT_ABOUT_TENSORS and callable(getattr(cls, name, None))
