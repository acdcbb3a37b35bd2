"""Modules around sharding: its artifacts, ties, extra states, and modules that cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ...checkpoint.names import clean_name
from ..upstream.lightning import Callback
from ..upstream.patches import replace_for_good

T = TypeVar("T")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LOGGING = ("log", "log_dict")
"""What the Trainer gives callbacks of the module's."""


@dataclass(frozen=True, kw_only=True)
class ShardingArtifacts:
    """A library's artifacts on the modules that it shards."""

    packages: tuple[str, ...]
    """Hooks and functions from modules of Python that begin so are left out."""
    restore: Callable[[dict[str, Any]], None]
    """Takes its marks off the ``vars`` of a layer."""
    own_class: Callable[[nn.Module], type[nn.Module]] = type
    """Returns the class that a layer had before."""
    holds_shards: Callable[[nn.Module], bool]
    """Whether a layer has parameters of its own that are sharded."""
    reason: str
    """How an error says that they are: "parameters that ... has sharded"."""
    way_out: str = ""
    """What else to do about it than to leave the module out."""


@contextmanager
def strip_sharding(state: Mapping[str, Any], traces: ShardingArtifacts) -> Iterator[None]:
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
                f"{path} is saved in the checkpoint and holds parameters that {traces.reason} ({path}: "
                f"{traces.own_class(layer).__name__}): it would be saved without their values. Exclude it from the "
                f"data saved next to the weights: save_hyperparameters(ignore=[...]).{traces.way_out}"
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
        replace_for_good("sharded modules", layer, __class__=cls)


def _strip(attributes: dict[str, Any], traces: ShardingArtifacts) -> None:
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


def _is_foreign(function: Any, traces: ShardingArtifacts) -> bool:
    function = getattr(function, "func", function)  # of a partial
    name = str(getattr(function, "__module__", ""))
    return any(name == package or name.startswith(f"{package}.") for package in traces.packages)


def find_ties(model: nn.Module) -> dict[str, str]:
    """Return alias to kept name for parameters that stand under several names; the first name is kept.

    Ask before FSDP1 shards: its flat parameters hide which name is which.
    """
    kept: dict[nn.Parameter, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in kept:
            ties[name] = kept[parameter]
        else:
            kept[parameter] = name
    return ties


# ------------------------------------------------------------------------------------------------
# Extra states of modules in state dicts: ``get_extra_state``.


NAME = "_extra_state"
"""Its last part in a state dict. Source: torch 2.13 ``torch/nn/modules/module.py``."""


def is_extra_state(name: str) -> bool:
    """Return whether a state dict's entry is none of the module's tensors."""
    return name == NAME or name.endswith(f".{NAME}")


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module has one of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return all of them, by their plain names in a state dict."""
    return {name: one.get_extra_state() for name, one in _modules_with_one(module)}


def load_extra_states(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules back what ``state`` has of theirs, by plain names."""
    for name, one in _modules_with_one(module):
        if name in state:
            one.set_extra_state(state[name])


def _modules_with_one(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, one in module.named_modules():
        if has_extra_state(one):
            yield clean_name(f"{name}.{NAME}" if name else NAME), one


# ------------------------------------------------------------------------------------------------
# Lightning's callbacks that would silently be wrong, or fail obscurely, with a sharded model.


PRUNING = (
    "replaces parameters with masked tensors, which are neither sharded nor known to optimizers. "
    "Prune the merged weights after training, or use Trainer(strategy='ddp')."
)


def check_callbacks(callbacks: Iterable[object], refused: Mapping[str, str]) -> None:
    """Check that callbacks can work with a strategy, before it trains.

    Args:
        callbacks: The Trainer's.
        refused: Names of Lightning's classes, and what each does, with what to do instead.

    Raises:
        ValueError: If one of them is of such a class.
    """
    for callback in callbacks:
        lightnings = {cls.__name__ for cls in type(callback).__mro__ if cls.__module__.split(".")[0] != "accelight"}
        for name in lightnings & set(refused):
            raise ValueError(f"{type(callback).__name__} {refused[name]}")


def sparse_embeddings(model: nn.Module) -> Iterator[str]:
    """Yield what to say of each embedding that is trained with sparse gradients.

    Args:
        model: Not sharded yet.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            yield (
                f"{clean_name(name)}: {type(module).__name__}(sparse=True) has sparse gradients, which cannot be "
                "reduced into shards. Remove sparse=True, or train with Trainer(strategy='ddp')."
            )


SHARDED_FORM = "_accelight_sharded_form"
"""Attribute of a module that FSDP has sharded."""
_INSTEAD = (
    "Build a new module. To continue from the trained state, use fit(ckpt_path=...) with a full checkpoint, or "
    "merged weights (merge_fsdp_weights)."
)


def refuse_module_of_fsdp(module: nn.Module) -> None:
    """Refuse a module that FSDP has sharded.

    Raises:
        RuntimeError: If it is one.
    """
    if SHARDED_FORM in module.__dict__:
        raise RuntimeError(
            f"{type(module).__name__} is already sharded with FSDP, and DeepSpeed cannot use it. {_INSTEAD}"
        )


def refuse_module_of_stage_3(module: nn.Module) -> None:
    """Refuse a module whose parameters DeepSpeed has partitioned.

    Raises:
        RuntimeError: If it is one.
    """
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} is already partitioned with DeepSpeed's stage 3, and FSDP cannot use it. "
            f"{_INSTEAD}"
        )
