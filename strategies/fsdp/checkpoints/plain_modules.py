"""What FSDP leaves on modules, for those that are saved among the hyperparameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from ...common.plain_modules import Traces
from ..engines.fsdp2_units import own_class

_ADDED = ("_fsdp_", "_is_fsdp_", "__composable_api_")
"""How the names of torch's marks begin, of FSDP1 and FSDP2."""


def _restore(attributes: dict[str, Any]) -> None:
    for name in list(attributes):
        if name.startswith(_ADDED):
            del attributes[name]


def traces_of(sharded: Collection[nn.Module]) -> Traces:
    """Return what to take off, where ``sharded`` are the modules with parameters of their own in shards."""
    return Traces(
        packages=("torch.distributed", "torch._dynamo", "accelight"),
        restore=_restore,
        own_class=own_class,
        holds_shards=sharded.__contains__,
        told="FSDP has sharded",
        way_out=" Or keep it out of the shards: AccelFSDPStrategy(ignored_modules=...).",
    )
