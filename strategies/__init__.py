"""Strategies for Lightning's Trainer. Importing this makes their names known to ``Trainer(strategy="...")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .registration import register_strategies

if TYPE_CHECKING:
    from .fsdp import AccelFSDPStrategy, FullyShardedDataParallelPlugin

__all__ = ["AccelFSDPStrategy", "FullyShardedDataParallelPlugin"]


def __getattr__(name: str) -> Any:  # the plugins must import without Lightning
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import fsdp

    return getattr(fsdp, name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_strategies()
