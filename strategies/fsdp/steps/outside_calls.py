"""Calls of a sharded module, or of any part of it, that come from the user's code and not from a step of the strategy.

Between the strategy's steps every parameter is in its sharded form, so that what hooks read and change is what trains.
A module that is called there (sampling with ``self(x)``, a part of the model in a callback, a network in manual
optimization) needs gathered ones. `OutsideCalls` gathers the unit that the module lies in for the while of the
outermost call, as the unit's own ``forward`` would, and shards it again afterwards.

Modules carry no hooks for it: one global hook of torch's stands while no step runs, so a step pays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ...common.user_code import library_code
from .same_path import SamePath

Close = Callable[[Any], Any]
"""Ends a call that succeeded: given the module's output, returns what the caller gets."""
_ATTRIBUTE = "_accelight_outside_calls"


class UnitOpener(Protocol):
    """What an engine does for a call."""

    path: SamePath
    """Follows what is gathered."""

    def sharded_modules(self, root: nn.Module) -> set[nn.Module]:
        """Return the modules with sharded parameters of their own."""
        ...

    def modules_in_units(self, root: nn.Module) -> Iterable[nn.Module]:
        """Return the modules whose calls need something gathered."""
        ...

    def open_unit(self, root: nn.Module, module: nn.Module, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Close]:
        """Gather what ``module`` needs; return its arguments, and what ends the call."""
        ...

    def make_idle(self, root: nn.Module) -> None:
        """End whatever a failed call left open."""
        ...


class OutsideCalls:
    """Takes care of the calls of one sharded model.

    Args:
        root: What the engine made of the model; it keeps this alive, and nobody here keeps it.
        opener: The engine.
        context: Entered around each call (autocast under mixed precision).
    """

    def __init__(
        self,
        root: nn.Module,
        opener: UnitOpener,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._root = weakref.ref(root)
        self._opener = opener
        self._context = context
        self._numbers: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._parameters: MutableMapping[nn.Module, list[int]] = WeakIdKeyDictionary()
        root.__dict__[_ATTRIBUTE] = self  # to live as long as it
        known = weakref.ref(self)
        owners = opener.sharded_modules(root)
        for number, module in enumerate(opener.modules_in_units(root)):
            self._numbers[module] = number
            self._parameters[module] = _ids_of_parameters(module)
            if not owners.isdisjoint(module.modules()):  # any other needs nothing, such as an average in buffers
                _known[module] = known
        _watch()

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Begin the outermost call, of ``module``; what ends it are hooks that live as long as it."""
        root, context = self._root(), self._context()
        if root is None:
            return args
        self._check_parameters(module)
        succeeded: list[bool] = []
        handles: list[RemovableHandle] = []

        library = library_code()

        def finish() -> None:
            library.__exit__(None, None, None)
            for handle in handles:
                handle.remove()
            context.__exit__(None, None, None)
            _leave()
            if not succeeded:
                self._opener.make_idle(root)

        library.__enter__()
        _enter()
        context.__enter__()
        path = self._opener.path
        try:
            path.begin(("call", self._numbers[module], torch.is_grad_enabled()))
            args, close = self._opener.open_unit(root, module, args)
        except BaseException:
            finish()
            raise

        def succeed(_: nn.Module, __: Any, output: Any) -> Any:
            output = close(output)
            path.end()
            succeeded.append(True)
            return output

        # The first runs after a call that came to its end, the second whatever its end.
        handles.append(module.register_forward_hook(succeed))
        handles.append(module.register_forward_hook(lambda *_: finish(), always_call=True))
        return args

    def _check_parameters(self, module: nn.Module) -> None:
        """Refuse a call with other parameters in the places of the sharded ones.

        Raises:
            RuntimeError: If users' code has replaced parameters; the call would use the sharded ones.
        """
        for inner in module.modules():
            if self._parameters.get(inner, _NO_IDS) not in (_NO_IDS, _ids_of_parameters(inner)):
                raise other_parameters(module)


def other_parameters(module: nn.Module) -> RuntimeError:
    """Return the error of a call with other parameters in the places of the sharded ones."""
    return RuntimeError(
        f"{type(module).__name__} was called with other parameters than those that are sharded "
        "(torch.func.functional_call, vmap, parameters replaced by hand): FSDP would use its own. Call the module "
        "itself, or a copy of it that was made in __init__() and kept out of the model (in a list), with the values of "
        "'strategy.full_state_dict()'; or leave the module to the root's unit and call it in training_step()."
    )


_NO_IDS: list[int] = [-1]


def _ids_of_parameters(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in module._parameters.values()]


_known: MutableMapping[nn.Module, weakref.ref[OutsideCalls]] = WeakIdKeyDictionary()
"""Both are weak: the calls know the engine, which knows the modules. By identity, as a metric's hash changes."""
_depth = 0
"""How many steps, backwards and calls are under way: inside of them nobody is outside."""
_handle: RemovableHandle | None = None


class _Inside:
    """A step or a backward runs in this context, whose calls find gathered what they need."""

    def __enter__(self) -> None:
        _enter()

    def __exit__(self, *_: object) -> None:
        _leave()


inside = _Inside()
"""It may be entered again inside of itself."""


def is_inside() -> bool:
    """Return whether a step, a backward or a call is under way."""
    return _depth > 0


def _enter() -> None:
    global _depth
    _depth += 1
    _watch()


def _leave() -> None:
    global _depth
    _depth -= 1
    _watch()


def _watch() -> None:
    """Let torch's hook stand where it is needed, and only there."""
    global _handle
    wanted = _depth == 0 and len(_known) > 0
    if wanted and _handle is None:
        _handle = register_module_forward_pre_hook(_before_call)  # type: ignore[arg-type] # it may return, too
    elif not wanted and _handle is not None:
        _handle.remove()
        _handle = None


def _before_call(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    known = _known.get(module)
    calls = None if known is None else known()
    if calls is None or torch._C._current_graph_task_id() != -1:  # recomputing, in a backward not the strategy's
        return None
    return calls.begin(module, args)
