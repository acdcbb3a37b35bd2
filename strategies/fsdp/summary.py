"""Lightning's ``ModelSummary`` of a sharded module: what it would print of the module that was not.

The callback counts in ``on_fit_start``, when the module is sharded: FSDP1's modules have this process's part of their
parameters, or none, and FSDP's wrappers among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from typing_extensions import override

from ...checkpoint.names import clean_name
from ..upstream.lightning import LayerSummary, LightningModule, ModelSummary, Summary, Trainer
from .engines.fsdp2_units import own_class
from .whole_parameters import WholeParameters


def summarise_whole(callbacks: Iterable[object], root: nn.Module) -> None:
    """Let the summaries among ``callbacks``, Rich's too, count whole parameters in the fit that begins.

    Args:
        callbacks: The Trainer's.
        root: The sharded module.
    """
    for callback in callbacks:
        if isinstance(callback, ModelSummary):
            vars(callback)["_summary"] = partial(_summary, callback, root)


def let_go(callbacks: Iterable[object]) -> None:
    """Let the summaries be Lightning's again: nothing is to keep the module."""
    for callback in callbacks:
        if isinstance(callback, ModelSummary):
            vars(callback).pop("_summary", None)


def _summary(callback: ModelSummary, root: nn.Module, trainer: Trainer, module: LightningModule) -> Summary:
    vars(callback).pop("_summary", None)
    return _WholeSummary(module, WholeParameters(root), max_depth=callback._max_depth)


class _WholeLayer(LayerSummary):
    def __init__(self, module: nn.Module, parameters: WholeParameters) -> None:
        self._parameters = parameters
        super().__init__(module)

    @property
    @override
    def layer_type(self) -> str:
        return own_class(self._module).__name__

    @property
    @override
    def num_parameters(self) -> int:
        return sum(one.numel for one in self._parameters.of(self._module))


class _WholeSummary(Summary):
    def __init__(self, model: LightningModule, parameters: WholeParameters, max_depth: int) -> None:
        self._parameters = parameters
        super().__init__(model, max_depth=max_depth)

    def _modules(self) -> dict[str, nn.Module]:
        """Return the modules by name without wrappers, the root left out."""
        named = {clean_name(name): module for name, module in self._model.named_modules()}  # the innermost is the last
        return {name: module for name, module in named.items() if name}

    @property
    @override
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        if self._max_depth == 0:
            return []
        return [(name, one) for name, one in self._modules().items() if self._max_depth != 1 or "." not in name]

    @override
    def summarize(self) -> dict[str, LayerSummary]:
        rows: dict[str, LayerSummary] = {
            name: _WholeLayer(module, self._parameters) for name, module in self.named_modules
        }
        if self._model.example_input_array is not None:
            self._forward_example_input()
        for row in rows.values():
            row.detach_hook()
        return {name: row for name, row in rows.items() if self._max_depth < 1 or name.count(".") < self._max_depth}

    @property
    @override
    def total_training_modes(self) -> dict[str, int]:
        modes = [module.training for module in {id(one): one for one in self._modules().values()}.values()]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    @override
    def total_parameters(self) -> int:
        return sum(one.numel for one in self._parameters.of(self._model))

    @property
    @override
    def trainable_parameters(self) -> int:
        return sum(one.numel for one in self._parameters.of(self._model) if one.is_trained)

    @property
    @override
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        counts = {clean_name(name): found for name, found in self._flop_counter.get_flop_counts().items()}
        return {name: counts.get(f"{type(self._model).__name__}.{name}", {}) for name in self.layer_names}
