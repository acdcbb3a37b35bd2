"""What modules keep beside tensors in their state dicts: ``get_extra_state``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ...checkpoint.names import clean_name

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
