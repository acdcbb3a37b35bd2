"""The small interface behind which FSDP1 and FSDP2 differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from .activation_checkpointing import checkpoint_units
from .original_model import find_ties, module_attribute_of
from .root import ShardedForm, recall_form, remember_form
from .settings import EngineSettings
from .wrapping import resolve_ignored, units_to_wrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SettingsT = TypeVar("SettingsT", bound=EngineSettings)


class Engine(ABC, Generic[SettingsT]):
    """Shards a model and knows what only its version of FSDP knows.

    Args:
        settings: What the plugin resolved to.
        mesh: One-dimensional (shard) or two-dimensional (replicate, shard) mesh over all ranks.
        device: Where this rank computes.
    """

    version: ClassVar[int]
    """The number users know: 1 or 2."""
    model_key: ClassVar[str]
    """Key of the weights in a sharded checkpoint, as Lightning's strategy for the same FSDP version names it."""

    def __init__(self, settings: SettingsT, mesh: DeviceMesh, device: torch.device) -> None:
        self.settings = settings
        self.mesh = mesh
        self.device = device

    def prepare(self, model: nn.Module) -> ShardedForm:
        """Shard ``model``, whose submodules are changed in place.

        A module that comes back (validation after training) keeps the form it has.

        Raises:
            RuntimeError: If ``model`` is sharded by the other FSDP version.
            ValueError: If the wrap policy or the ignored modules do not fit ``model``.
        """
        form = recall_form(model, self.version)
        if form is None:
            ignored = resolve_ignored(model, self.settings.ignored_modules)
            for module in ignored:  # sharding moves what it manages; the rest is ours to move
                _move_own_tensors(module, self.device)
            unsharded = frozenset(parameter for module in ignored for parameter in module.parameters())
            ties, attribute = find_ties(model), module_attribute_of(model)
            units = [module for _, module in units_to_wrap(model, self.settings.wrap, ignored)]
            if self.settings.activation_checkpointing:
                units = checkpoint_units(model, units)
            if not self.settings.reshard_during_accumulation:
                rank_zero_info(_memory_estimate(model))
            root = self._shard(model, units, ignored)
            form = ShardedForm(root, self.version, ties, attribute, unsharded)
            remember_form(model, form)
        return form

    @abstractmethod
    def _shard(self, model: nn.Module, units: list[nn.Module], ignored: set[nn.Module]) -> nn.Module:
        """Shard ``units`` (children before parents), then what is left as the root's unit."""

    @abstractmethod
    def reshard(self, root: nn.Module) -> None:
        """Leave no unit gathered, so that ``root.parameters()`` are the sharded ones that optimizers must hold."""

    @abstractmethod
    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        """Accumulate gradients locally inside this context: nothing is reduced."""

    @abstractmethod
    def clip_grad_norm(
        self, root: nn.Module, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``; return the norm before, a scalar."""

    @abstractmethod
    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the gradient scaler for fp16 that agrees on overflows over all ranks."""

    @abstractmethod
    def state_dict_module(self, root: nn.Module) -> nn.Module:
        """Return the module to hand to ``torch.distributed.checkpoint.state_dict``, whose names are the plain ones."""


def _memory_estimate(model: nn.Module) -> str:
    num_bytes = sum(
        parameter.numel() * parameter.element_size() * (2 if parameter.requires_grad else 1)
        for parameter in model.parameters()
    )
    return (
        "reshard_during_accumulation=False: the unsharded parameters and gradients take up to "
        f"{num_bytes / 1e9:.2f} GB on each process while gradients accumulate."
    )


def _move_own_tensors(module: nn.Module, device: torch.device) -> None:
    """Move what has values; what is on the meta device gets memory with its values, later."""
    for parameter in module.parameters(recurse=False):
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        if not buffer.is_meta:
            module._buffers[name] = buffer.to(device)
