"""Sharded parameters where no mode of users' code runs: in forked processes, in threads, and in code that begins late.

`GlobalTensors` sees, and slows down, each operation. Here parameters notice themselves what is done with them.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..upstream.patches import set_classes
from .global_tensors import OF_THE_SHARD, UNCOUNTED, tensors_in
from .shards import Sharded

_IN_FORK = (
    "A process that this one has forked, such as a worker of a DataLoader, used a sharded parameter or a module that "
    "has some: no other process gathers them with it. Compute what depends on weights in a hook of the module, or "
    "load data with num_workers=0."
)
_IN_THREAD = (
    "A thread that a hook or a step has started used a sharded parameter or a module that has some: the processes "
    "gather them in the order of their main threads alone. Compute what depends on weights in the hook, and hand the "
    "result to the thread."
)
_ENGINES = ("torch.distributed.", "torch.nn.modules.", "torch.autograd.", "torch.optim.", "deepspeed.", "accelight.")
_BETWEEN = ("__torch_function__", "show_uncounted")
"""Functions that stand between an operation and who asks for it."""
_CHECKPOINTING = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing")
_MODULES = nn.Module.__module__, "utilities.device_dtype_mixin", "_fully_shard", "fully_sharded_data_parallel"
_TRAINERS = ("accelight.", "lightning.", "pytorch_lightning.")


# ------------------------------------------------------------------------------------------------
# The caller of an operation.


def is_asked_by_library(frame: FrameType | None) -> bool:
    """Return whether code of torch's modules, an engine or accelight calls an operation, below functions and modes."""
    while frame is not None:
        name = "torch." if frame.f_code.co_name in _BETWEEN else f"{frame.f_globals.get('__name__')}."
        if name.startswith(_ENGINES):
            return True
        if not name.startswith("torch."):
            return False
        frame = frame.f_back
    return True


def is_in_call(frame: FrameType | None) -> bool:
    """Return whether an operation runs in a call of a module that users' code has made."""
    while frame is not None:
        if frame.f_globals.get("__name__") == nn.Module.__module__:
            return True
        if f"{frame.f_globals.get('__name__')}.".startswith(_TRAINERS) and frame.f_code.co_name not in _BETWEEN:
            return False
        frame = frame.f_back
    return False


def is_method_called_by_user(frame: FrameType | None) -> bool:
    """Return whether users' code calls a method of a module, below methods of torch's and Lightning's own classes."""
    while frame is not None and str(frame.f_globals.get("__name__")).endswith(_MODULES):
        frame = frame.f_back
    name = "" if frame is None else f"{frame.f_globals.get('__name__')}."
    return frame is not None and not name.startswith((*_TRAINERS, "torch.", "deepspeed."))


def is_recomputed(frame: FrameType | None) -> bool:
    """Return whether an operation runs inside of activation checkpointing, torch's or DeepSpeed's."""
    while frame is not None and frame.f_globals.get("__name__") not in _CHECKPOINTING:
        frame = frame.f_back
    return frame is not None


def _is_about_shard(func: Any) -> bool:
    """Return whether an operation, or an attribute, has the same meaning for a shard as for the full tensor."""
    return getattr(getattr(func, "__self__", None), "__name__", func.__name__) in OF_THE_SHARD


# ------------------------------------------------------------------------------------------------
# Code that begins to use shards in the midst of a run.


Use = Callable[[Any, Any, Any], Any]
"""Runs an operation of users' code (function, arguments, keyword arguments)."""
_waiting: tuple[Use, int] | None = None
"""The function that runs uses of watched parameters, and its thread."""


def _use_from(frame: FrameType) -> Use | None:
    """Return the function that runs a use that this code asks for; None if nothing waits for it."""
    if _waiting is None or is_asked_by_library(frame):
        return None
    use, thread = _waiting
    return use if threading.get_ident() == thread or is_recomputed(frame) else None  # by a thread of torch's own


class _Watched:
    """A parameter that hands its use in users' code to a `Watch`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        use = None if _is_about_shard(func) else _use_from(sys._getframe(1))
        return plainly(func, args, kwargs) if use is None else use(func, args, kwargs or {})


class Watch:
    """Notices uses of parameters: it costs nothing for each operation, and some 0.1 µs for each parameter.

    Args:
        parameters: Sharded.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own: list[tuple[Tensor, type]] = [(each, type(each)) for each in parameters]
        self._watched = [(each, _with_base(_Watched, cls)) for each, cls in self._own]
        self._is_on = False

    @contextmanager
    def until_end(self, use: Use) -> Iterator[None]:
        """Route to ``use`` what users' code of this thread does with the parameters, until the context ends."""
        with waiting(use), self.switched(is_on=True):
            yield

    @contextmanager
    def switched(self, *, is_on: bool) -> Iterator[None]:
        """Make parameters notice their use, or not: optimizers know them by their classes."""
        was_on = self._is_on
        self._switch(is_on=is_on and _waiting is not None)
        try:
            yield
        finally:
            self._switch(is_on=was_on)

    def _switch(self, *, is_on: bool) -> None:
        if is_on is not self._is_on:
            set_classes("user code", self._watched if is_on else self._own)
            self._is_on = is_on


