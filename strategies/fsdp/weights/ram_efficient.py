"""RAM-efficient loading: rank 0's weights taken out of the model before it is sharded, to be sent afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..units.named_tensors import named_tensors, swap_for_empty


@dataclass(frozen=True)
class TakenWeights:
    """What rank 0 held; empty elsewhere."""

    state_dict: dict[str, Tensor] = field(default_factory=dict)
    """For `fsdp2_load_full_state_dict`."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Non-persistent ones, for its ``buffers_from``."""


def take_weights(model: nn.Module, *, keep: bool) -> TakenWeights:
    """Put all of ``model``, not sharded yet, on the meta device; parameters stay the same objects.

    Args:
        model: With values on the rank that keeps them.
        keep: Whether to return the values (rank 0); otherwise their memory is given back.
    """
    taken = TakenWeights()
    for named in named_tensors(model):
        if keep:
            into = taken.state_dict if named.persistent else taken.buffers
            into[named.name] = named.tensor.detach()
        if not named.tensor.is_meta:
            swap_for_empty(named.tensor, torch.device("meta"))
    return taken
