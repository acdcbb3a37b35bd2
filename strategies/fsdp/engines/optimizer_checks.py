"""Optimizers that would train something else than one process trains: refused, by name, before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim import Optimizer

from ...common.optimizer_classes import try_on_dtensors, try_on_pieces
from ...upstream.lightning import _MockOptimizer
from ...upstream.torch_fake import is_planned
from .fsdp1_units import units_of


def check_kinds(optimizers: Iterable[Optimizer], version: int, mesh: DeviceMesh) -> None:
    """Refuse optimizers whose class trains shards otherwise than full parameters; every rank calls it.

    FSDP2's parameters know that they are shards (DTensors), so that norms and means over them are right, in classes
    whose operations DTensors have. Those of FSDP1 are pieces without a shape: a class must treat each element alone.

    Args:
        optimizers: That will train.
        version: Of FSDP.
        mesh: Over which parameters are sharded.

    Raises:
        ValueError: If one does; on every rank.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, _MockOptimizer) or is_planned():  # configure_optimizers() returned None; no values
            continue
        called = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"{called} needs scalar products over all parameters, and sees this rank's shards alone with FSDP. Use "
                "another optimizer, or train with Trainer(strategy='ddp')."
            )
        if version == 1:
            if problem := try_on_pieces(optimizer).problem:
                raise ValueError(
                    f"{called} cannot train with FSDP1, which gives optimizers pieces of flattened parameters: "
                    f"{problem}. Use fsdp_version=2, whose parameters keep their shapes, if {called} knows DTensors; "
                    "an optimizer that works element by element (AdamW, SGD); or Trainer(strategy='ddp')."
                )
        elif problem := try_on_dtensors(optimizer, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)]).problem:
            others = "fsdp_version=1, which needs no DTensors; " if try_on_pieces(optimizer).problem is None else ""
            raise ValueError(
                f"{called} cannot train with FSDP2, whose parameters are DTensors: {problem}. Use {others}another "
                "optimizer (AdamW, SGD); or Trainer(strategy='ddp')."
            )


def check_flat_parameters(root: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers over flat parameters unless they plainly hold all of them, each in one group.

    A module's ``parameters()`` leaves out what lies in a flat parameter elsewhere, and groups by name or dimension sort
    flat parameters, whatever is in them. What was meant cannot be told.

    Args:
        root: Sharded with ``use_orig_params=False``.
        optimizers: That will train.

    Raises:
        ValueError: If trainable parameters are in no optimizer, or an optimizer has several groups.
    """
    optimizers = [one for one in optimizers if not isinstance(one, _MockOptimizer)]
    held = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    flat: list[Any] = [unit._handle.flat_param for unit in units_of(root)]
    left_out = [name for one in flat if one.requires_grad and one not in held for name in one._fqns]
    grouped = next((one for one in optimizers if len(one.param_groups) > 1), None)
    if optimizers and (left_out or grouped is not None):
        what = (
            f"{type(grouped).__name__} has {len(grouped.param_groups)} groups"
            if grouped is not None
            else f"no optimizer holds the flat parameters of {', '.join(left_out)}"
        )
        raise ValueError(
            f"With use_orig_params=False optimizers see one flat parameter for each unit, and {what}: this may not be "
            "what was meant. Set use_orig_params=True (the default), or give the optimizers all of self.parameters(), "
            "each in one group, and freeze what is not trained."
        )
