"""PEFT's adapters in checkpoints: the tensors of one adapter, and the base's with an adapter merged into them."""

from __future__ import annotations

import copy
import json
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import CheckpointError, brief
from .formats.base import Source
from .manifest import Adapter, Manifest
from .names import Selection, clean_name, select

if TYPE_CHECKING:
    import torch

_INNER = "base_model.model."
"""PEFT puts the model that it adapts there."""
_BASE, _SAVED, _ORIGINAL = "base_layer.", ".modules_to_save.", ".original_module."
_BY_PEFT = (
    "Write the adapter's folder instead (adapter=True, --adapter), load it with PEFT, and call merge_and_unload()."
)


def find_adapter(manifest: Manifest | None, adapter: str) -> tuple[str, Adapter]:
    """Return the name that PEFT has for an adapter, and the adapter.

    Args:
        manifest: The checkpoint's own, which describes its adapters.
        adapter: Its name; empty for the only one.

    Raises:
        CheckpointError: If there is no such adapter.
    """
    known = {} if manifest is None else manifest.adapters
    if not known:
        raise CheckpointError(
            "The checkpoint describes no adapters of PEFT. accelight's strategies do so when they save a module with a "
            "PeftModel in a sharded checkpoint."
        )
    if not adapter and len(known) > 1:
        raise CheckpointError(f"The checkpoint has several adapters: {sorted(known)}. Name one of them.")
    if adapter and adapter not in known:
        raise CheckpointError(f"There is no adapter {adapter!r}; the checkpoint has {sorted(known)}. Name one of them.")
    name = adapter or next(iter(known))
    return name.rpartition(".")[2], known[name]


def select_adapter(source_names: Sequence[str], manifest: Manifest | None, adapter: str) -> Selection:
    """Decide what of an adapter is written under which name.

    Args:
        source_names: Names in the model, wrappers still in place.
        manifest: The checkpoint's own.
        adapter: Its name; empty for the only one.

    Raises:
        CheckpointError: If there is no such adapter, or it is not in the checkpoint.
    """
    _, chosen = find_adapter(manifest, adapter)
    present = {clean_name(name): name for name in source_names}
    ties = {} if manifest is None else manifest.ties
    names = {name: present.get(source) or present.get(ties.get(source, "")) for name, source in chosen.names.items()}
    missing = sorted(name for name, source in names.items() if source is None)
    if missing:
        raise CheckpointError(f"The checkpoint lacks {brief(missing)} of the adapter.")
    written = {name: source for name, source in names.items() if source is not None}
    return Selection(written, skipped=dict.fromkeys(set(source_names) - set(written.values()), "not of the adapter"))


# ------------------------------------------------------------------------------------------------
# Merging: PEFT itself computes the weights, one layer after the other, so every kind of adapter that it merges into a
# layer comes out as its merge_and_unload() gives it, and one layer is in memory.


@dataclass
class _Layer:
    """A layer that is adapted, at its place in the model."""

    path: str
    tensors: dict[str, str] = field(default_factory=dict)
    """Name in PEFT's layer to name in the source: of the base layer and of the adapter."""


def merged_tensors(
    source: Source, manifest: Manifest | None, adapter: str
) -> tuple[Selection, dict[str, Callable[[], torch.Tensor]]]:
    """Decide under which names the base's tensors are written, and which of them an adapter changes.

    Args:
        source: The checkpoint, with the base's weights.
        manifest: The checkpoint's own.
        adapter: The adapter's name; empty for the only one.

    Returns:
        What is written, and by name in the output what computes those that the adapter changes.

    Raises:
        CheckpointError: If there is no such adapter, the base is not in the checkpoint, or the adapter has more than
            PEFT merges into layers.
        ModuleNotFoundError: Without peft.
    """
    name, chosen = find_adapter(manifest, adapter)
    if manifest is not None and manifest.left_out:
        raise CheckpointError(
            f"The checkpoint has no base to merge the adapter into: it was saved with save_trainable_only. {_BY_PEFT}"
        )
    everything = select(list(source.tensors), manifest)
    head = next((one.partition(_INNER)[0] + _INNER for one in chosen.names.values() if _INNER in one), None)
    if head is None:
        raise CheckpointError(f"The adapter {name!r} has no tensors in a model that it adapts. {_BY_PEFT}")
    inner = {one.removeprefix(head): own for one, own in everything.names.items() if one.startswith(head)}
    layers = _layers(inner, {one.removeprefix(head) for one in chosen.names.values()}, name)
    selection = Selection({}, skipped=dict(everything.skipped))
    for one, own in everything.names.items():
        new, why = _renamed(one, head, name, layers)
        if new is None:
            selection.skipped[own] = why
        else:
            selection.names[new] = own
    for alias, one in everything.ties.items():
        new_alias, new = _renamed(alias, head, name, layers)[0], _renamed(one, head, name, layers)[0]
        if new_alias is not None and new is not None:
            selection.ties[new_alias] = new
    merge = _Merge(source, name, chosen.config)
    computed: dict[str, Callable[[], torch.Tensor]] = {
        f"{layer.path}.{own.removeprefix(_BASE)}": partial(merge.tensor, layer, own.removeprefix(_BASE))
        for layer in layers.values()
        if not all(own.startswith(_BASE) for own in layer.tensors)
        for own in layer.tensors
        if own.startswith(_BASE)
    }
    return selection, computed


