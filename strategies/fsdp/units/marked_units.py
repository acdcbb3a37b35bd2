"""``wrap(module)`` of torch inside ``configure_model()``: the module becomes a unit, when the model is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import enable_wrap

_ATTRIBUTE = "_accelight_marked_unit"


@contextmanager
def marking_units() -> Iterator[None]:
    """Let ``torch.distributed.fsdp.wrap.wrap`` mark modules instead of wrapping them."""
    with enable_wrap(wrapper_cls=_mark):
        yield


def is_marked(module: nn.Module) -> bool:
    """Return whether the user called ``wrap`` on ``module``."""
    return bool(module.__dict__.get(_ATTRIBUTE, False))


def _mark(module: nn.Module, **options: Any) -> nn.Module:
    if options:
        raise TypeError(
            f"wrap({type(module).__name__}(...), {', '.join(sorted(options))}=...): under AccelFSDPStrategy wrap() "
            "chooses units, and takes no options. Give these to the strategy."
        )
    module.__dict__[_ATTRIBUTE] = True
    return module
