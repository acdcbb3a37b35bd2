"""Modules among what a checkpoint holds, such as a loss in the hyperparameters, saved as they were before training.

They are the very objects that train, with the hooks and marks of whatever shards them: hooks cannot be pickled, and
marks mean nothing to who loads them. Callbacks among them have methods of the whole model, by which they log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..upstream.lightning import Callback

T = TypeVar("T")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LOGGING = ("log", "log_dict")
"""What the Trainer gives callbacks of the module's."""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What a library leaves on the modules that it shards."""

    packages: tuple[str, ...]
    """Hooks and functions from modules of Python that begin so are left out."""
    restore: Callable[[dict[str, Any]], None]
    """Takes its marks off the ``vars`` of a layer."""
    own_class: Callable[[nn.Module], type[nn.Module]] = type
    """Returns the class that a layer had before."""
    holds_shards: Callable[[nn.Module], bool]
    """Whether a layer has parameters of its own that are sharded."""
    told: str
    """How an error says that they are: "parameters that ... has sharded"."""
    way_out: str = ""
    """What else to do about it than to leave the module out."""


@contextmanager
def plain_modules(state: Mapping[str, Any], traces: Traces) -> Iterator[None]:
    """Let modules and callbacks in ``state`` be pickled inside this context; they are the same objects there.

    Args:
        state: The Trainer's checkpoint. Looked into are dicts, lists and tuples.
        traces: What to take off the modules meanwhile.

    Raises:
        ValueError: If such a module has parameters that are sharded, which nobody could load.
    """
    layers = {layer: path for path, module in _found(state, nn.Module) for layer in module.modules()}
    callbacks = {id(callback): callback for _, callback in _found(state, Callback)}.values()
    logging = [(vars(each), {n: vars(each)[n] for n in _LOGGING if n in vars(each)}) for each in callbacks]
    for layer, path in layers.items():
        if traces.holds_shards(layer):
            raise ValueError(
                f"{path} is saved in the checkpoint and holds parameters that {traces.told} ({path}: "
                f"{traces.own_class(layer).__name__}): it would be saved without their values. Leave it out of what is "
                f"saved beside the weights: save_hyperparameters(ignore=[...]).{traces.way_out}"
            )
    before = {layer: (type(layer), dict(vars(layer))) for layer in layers}
    try:
        for attributes, methods in logging:
            for name in methods:
                del attributes[name]
        for layer in layers:
            _strip(vars(layer), traces)
            _give_class(layer, traces.own_class(layer))
        yield
    finally:
        for attributes, methods in logging:
            attributes.update(methods)
        for layer, (cls, attributes) in before.items():
            vars(layer).clear()
            vars(layer).update(attributes)
            _give_class(layer, cls)


def _found(value: Any, kind: type[T], path: str = "") -> Iterator[tuple[str, T]]:
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _found(one, kind, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _found(one, kind, f"{path}[{index}]")


def _give_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    if type(layer) is not cls:
        layer.__class__ = cls


def _strip(attributes: dict[str, Any], traces: Traces) -> None:
    traces.restore(attributes)
    for name, value in list(attributes.items()):
        if callable(value) and not isinstance(value, nn.Module) and _is_foreign(value, traces):
            del attributes[name]
        elif isinstance(value, torch.Tensor) and not value.is_leaf:  # a metric keeps the loss, with hooks on it
            attributes[name] = value.detach()
    foreign = {key for name in _HOOKS for key, hook in attributes[name].items() if _is_foreign(hook, traces)}
    for name, found in attributes.items():
        if "_hooks" in name and isinstance(found, dict):
            attributes[name] = type(found)((key, one) for key, one in found.items() if key not in foreign)


def _is_foreign(function: Any, traces: Traces) -> bool:
    function = getattr(function, "func", function)  # of a partial
    name = str(getattr(function, "__module__", ""))
    return any(name == package or name.startswith(f"{package}.") for package in traces.packages)
