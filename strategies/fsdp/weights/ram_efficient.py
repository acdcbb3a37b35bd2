"""RAM-efficient loading: rank 0's weights taken out of the model before it is sharded, to be sent afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..units.named_tensors import slots_of, swap_for_empty


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
    for slot in slots_of(model):
        if keep:
            into = taken.state_dict if slot.persistent else taken.buffers
            into[slot.name] = slot.tensor.detach()
        if not slot.tensor.is_meta:
            swap_for_empty(slot.tensor, torch.device("meta"))
    return taken
