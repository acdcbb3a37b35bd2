"""Optimizers that would train something else than one process trains: refused, by name, before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...upstream.lightning import _MockOptimizer
from .fsdp1_units import units_of

_ELEMENT_BY_ELEMENT = {
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop", "SparseAdam",
}  # fmt: skip
_WHOLE_PARAMETERS = {
    "Adafactor", "Muon", "Lamb", "LAMB", "Lars", "LARS", "Shampoo", "DistributedShampoo", "SOAP", "CAME", "Adalomo",
    "Lomo",
}  # fmt: skip
_NOT_FOR_DTENSORS = {"Adafactor", "Rprop"}
"""Their steps in torch 2.13 call operations that have no meaning for DTensors, and end in the middle."""


def check_kinds(optimizers: Iterable[Optimizer], version: int) -> None:
    """Refuse optimizers whose step needs more than an element and its gradient, where parameters are cut up.

    FSDP2's parameters know that they are shards (DTensors), so that norms and means over them are right; those of FSDP1
    are pieces without a shape.

    Args:
        optimizers: That will train.
        version: Of FSDP.

    Raises:
        ValueError: If an optimizer is known to be wrong or to fail. One that nobody knows gets a warning with FSDP1.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, _MockOptimizer):  # configure_optimizers() returned None
            continue
        names = {cls.__name__ for cls in type(optimizer).__mro__}
        called = type(optimizer).__name__
        if "LBFGS" in names:
            raise ValueError(
                f"{called} needs scalar products over all parameters, and sees this rank's shards alone with FSDP. Use "
                "another optimizer, or train with Trainer(strategy='ddp')."
            )
        if version != 1:
            torchs = {cls.__name__ for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim")}
            if torchs & _NOT_FOR_DTENSORS:
                raise ValueError(
                    f"{called} cannot step FSDP2's parameters: torch's {', '.join(torchs & _NOT_FOR_DTENSORS)} does "
                    "not know DTensors. Use another optimizer (AdamW, SGD), or train with Trainer(strategy='ddp')."
                )
            continue
        if names & _WHOLE_PARAMETERS:
            raise ValueError(
                f"{called} looks at full parameters, and FSDP1 gives it pieces of flattened ones: the result would be "
                "another. Use fsdp_version=2 if it knows DTensors, or an optimizer that works element by element "
                "(AdamW, SGD)."
            )
        if not names & _ELEMENT_BY_ELEMENT:
            warnings.warn(
                f"{called} gets pieces of flattened parameters from FSDP1. It is right if it works element by element "
                "as SGD and AdamW do. If it looks at a parameter's shape, norm or mean, use fsdp_version=2.",
                stacklevel=2,
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
