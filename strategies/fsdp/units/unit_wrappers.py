"""What is done to the units before they are sharded: activation checkpointing, and around that `torch.compile`.

The outermost wrapper becomes the unit. With sharding outside, the parameters that backward has gathered serve the
recomputation too, and no compiled graph is broken by the hooks that gather. Wrapper names never reach a state dict.
Compiling wraps nothing: modules keep their classes, and parameters their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import CheckpointError

from ....checkpoint.names import WRAPPER_NAMES
from ...upstream.torch_core import ActivationWrapper


def checkpoint_units(model: nn.Module, units: list[nn.Module], *, offload: bool = False) -> list[nn.Module]:
    """Put a checkpoint wrapper around each unit inside ``model`` and return the wrappers, in the same order.

    Args:
        model: The root.
        units: Children before parents.
        offload: Keep what a wrapper saves, the unit's inputs, in host memory until backward.

    Raises:
        ValueError: If there is no unit.

    Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``fsdp2_apply_ac``), which offloads with FSDP2 alone.
    """
    _require_units(units, "activation_checkpointing=True recomputes")
    return checkpoint_modules(model, units, units, offload=offload)


def checkpoint_modules(
    model: nn.Module, modules: list[nn.Module], units: list[nn.Module], *, offload: bool = False
) -> list[nn.Module]:
    """Put a checkpoint wrapper around any modules inside ``model``; return the units, some of them in wrappers now.

    Args:
        model: The root.
        modules: What is recomputed, children before parents.
        units: Children before parents.
        offload: As for units.

    Raises:
        ValueError: If there is no module to recompute.
    """
    from ...upstream.torch_core import CheckpointWrapper, checkpoint_wrapper, offload_wrapper

    def wrapper(unit: nn.Module) -> nn.Module:
        checkpointed = unit if isinstance(unit, CheckpointWrapper) else checkpoint_wrapper(unit)
        return offload_wrapper(checkpointed) if offload else checkpointed

    if not modules:
        raise ValueError(
            f"activation_checkpointing_policy chooses no module of {type(model).__name__}. Give classes of modules "
            "that are in it, or a policy that is true of some."
        )
    wrappers = _wrap(model, modules, wrapper)
    return [wrappers.get(unit, unit) for unit in units]


def explained_recomputation(error: BaseException) -> RuntimeError | None:
    """Return what to raise where torch recomputes something else than it computed."""
    if not isinstance(error, CheckpointError):
        return None
    return RuntimeError(
        "What activation checkpointing recomputes is not what the forward computed. As a rule, parameters were "
        "frozen or thawed between training_step() and its backward (in on_before_zero_grad or on_before_backward); "
        "or the forward is not the same twice. Freeze before training_step(), or do without "
        f"activation_checkpointing. torch says: {str(error).partition('.')[0]}."
    )


def compile_units(units: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Let the ``forward`` of each unit be compiled at its first call.

    Not the whole call, as ``unit.compile()`` would: the hooks by which FSDP2 gathers belong to it, and would break each
    graph.

    Args:
        units: The units, in their wrappers.
        options: Keyword arguments of `torch.compile`.

    Raises:
        ValueError: If there is no unit.
    """
    units = list(units)
    _require_units(units, "compile compiles")
    for unit in units:
        compiled: Any = _traceable(unit)
        compiled.forward = torch.compile(compiled.forward, **options)


def hide_wrapper_names(root: nn.Module) -> None:
    """Let ``named_parameters()`` and ``named_modules()`` of users' code have the names that the model had.

    A wrapper stands under the name of what it wraps. torch's wrappers add a component of their own to every name.
    """
    for module in list(root.modules()):
        if _can_be_hidden(module):
            module.__dict__["named_modules"] = partial(_named_modules, module)


@contextmanager
def without_wrappers(root: nn.Module) -> Iterator[None]:
    """Register modules without their wrappers in this context: their classes, names and children are the original ones.

    A wrapper below a unit of FSDP1 with a flat parameter stays: the flat parameter is the wrapper's.
    """
    places = [
        (parent, name, child)
        for parent in list(root.modules())
        if not isinstance(parent, FullyShardedDataParallel | ActivationWrapper)
        for name, child in parent._modules.items()
        if child is not None and _can_be_hidden(child)
    ]
    for parent, name, child in places:
        parent._modules[name] = _wrapped(child)
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _wrapped(module: nn.Module) -> nn.Module:
    while _can_be_hidden(module):
        module = next(module.children())
    return module


def _can_be_hidden(module: nn.Module) -> bool:
    """Return whether a module stands for the one that it wraps; flat parameters are the wrapper's own."""
    if isinstance(module, FullyShardedDataParallel):
        return bool(module._use_orig_params)
    return isinstance(module, ActivationWrapper)


def _named_modules(
    wrapper: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    memo = set() if memo is None else memo
    if wrapper in memo:
        return
    if remove_duplicate:
        memo.add(wrapper)
    yield prefix, wrapper
    for name, child in wrapper._modules.items():
        if child is not None:
            inner = f"{prefix}.{name}".lstrip(".")
            yield from child.named_modules(memo, prefix if name in WRAPPER_NAMES else inner, remove_duplicate)


def _traceable(unit: nn.Module) -> nn.Module:
    """Return what of a unit can be one graph: all of it, unless it moves activations to host memory and back."""
    from ...upstream.torch_core import OffloadWrapper

    if not isinstance(unit, OffloadWrapper):
        return unit
    while isinstance(unit, ActivationWrapper):
        unit = unit._checkpoint_wrapped_module
    return unit


def _require_units(units: list[nn.Module], doing: str) -> None:
    if not units:
        raise ValueError(
            f"{doing} unit by unit, but the wrap policy makes no unit. "
            "Set auto_wrap_policy='transformer_based_wrap' (or 'size_based_wrap')."
        )


def _wrap(
    model: nn.Module, modules: list[nn.Module], wrapper: Callable[[nn.Module], nn.Module]
) -> dict[nn.Module, nn.Module]:
    wrappers = {module: wrapper(module) for module in modules}
    made = set(wrappers.values())
    for parent in list(model.modules()):
        if parent in made:
            continue
        for name, child in list(parent._modules.items()):  # named_children() shows a child under two names once
            if child is not None and child in wrappers:
                parent._modules[name] = wrappers[child]
    return wrappers
