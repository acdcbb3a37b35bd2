"""torch's state dicts of a sharded model, with what modules keep beside tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from ...common.extra_states import NAME, has_extra_state


def model_state_dict(module: nn.Module, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return what torch has of a sharded model."""
    with _findable_extra_states(module):
        return cast("dict[str, Any]", get_model_state_dict(module, options=options))


def load_model_state_dict(module: nn.Module, state: dict[str, Any], *, strict: bool = True) -> None:
    """Let torch load a state dict of a sharded model."""
    with _findable_extra_states(module):
        set_model_state_dict(module, state, options=StateDictOptions(strict=strict))


@contextmanager
def _findable_extra_states(module: nn.Module) -> Iterator[None]:
    """Let torch's functions for state dicts find them inside of FSDP1's wrappers.

    They follow each name to what it names, and look for an attribute of this one's there (torch 2.13
    ``distributed/checkpoint/state_dict.py``, ``_get_fqns``).
    """
    with ExitStack() as stack:
        for one in module.modules():
            if has_extra_state(one) and NAME not in vars(one):
                vars(one)[NAME] = None
                stack.callback(partial(vars(one).pop, NAME))
        yield
