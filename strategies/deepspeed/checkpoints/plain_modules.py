"""Modules among the hyperparameters, a loss for instance, saved as they were before DeepSpeed put its hooks on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FROM = ("deepspeed", "accelight")
_ADDED = {"applied_pre_backward_ref_cnt", "_external_params", "_original_parameters"}
"""What DeepSpeed's stage 3 adds to layers, beside functions and what is called ``ds_...``."""


@contextmanager
def plain_modules(state: Mapping[str, Any]) -> Iterator[None]:
    """Let the modules in ``state`` be pickled inside this context; a module that is trained is the same object there.

    Args:
        state: The Trainer's checkpoint. Looked into are dicts, lists and tuples.

    Raises:
        ValueError: If such a module has parameters that are partitioned, which nobody could load.
    """
    layers = {layer: path for path, module in _modules(state) for layer in module.modules()}
    before = {layer: dict(vars(layer)) for layer in layers}
    for layer, path in layers.items():
        if any(hasattr(parameter, "ds_id") for parameter in layer.parameters(recurse=False)):
            raise ValueError(
                f"{path} is saved in the checkpoint and holds parameters that ZeRO-3 has partitioned ({path}: "
                f"{type(layer).__name__}): it would be saved without their values. Leave it out of what is saved "
                "beside the weights: save_hyperparameters(ignore=[...])."
            )
    try:
        for layer in layers:
            _strip(vars(layer))
        yield
    finally:
        for layer, attributes in before.items():
            vars(layer).clear()
            vars(layer).update(attributes)


def _modules(value: Any, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _modules(one, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _modules(one, f"{path}[{index}]")


def _strip(attributes: dict[str, Any]) -> None:
    attributes["_parameters"] = dict(attributes.get("_original_parameters", attributes["_parameters"]))
    for name, value in list(attributes.items()):
        if name.startswith("ds_") or name in _ADDED or (callable(value) and _is_foreign(value)):
            del attributes[name]
        elif isinstance(value, torch.Tensor) and not value.is_leaf:  # a metric keeps the loss, with the engine's hooks
            attributes[name] = value.detach()
    foreign = {key for name in _HOOKS for key, hook in attributes[name].items() if _is_foreign(hook)}
    for name, found in attributes.items():
        if "_hooks" in name and isinstance(found, dict):
            attributes[name] = type(found)((key, one) for key, one in found.items() if key not in foreign)


def _is_foreign(function: Any) -> bool:
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__module__", "")).split(".")[0] in _FROM