def _layers(inner: Mapping[str, str], of_adapter: set[str], adapter: str) -> dict[str, _Layer]:
    suffix = f".{_BASE}weight"
    layers = {path: _Layer(path) for one in inner if one.endswith(suffix) and (path := one.removesuffix(suffix))}
    unknown = []
    for one, own in inner.items():
        layer = _layer_of(one, layers)
        if layer is not None:
            rest = one.removeprefix(f"{layer.path}.")
            if rest.startswith(_BASE) or one in of_adapter:
                layer.tensors[rest] = own
        elif one in of_adapter and adapter in one.split(".") and _SAVED not in one:
            unknown.append(one)
    if unknown or not layers:
        which = brief(sorted(unknown or of_adapter))
        raise CheckpointError(f"The adapter has tensors that belong to no layer of the base: {which}. {_BY_PEFT}")
    return layers


def _layer_of(name: str, layers: Mapping[str, _Layer]) -> _Layer | None:
    """Return the layer that a tensor is in, whose names lie below the layer's."""
    path = name
    while path := path.rpartition(".")[0]:
        if path in layers:
            return layers[path]
    return None


def _renamed(name: str, head: str, adapter: str, layers: Mapping[str, _Layer]) -> tuple[str | None, str]:
    """Return a tensor's name in the base; or None, and why it is left out."""
    if not name.startswith(head):
        return None, "outside of the model that the adapter adapts"
    name = name.removeprefix(head)
    if _SAVED in name:
        path, _, rest = name.partition(_SAVED)
        saved_by, _, rest = rest.partition(".")
        return (f"{path}.{rest}", "") if saved_by == adapter else (None, "of another adapter")
    if _ORIGINAL in name:
        return None, "replaced by what the adapter saves"
    layer = _layer_of(name, layers)
    if layer is None:
        return name, ""
    rest = name.removeprefix(f"{layer.path}.")
    if rest.startswith(_BASE):
        return f"{layer.path}.{rest.removeprefix(_BASE)}", ""
    return None, "merged" if rest in layer.tensors else "of another adapter"


class _Merge:
    """Merges an adapter into one layer after the other."""

    def __init__(self, source: Source, adapter: str, config: Mapping[str, Any]):
        self._source, self._adapter = source, adapter
        self._config = _peft_config(config)
        self._turn = threading.Lock()
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        """The layer that was merged last, and its tensors: weight and bias are written one after the other."""

    def tensor(self, layer: _Layer, name: str) -> torch.Tensor:
        """Return a tensor of a layer, merged.

        Raises:
            CheckpointError: If PEFT does not merge the adapter into this layer.
        """
        with self._turn, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of patterns for other layers
            if self._last[0] != layer.path:
                self._last = (layer.path, self._merge(layer))
            return self._last[1][name]

    def _merge(self, layer: _Layer) -> dict[str, torch.Tensor]:
        import peft
        import torch

        from .writing.copy import read_tensors

        located = self._source.locate(layer.tensors.values())
        stored = read_tensors({own: located[source] for own, source in layer.tensors.items()})
        base = {own.removeprefix(_BASE): one for own, one in stored.items() if own.startswith(_BASE)}
        root = _in_place(layer.path, self._layer_of_base(layer.path, base, stored))
        try:
            config: Any = copy.copy(self._config)
            model = peft.get_peft_model(root, config, adapter_name=self._adapter, autocast_adapter_dtype=False)
            model.load_state_dict({f"{_INNER}{layer.path}.{own}": one for own, one in stored.items()}, assign=True)
            with torch.no_grad():
                merged: Any = model.merge_and_unload()
            plain = merged.get_submodule(layer.path)
            found: dict[str, torch.Tensor] = {name: plain.get_parameter(name).detach() for name in base}
        except (ValueError, RuntimeError, AttributeError, TypeError) as error:
            raise CheckpointError(f"PEFT does not merge the adapter into {layer.path}: {error}\n{_BY_PEFT}") from error
        for name, before in base.items():
            after = found[name]
            if (after.dtype, after.shape) != (before.dtype, before.shape):
                raise CheckpointError(
                    f"{layer.path}.{name} is {after.dtype} {list(after.shape)} after the merge and was {before.dtype} "
                    f"{list(before.shape)}. {_BY_PEFT}"
                )
        return found

    def _layer_of_base(
        self, path: str, base: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]
    ) -> torch.nn.Module:
        from torch import nn

        weight = base["weight"]
        if weight.ndim != 2 or not weight.is_floating_point() or not set(base) <= {"weight", "bias"}:
            found = {name: f"{one.dtype} {list(one.shape)}" for name, one in base.items()}
            raise CheckpointError(
                f"{path} is no linear layer and no embedding in floating point: its base has {found}. {_BY_PEFT}"
            )
        layer: nn.Module
        if any("embedding" in own for own in stored):
            layer = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
        elif getattr(self._config, "fan_in_fan_out", False):
            from transformers.pytorch_utils import Conv1D

            make: Any = Conv1D
            layer = make(weight.shape[1], weight.shape[0])
        else:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in base, device="meta")
        for name, value in base.items():
            setattr(layer, name, nn.Parameter(value.clone(), requires_grad=False))
        return layer


def _peft_config(config: Mapping[str, Any]) -> Any:
    """Return PEFT's configuration for layers alone, whose weights are loaded and not initialized."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Merging an adapter into its base needs PEFT: pip install peft.") from error
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "adapter_config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        made: Any = peft.PeftConfig.from_pretrained(folder)
    made.task_type = made.modules_to_save = None
    for name in ("init_lora_weights", "init_ia3_weights"):
        if hasattr(made, name):
            setattr(made, name, False)
    return made


def _in_place(path: str, layer: torch.nn.Module) -> torch.nn.Module:
    """Return a model with nothing but a layer, at its place: PEFT chooses layers, ranks and scales by their names."""
    from torch import nn

    root = module = nn.Module()
    *above, last = path.split(".")
    for part in above:
        module.add_module(part, child := nn.Module())
        module = child
    module.add_module(last, layer)
    return root
