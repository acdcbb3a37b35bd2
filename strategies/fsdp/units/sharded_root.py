"""The sharded root of a module, found again when the same module comes back (validate after fit, a second fit)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...common.sharded_elsewhere import SHARDED_FORM, refuse_module_of_stage_3
from .optimizer_parameters import EarlyParameters


class ShardedRoot(nn.Module):
    """Calls its one child; FSDP2 hooks its root unit here.

    Lightning sends ``training_step`` through ``forward`` of the outermost module. Were the LightningModule itself
    the FSDP2 root, ``self(x)`` inside ``training_step`` would enter the root's hooks a second time.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module.

        Raises:
            RuntimeError: If weights are used outside of the ``forward`` that they are gathered for.
        """
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            instead = explained_mixture(error)
            if instead is None:
                raise
            raise instead from error


def explained_mixture(error: BaseException) -> RuntimeError | None:
    """Return what to raise where sharded weights (DTensors) of FSDP2 met plain tensors, which torch refuses."""
    if not isinstance(error, RuntimeError) or "mixed torch.Tensor and DTensor" not in str(error):
        return None
    return RuntimeError(
        "Sharded weights (DTensors) met plain tensors in a step. As a rule, a weight of a module that is gathered "
        "on its own was used past the module's forward: something inside of it, or another method, was called, or "
        "somebody read the weight (a fused loss that reads the output head's, a penalty). Call the module, or "
        "leave it to the root's unit: give auto_wrap_policy a policy object such as ModuleWrapPolicy({Block}), "
        "which wraps nothing else. For a penalty, use weight_decay or parameter.full_tensor()."
    )


def inside_root(root: nn.Module) -> nn.Module:
    """Return the module whose names are the plain ones."""
    return root.module if isinstance(root, ShardedRoot) else root


@dataclass(frozen=True)
class ShardedForm:
    """What sharding made of a module, and what it hid."""

    root: nn.Module
    """The outermost sharded module."""
    has_root_unit: bool
    """Whether it is a unit, gathered around a whole step; else its parts are, see `parts_called_alone`."""
    version: int
    """FSDP version."""
    ties: Mapping[str, str]
    """Tied parameters before sharding, alias to kept name."""
    module_attribute: str | None
    """Attribute that held the whole model, see `module_attribute_of`."""
    unsharded: frozenset[nn.Parameter]
    """Parameters of ignored modules: unsharded, their gradients reduced by nobody but us."""
    order: Mapping[str, int]
    """Each parameter's place in ``parameters()`` before sharding, see `parameter_order`."""
    early: EarlyParameters
    """The parameters as they were, for optimizers made before sharding."""


def remember_form(module: nn.Module, form: ShardedForm) -> None:
    """Note on ``module`` what it was sharded into."""
    # Past nn.Module.__setattr__, which would register the root as a child of its own child.
    module.__dict__[SHARDED_FORM] = form


def recall_form(module: nn.Module, version: int) -> ShardedForm | None:
    """Return what ``module`` was sharded into, or None if it has not been sharded.

    Raises:
        RuntimeError: If it was sharded by the other FSDP version, or by DeepSpeed.
    """
    refuse_module_of_stage_3(module)
    form: ShardedForm | None = module.__dict__.get(SHARDED_FORM)
    if form is not None and form.version != version:
        raise RuntimeError(
            f"{type(module).__name__} is already sharded with FSDP{form.version} and cannot be sharded again with "
            f"FSDP{version}. Build a new module, or keep fsdp_version={form.version}."
        )
    return form