@contextmanager
def waiting(use: Use) -> Iterator[None]:
    """Route to ``use`` what users' code of this thread asks `uncounted_aliases` for, until the context ends."""
    global _waiting
    before, _waiting = _waiting, (use, threading.get_ident())
    try:
        yield
    finally:
        _waiting = before


def uncounted_aliases() -> dict[str, Any]:
    """Return attributes of `torch.Tensor` that hand out memory whose writes no version counts, while `waiting`."""
    own: Any = torch.Tensor.data
    found: dict[str, Any] = {name: _shown(getattr(torch.Tensor, name)) for name in UNCOUNTED}
    return {"data": _Data(_shown(own.__get__), _shown(own.__set__)), **found}


class _Data(property):
    """``Tensor.data``, by whose name modes know it."""

    __name__ = "data"


def _shown(func: Any) -> Any:
    @functools.wraps(func)
    def show_uncounted(*args: Any, **kwargs: Any) -> Any:
        use = _use_from(sys._getframe(1))
        return func(*args, **kwargs) if use is None else use(func, args, kwargs)

    return show_uncounted


def plainly(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation as if parameters had their own classes."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


@functools.cache
def _with_base(base: type, cls: type) -> type:
    return types.new_class(cls.__name__, (base, cls))


# ------------------------------------------------------------------------------------------------
# Forked processes.


class _InFork:
    """A parameter in a forked process."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run what has nothing to do with values."""
        if not _is_about_shard(func):
            raise RuntimeError(_IN_FORK)
        return plainly(func, args, kwargs)


_is_fork = False


def refuse_in_fork(parameters: Iterable[Tensor]) -> None:
    """Make parameters refuse all use, and modules that have some all calls, in this process from now on."""
    global _is_fork, _waiting
    _is_fork, _waiting = True, None
    set_classes("user code", [(each, _with_base(_InFork, type(each))) for each in parameters])
    register_module_forward_pre_hook(_refuse_call)


def refuse_gathers_in_fork() -> None:
    """Refuse to meet the other processes, where a unit is about to: its own parameters may be whole (``NO_SHARD``)."""
    if _is_fork:
        raise RuntimeError(_IN_FORK)


def _refuse_call(module: nn.Module, _: Any) -> None:
    if any(isinstance(one, _InFork) for one in module.parameters()):
        raise RuntimeError(_IN_FORK)


# ------------------------------------------------------------------------------------------------
# Threads.


_threads = threading.local()
"""Has a ``mode`` in threads that users' code has started."""


class InThread(TorchFunctionMode):
    """Runs in a thread that users' code has started, and refuses uses of what is sharded.

    Args:
        sharded: Parameters.
        owns_gradient: Whether the gradient of a tensor is the engine's.
        note: Called with each error, which the thread alone may have printed.
    """

    def __init__(
        self,
        sharded: Iterable[Tensor],
        owns_gradient: Callable[[Tensor], bool],
        note: Callable[[RuntimeError], None],
    ) -> None:
        super().__init__()
        self._sharded = WeakIdKeyDictionary(dict.fromkeys(sharded, True))
        self._owns_gradient, self._note = owns_gradient, note

    @classmethod
    def of_this_thread(cls) -> InThread | None:
        """Return the one that runs in this thread, for those that it starts."""
        mode: InThread | None = getattr(_threads, "mode", None)
        return mode

    def run(self, own: Callable[[], None]) -> None:
        """Run a thread."""
        _threads.mode = self
        with self:
            own()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        is_refused = not _is_about_shard(func) and any(self._is_part(func, one) for one in tensors_in(args, kwargs))
        if is_refused and not is_asked_by_library(sys._getframe(1)):
            self.refuse()
        return func(*args, **kwargs)

    def _is_part(self, func: Any, tensor: Tensor) -> bool:
        if isinstance(tensor, Sharded) or tensor in self._sharded:
            return True
        return getattr(getattr(func, "__self__", None), "__name__", "") == "grad" and self._owns_gradient(tensor)

    def refuse(self) -> NoReturn:
        """Raise."""
        error = RuntimeError(_IN_THREAD)
        self._note(error)
        raise error


def refuse_in_threads() -> None:
    """Refuse to gather for a thread that users' code has started."""
    if (mode := InThread.of_this_thread()) is not None:
        mode.refuse()
