"""The fp32 weights of an engine that computes in 16 bits, handed to the next engine on the same module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import partitions


class MasterWeights:
    """The fp32 weights that an engine had beside the 16-bit ones, for the engine after it."""

    def __init__(self) -> None:
        self._pieces: dict[nn.Parameter, tuple[int, Tensor]] = {}

    def keep(self, engine: Any) -> None:
        """Keep this rank's part of an engine's fp32 weights."""
        zero = engine.optimizer
        if not partitions.is_partitioned_optimizer(zero):
            return
        flats = partitions.masters(zero)
        for piece in partitions.pieces(zero):
            if piece.parameter.dtype != flats[piece.group].dtype:
                self._pieces[piece.parameter] = piece.start, piece.of(flats[piece.group].detach())

    @torch.no_grad()
    def give(self, engine: Any) -> None:
        """Hand them to the next engine, parameter by parameter; every rank must call it.

        A weight that has changed since, for example by ``load_state_dict()`` on the module, keeps its new value.
        """
        zero = engine.optimizer
        known = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(known, bool(self._pieces))
        if not any(known) or not partitions.is_partitioned_optimizer(zero):
            return
        masters, weights = partitions.masters(zero), partitions.computing_weights(zero)
        mine = {piece.parameter: piece for piece in partitions.pieces(zero)}
        for parameter in (each for group in partitions.parameter_groups(zero) for each in group):
            numel = int(getattr(parameter, "ds_numel", parameter.numel()))
            shared = torch.zeros(2, numel, device=engine.device)  # the values, and where there are any
            if parameter in self._pieces:
                start, values = self._pieces[parameter]
                shared[0, start : start + values.numel()] = values.to(shared.device)
                shared[1, start : start + values.numel()] = 1
            torch.distributed.all_reduce(shared)
            piece = mine.get(parameter)
            lowered = None if piece is None else weights[piece.group]
            if piece is None or lowered is None:
                continue
            values, given = shared[:, piece.start : piece.start + piece.numel]
            now = piece.of(lowered)
            kept = (given > 0) & (values.to(now.dtype) == now.to(values.device))
            master = piece.of(masters[piece.group].detach())
            master.copy_(torch.where(kept, values.to(master.dtype), master.to(values.device)))
